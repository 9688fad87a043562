//! Tests of generation under a grammar.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

use firebox_testing::grammar::{Rule, rules};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::decode::{OutputState, ScoreRow};
use crate::{
    Draft, Drafter, Finish, Generation, GenerationConfig, Grammar, GrammarError, LookupDrafter, Model,
    ModelDrafter, RuntimeError, Sampler, SamplerConfig, Session, Speculation, Summary, device,
};

fn gbnf(text: &str) -> Grammar {
    Grammar::Gbnf(text.into())
}

const RUN: [&str; 4] = ["llama", "qwen3", "qwen3_5_text", "gemma3_text"];

fn model(family: &str) -> Model {
    static OPEN: Mutex<Option<HashMap<String, Model>>> = Mutex::new(None);
    let mut open = OPEN.lock().unwrap();
    let path = format!("../../tests/fixtures/gguf/{family}/model.gguf");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let opened = || Model::open(path, &device("cpu").unwrap()).unwrap();
    open.get_or_insert_default().entry(family.into()).or_insert_with(opened).clone()
}

fn config(grammar: &Grammar, seed: u64) -> GenerationConfig {
    let sampler = SamplerConfig { temperature: 1.0, seed, ..SamplerConfig::default() };
    GenerationConfig {
        max_tokens: Some(600),
        grammar: Some(grammar.clone()),
        sampler,
        ..GenerationConfig::default()
    }
}

fn generate(
    model: &Model,
    config: GenerationConfig,
    speculation: Option<&mut Speculation>,
) -> (Summary, Session) {
    let mut session = model.session().unwrap();
    let tokenizer = model.tokenizer().unwrap().clone();
    let prompt = tokenizer.encode("He", true).unwrap();
    let mut generation = Generation::begin(&mut session, Some(tokenizer), &prompt, config).unwrap();
    if let Some(speculation) = speculation {
        generation = generation.with_speculation(speculation);
    }
    let mut streamed = String::new();
    while let Some(piece) = generation.next_piece().unwrap() {
        streamed += &piece.text;
    }
    let summary = generation.finish().unwrap();
    assert_eq!(streamed, summary.text);
    (summary, session)
}

/// Token by token, with nothing ahead of its turn.
fn plainly(model: &Model, config: GenerationConfig) -> (Vec<u32>, Finish) {
    let mut session = model.session().unwrap();
    let tokenizer = model.tokenizer().unwrap().clone();
    let mut logits = session.feed(&tokenizer.encode("He", true).unwrap()).unwrap();
    let mut answer = OutputState::new(config, Some(tokenizer)).unwrap();
    while answer.finish().is_none() {
        if answer.room(session.tokens().len()) == 0 {
            answer.end(Finish::Length);
            break;
        }
        let token = answer.choose(ScoreRow::Logits(&logits), session.tokens()).unwrap();
        if answer.ends_at(token) {
            answer.end(Finish::Stop);
            break;
        }
        answer.add(token);
        logits = session.feed(&[token]).unwrap();
    }
    let finish = answer.finish().unwrap();
    (answer.take().tokens, finish)
}

/// Returns whether a value conforms to a schema of the kinds generated here.
fn is_fit(schema: &Value, value: &Value) -> bool {
    let number = |key: &str| schema.get(key).and_then(Value::as_f64);
    if let Some(choices) = schema.get("anyOf").and_then(Value::as_array) {
        return choices.iter().any(|schema| is_fit(schema, value));
    }
    if let Some(choices) = schema.get("enum").and_then(Value::as_array) {
        return choices.contains(value);
    }
    if let Some(constant) = schema.get("const") {
        return constant == value;
    }
    let within = |number_of: f64, least: &str, most: &str| {
        number(least).is_none_or(|least| number_of >= least)
            && number(most).is_none_or(|most| number_of <= most)
    };
    match schema["type"].as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        // "-0" is an integer, which serde_json reads as a number that is none.
        "integer" => {
            let number = value.as_f64();
            let negative_zero = number.is_some_and(|number| number == 0.0 && number.is_sign_negative());
            (value.is_i64() || negative_zero) && within(number.unwrap(), "minimum", "maximum")
        }
        "number" => value.as_f64().is_some_and(|number| within(number, "minimum", "maximum")),
        "string" => {
            let Some(text) = value.as_str() else { return false };
            let pattern = schema.get("pattern").is_none_or(|_| {
                let mut letters = text.chars();
                letters.next().is_some_and(|first| first.is_ascii_uppercase())
                    && letters.all(|letter| letter.is_ascii_digit())
                    && text.len() <= 4
            });
            pattern && within(text.chars().count() as f64, "minLength", "maxLength")
        }
        "array" => value.as_array().is_some_and(|values| {
            within(values.len() as f64, "minItems", "maxItems")
                && values.iter().all(|value| is_fit(&schema["items"], value))
        }),
        "object" => value.as_object().is_some_and(|fields| {
            let properties = schema["properties"].as_object().unwrap();
            fields
                .iter()
                .all(|(name, value)| properties.get(name).is_some_and(|schema| is_fit(schema, value)))
                && schema["required"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .all(|name| fields.contains_key(name.as_str().unwrap()))
        }),
        other => panic!("{other}"),
    }
}

fn schemas() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!({ "type": "null" })),
        Just(json!({ "type": "boolean" })),
        (-50i64..50, 0i64..2000).prop_map(
            |(least, more)| json!({ "type": "integer", "minimum": least, "maximum": least + more })
        ),
        (-5i64..5, 1i64..9)
            .prop_map(|(least, more)| json!({ "type": "number", "minimum": least, "maximum": least + more })),
        (0usize..3, 0usize..6).prop_map(
            |(least, more)| json!({ "type": "string", "minLength": least, "maxLength": least + more })
        ),
        Just(json!({ "type": "string", "pattern": "^[A-Z][0-9]{0,3}$" })),
        Just(json!({ "enum": ["red", "\"quoted\"", 7, null, { "a": [1] }] })),
        Just(json!({ "const": "certain\n" })),
    ];
    leaf.prop_recursive(3, 10, 3, |inner| {
        let fields = prop::collection::vec((inner.clone(), any::<bool>()), 0..4).prop_map(|fields| {
            let name = |at: usize| ["name", "a b", "x", "\"y\\"][at];
            let required: Vec<&str> =
                fields.iter().enumerate().filter(|(_, (_, required))| *required).map(|(at, _)| name(at)).collect();
            let properties: serde_json::Map<String, Value> =
                fields.iter().enumerate().map(|(at, (schema, _))| (name(at).into(), schema.clone())).collect();
            json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
        });
        let array = (inner.clone(), 0usize..2, 0usize..3).prop_map(
            |(items, least, more)| json!({ "type": "array", "items": items, "minItems": least, "maxItems": least + more }),
        );
        let either = prop::collection::vec(inner, 1..3).prop_map(|choices| json!({ "anyOf": choices }));
        prop_oneof![3 => fields, 2 => array, 1 => either]
    })
}

/// A regular expression of the same texts.
fn expression(rule: &Rule) -> String {
    let all = |rules: &[Rule], by: &str| rules.iter().map(expression).collect::<Vec<_>>().join(by);
    match rule {
        Rule::Set(set) => format!("[{}]", set.iter().collect::<String>()),
        Rule::Sequence(rules) => format!("({})", all(rules, "")),
        Rule::Choice(rules) => format!("({})", all(rules, "|")),
        Rule::Repeat(rule, least, None) => format!("({}){{{least},}}", expression(rule)),
        Rule::Repeat(rule, least, Some(most)) => format!("({}){{{least},{most}}}", expression(rule)),
        Rule::Nested(rule) => expression(rule),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn json_always_parses_and_fits(schema in schemas(), seed: u64, family in prop::sample::select(RUN.to_vec())) {
        let (summary, _) = generate(&model(family), config(&Grammar::JsonSchema(schema.clone()), seed), None);
        prop_assert_eq!(summary.finish, Finish::Stop, "{}: {}", schema, summary.text);
        let value: Value = match serde_json::from_str(&summary.text) {
            Ok(value) => value,
            Err(error) => return Err(TestCaseError::fail(format!("{error}: {schema}: {}", summary.text))),
        };
        prop_assert!(is_fit(&schema, &value), "{}: {}", schema, summary.text);
    }

    #[test]
    fn texts_match_their_regular_expression(rule in rules(false), seed: u64, family in prop::sample::select(RUN.to_vec())) {
        let expression = expression(&rule);
        let (summary, _) = generate(&model(family), config(&Grammar::Regex(expression.clone()), seed), None);
        let text: Vec<char> = summary.text.chars().collect();
        let whole = rule.ends(&rule, &text, 0).contains(&text.len());
        prop_assert!(whole && summary.finish == Finish::Stop, "{:?}: {}", summary, expression);
    }

    #[test]
    fn texts_are_of_their_grammar(rule in rules(true), seed: u64) {
        let grammar = gbnf(&format!("root ::= {}", rule.write()));
        let mut config = config(&grammar, seed);
        config.max_tokens = Some(40);
        let (summary, _) = generate(&model("llama"), config, None);
        let text: Vec<char> = summary.text.chars().collect();
        if summary.finish == Finish::Stop {
            prop_assert!(rule.ends(&rule, &text, 0).contains(&text.len()), "{:?}: {:?}", summary, grammar);
        }
    }

    /// Neither drafts nor what is certain change a token, nor the session that is left.
    #[test]
    fn drafts_do_not_show_under_a_grammar(schema in schemas(), seed: u64, wrong in 0usize..5, family in prop::sample::select(RUN.to_vec())) {
        let model = model(family);
        let grammar = Grammar::JsonSchema(schema.clone());
        let mut config = config(&grammar, seed);
        config.max_tokens = Some(80);
        let (expected, finish) = plainly(&model, config.clone());
        let (alone, session) = generate(&model, config.clone(), None);
        prop_assert_eq!(&alone.tokens, &expected, "{}", schema);
        let whole = session.tokens().to_vec();
        let drafts = [
            Speculation::new(Knowing { whole: whole.clone(), wrong }).steady(),
            Speculation::new(Knowing { whole: whole.clone(), wrong }),
            Speculation::new(LookupDrafter::new()).steady(),
            Speculation::new(ModelDrafter::new(&model, &model).unwrap()).steady(),
        ];
        for mut speculation in drafts {
            let (found, mut session) = generate(&model, config.clone(), Some(&mut speculation));
            prop_assert_eq!(&found.tokens, &expected, "{}, {:?}", schema, speculation);
            prop_assert_eq!(found.finish, finish);
            prop_assert_eq!(session.tokens(), &whole[..]);
            session.feed(&[7]).unwrap();
        }
    }
}

/// Knows how a sequence goes on, and says something that is forbidden at every `wrong`th place, if that is not 0.
#[derive(Debug)]
struct Knowing {
    whole: Vec<u32>,
    wrong: usize,
}

impl Drafter for Knowing {
    fn propose(&mut self, tokens: &[u32], most: usize, _: &Sampler) -> Result<Draft, RuntimeError> {
        let said = |at: usize| match self.wrong > 0 && at.is_multiple_of(self.wrong) {
            true => 1000,
            false => self.whole[at],
        };
        Ok((tokens.len()..self.whole.len()).take(most).map(said).collect::<Vec<_>>().into())
    }
}

fn person() -> Grammar {
    Grammar::JsonSchema(json!({
        "type": "object",
        "properties": { "temperature_in_celsius": { "type": "boolean" }, "description": { "const": "as ever" } },
        "required": ["temperature_in_celsius", "description"], "additionalProperties": false,
    }))
}

/// Forced tokens go through the layers together.
#[test]
fn forced_tokens_are_drafted_and_accepted() {
    for family in RUN {
        let (summary, _) = generate(&model(family), config(&person(), 3), None);
        assert!(summary.drafted_tokens > summary.tokens.len() / 2, "{family}: {summary:?}");
        assert_eq!(summary.accepted_tokens, summary.drafted_tokens, "{family}");
    }
}

#[test]
fn recursive_schemas_and_any_object_end_up_as_json() {
    let tree = json!({
        "$defs": { "node": { "type": "object", "additionalProperties": false, "required": ["next"], "properties": {
            "next": { "anyOf": [{ "type": "null" }, { "$ref": "#/$defs/node" }] },
        }}},
        "$ref": "#/$defs/node",
    });
    let mut complete = 0;
    for seed in 0..6 {
        for grammar in [Grammar::JsonSchema(tree.clone()), Grammar::JsonObject] {
            let (summary, _) = generate(&model("llama"), config(&grammar, seed), None);
            let value: Result<Value, _> = serde_json::from_str(&summary.text);
            match &value {
                Ok(value) => assert!(value.is_object(), "{summary:?}"),
                // Numbers of JSON may be of any size.
                Err(error) => {
                    let fits = error.to_string().starts_with("number out of range");
                    assert!(fits || summary.finish == Finish::Length, "{error}: {summary:?}");
                }
            }
            complete += usize::from(value.is_ok());
        }
    }
    assert!(complete > 5, "{complete}");
}

/// Whatever penalties, biases and limits do, no token comes that the grammar does not permit.
#[test]
fn no_setting_gets_around_a_grammar() {
    let model = model("qwen3");
    let tokenizer = model.tokenizer().unwrap();
    let grammar = Grammar::Regex("(yes|no){3}".into());
    let all: Vec<u32> = (0..tokenizer.vocab_size() as u32).collect();
    for bias in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 1e30, -1e30] {
        for temperature in [0.0, 1.0] {
            let mut config = config(&grammar, 1);
            config.ignore_end = true;
            config.sampler = SamplerConfig {
                temperature,
                top_k: 1,
                repetition_penalty: 5.0,
                logit_bias: all.iter().map(|&token| (token, bias)).collect(),
                ..config.sampler
            };
            let (summary, _) = generate(&model, config, None);
            let rest = summary.text.replace("yes", "").replace("no", "");
            assert!(rest.is_empty() && summary.finish == Finish::Stop, "{bias}: {summary:?}");
        }
    }
}

#[test]
fn an_answer_without_a_tokenizer_has_no_grammar() {
    let mut session = model("llama").session().unwrap();
    let begun = Generation::begin(&mut session, None, &[5], config(&Grammar::JsonObject, 0));
    assert!(matches!(begun, Err(RuntimeError::Constraint(GrammarError::NoTokenizer))));
}

#[test]
fn log_probabilities_come_with_every_token() {
    let model = model("qwen3");
    let tokenizer = model.tokenizer().unwrap().clone();
    let prompt = tokenizer.encode("He", true).unwrap();
    for grammar in [None, Some(person())] {
        let mut session = model.session().unwrap();
        let mut other = model.session().unwrap();
        let mut logits = other.feed(&prompt).unwrap();
        let mut config = config(&person(), 5);
        (config.grammar, config.logprobs, config.max_tokens) = (grammar, Some(3), Some(12));
        let mut generation =
            Generation::begin(&mut session, Some(tokenizer.clone()), &prompt, config).unwrap();
        let mut pieces = 0;
        while let Some(piece) = generation.next_piece().unwrap() {
            let Some(token) = piece.token else { continue };
            assert_eq!(piece.logprobs, Some(crate::LogProbabilities::new(&logits, token, 3)));
            logits = other.feed(&[token]).unwrap();
            pieces += 1;
        }
        assert!(pieces > 5);
    }
}
