//! Tests of constraints and grammars.

use std::path::Path;
use std::time::{Duration, Instant};

use firebox_store::Checkpoint;
use firebox_testing::grammar::rules;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

#[test]
fn the_fuzzing_corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/grammar");
    let grammars = std::fs::read_dir(folder).unwrap();
    let translated = grammars
        .filter(|grammar| {
            firebox_testing::checks::gbnf::check(
                &std::fs::read(grammar.as_ref().unwrap().path()).unwrap(),
                gbnf::to_lark,
            )
        })
        .count();
    assert!(translated > 0);
}

pub(super) const FAMILIES: [&str; 9] =
    ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "gemma3_text", "smollm3", "phi3"];

pub(super) fn tokenizer(family: &str) -> Arc<Tokenizer> {
    let path = format!("../../tests/fixtures/gguf/{family}/model.gguf");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let checkpoint = Checkpoint::open(path).unwrap();
    Arc::new(Tokenizer::new(checkpoint.text(), checkpoint.config()).unwrap())
}

/// Returns a tokenizer with a token for every byte, some words, and an end.
pub(super) fn bytes() -> Arc<Tokenizer> {
    let mut moved = (0x100..).filter_map(char::from_u32);
    let mut letters: Vec<String> = (0..=255u8)
        .map(|byte| match byte {
            0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte).to_string(),
            _ => moved.next().unwrap().to_string(),
        })
        .collect();
    letters.extend(["true", "\":", "{\"", "ab", "Ġa", "<|end|>"].map(String::from));
    let count = letters.len();
    let vocabulary = firebox_text::GgufVocabulary {
        model: "gpt2".into(),
        tokens: letters,
        token_types: (0..count).map(|at| if at + 1 == count { 3 } else { 1 }).collect(),
        eos: Some(count as u32 - 1),
        ..Default::default()
    };
    let source = Some(firebox_text::TokenizerSource::Gguf(vocabulary));
    let assets = firebox_text::TextAssets { tokenizer: source, ..Default::default() };
    Arc::new(Tokenizer::new(&assets, &Value::Null).unwrap())
}

fn constraint(grammar: &Grammar, family: &str) -> Constraint {
    Constraint::new(grammar, &tokenizer(family), &[]).unwrap()
}

/// Returns whether a text is permitted to its end, byte by byte.
fn fits(grammar: &Grammar, text: &str) -> bool {
    thread_local!(static BYTES: Arc<Tokenizer> = bytes());
    let mut constraint = BYTES.with(|bytes| Constraint::new(grammar, bytes, &[]).unwrap());
    // The first 256 tokens are the bytes in order.
    let accepted = text.bytes().all(|byte| constraint.accept(u32::from(byte)).is_ok());
    accepted && constraint.may_end().unwrap()
}

fn gbnf(text: &str) -> Grammar {
    Grammar::Gbnf(text.into())
}

#[test]
fn a_mask_leaves_permitted_tokens() {
    for family in FAMILIES {
        let tokenizer = tokenizer(family);
        let mut constraint = Constraint::new(&Grammar::Regex("(ab|b)c".into()), &tokenizer, &[]).unwrap();
        let width = tokenizer.vocab_size() + 7;
        let begins: Vec<u32> = (0..width as u32)
            .filter(|&id| {
                let bytes = tokenizer.token_bytes(id).filter(|bytes| !bytes.is_empty());
                !tokenizer.is_control(id)
                    && bytes
                        .is_some_and(|bytes| [&b"abc"[..], b"bc"].iter().any(|text| text.starts_with(bytes)))
            })
            .collect();
        assert!(!begins.is_empty());
        let mut logits = vec![1.0; width];
        logits[begins[0] as usize] = f32::NAN;
        constraint.mask(&mut logits).unwrap();
        for (id, logit) in logits.iter().enumerate() {
            // Of tokens with the same bytes one is enough.
            assert!(begins.contains(&(id as u32)) || *logit == f32::NEG_INFINITY, "{family}, {id}");
            assert!(!logit.is_nan());
        }
        assert!(logits.iter().any(|logit| *logit > f32::NEG_INFINITY), "{family}");
    }
}

#[test]
fn a_text_ends_where_its_grammar_permits() {
    let tokenizer = tokenizer("llama");
    let end = tokenizer.eos_ids()[0];
    let letter = tokenizer.encode_literal("x", false).unwrap();
    let letter = *letter.last().unwrap();
    let mut constraint = Constraint::new(&Grammar::Regex("x{1,2}".into()), &tokenizer, &[]).unwrap();
    assert_eq!(constraint.accept(end), Err(GrammarError::Refused { token: end }));
    constraint.accept(letter).unwrap();
    assert!(!constraint.ended() && constraint.may_end().unwrap());
    let mut other = constraint.clone();
    other.accept(end).unwrap();
    assert!(other.ended() && !constraint.ended());
    constraint.accept(letter).unwrap();
    assert!(constraint.ended());
    assert!(constraint.accept(letter).is_err() && constraint.forced().is_empty());
    assert!(Constraint::new(&Grammar::Regex(String::new()), &tokenizer, &[]).unwrap().ended());
}

#[test]
fn end_tokens_are_permitted_where_the_text_may_end() {
    let tokenizer = tokenizer("llama");
    let spelled = |text: &str| *tokenizer.encode_literal(text, false).unwrap().last().unwrap();
    let (letter, also_ends) = (spelled("x"), spelled("y"));
    let mut constraint = Constraint::new(&Grammar::Regex("y?x+".into()), &tokenizer, &[also_ends]).unwrap();
    let permitted = |constraint: &mut Constraint| {
        let mut logits = vec![0.0; tokenizer.vocab_size()];
        constraint.mask(&mut logits).unwrap();
        logits[also_ends as usize] == 0.0
    };
    assert!(!permitted(&mut constraint));
    constraint.accept(letter).unwrap();
    assert!(permitted(&mut constraint));
    constraint.accept(also_ends).unwrap();
    assert!(constraint.ended());
}

#[test]
fn unknown_tokens_are_refused() {
    let mut constraint = constraint(&Grammar::JsonObject, "qwen3");
    for token in [320, 100_000, u32::MAX] {
        assert_eq!(constraint.accept(token), Err(GrammarError::Refused { token }));
    }
    assert_eq!(constraint.permitted(&[u32::MAX, 3]), 0);
    constraint.mask(&mut vec![0.0; 320]).unwrap();
    // Fewer logits than tokens, and no logits.
    assert!(matches!(constraint.mask(&mut []), Err(GrammarError::Stuck { .. })));
    constraint.mask(&mut vec![0.0; 320]).unwrap();
}

#[test]
fn forced_tokens_are_returned() {
    let schema = json!({
        "type": "object", "properties": { "temperature": { "type": "boolean" } },
        "required": ["temperature"], "additionalProperties": false,
    });
    for family in FAMILIES {
        let tokenizer = tokenizer(family);
        let mut constraint = Constraint::new(&Grammar::JsonSchema(schema.clone()), &tokenizer, &[]).unwrap();
        let spelled: Vec<u8> =
            constraint.forced().iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap().to_vec()).collect();
        assert!(
            b"{\"temperature\"".starts_with(&spelled[..]) && !spelled.is_empty(),
            "{family}: {spelled:?}"
        );
    }
}

#[test]
fn invalid_grammars_are_refused_with_the_reason() {
    let wrong = |grammar: Grammar, words: &[&str]| {
        let error = Constraint::new(&grammar, &tokenizer("llama"), &[]).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, GrammarError::Grammar { .. }), "{said}");
        assert!(words.iter().all(|word| said.contains(word)) && !said.contains('<'), "{said}");
    };
    wrong(Grammar::Regex("a(b".into()), &["regular expression", "unclosed group"]);
    wrong(Grammar::Lark("start: x".into()), &["Lark grammar", "1(8)", "x"]);
    wrong(Grammar::Lark("start: \"a\n".into()), &["1(10)"]);
    wrong(Grammar::Lark("a: \"b\"".into()), &["start"]);
    wrong(gbnf("root ::= [a"), &["GBNF grammar", "line 1, column 12"]);
    wrong(Grammar::JsonSchema(json!({ "type": "wrong" })), &["JSON schema", "wrong"]);
    wrong(Grammar::JsonSchema(json!({ "type": "string", "minLength": 4, "maxLength": 2 })), &["JSON schema"]);
    wrong(Grammar::JsonSchema(json!({ "$ref": "https://example.com/schema.json" })), &["example.com"]);
    wrong(Grammar::JsonSchema(json!({ "not": { "type": "string" } })), &["not"]);
    wrong(Grammar::JsonSchema(json!(false)), &["JSON schema"]);
    wrong(Grammar::JsonSchema(json!(7)), &["JSON schema"]);
}

#[test]
fn malicious_grammars_are_refused_in_time() {
    let mut deep = json!({ "type": "string" });
    let mut deeper = json!({ "type": "string" });
    for level in 0..300 {
        let inner = |schema: Value| json!({ "type": "array", "items": schema });
        if level < 90 {
            deep = inner(deep);
        }
        deeper = inner(deeper);
    }
    let doubled: String = (0..60).map(|at| format!("a{at} ::= a{0} a{0}\n", at + 1)).collect();
    let chain: String = (0..990).map(|at| format!("a{at} ::= \"(\" a{} | \"x\"\n", (at + 1) % 990)).collect();
    let bombs = [
        Grammar::Regex("(a{1000}){1000}".into()),
        Grammar::Regex("((a{1,100}){1,100}){1,100}b".into()),
        Grammar::Regex("(.*a.{20}){20}".into()),
        Grammar::Regex("(?i:[a-z]*x[a-z]{30}|y)*&".into()),
        Grammar::Regex("(".repeat(50_000)),
        Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(5000), ")".repeat(5000))),
        Grammar::Lark("start: (((\"a\"{1000}){1000}){1000}){1000}".into()),
        Grammar::JsonSchema(deep),
        Grammar::JsonSchema(deeper),
        Grammar::JsonSchema(
            json!({ "type": "array", "minItems": 1_000_000_000, "items": { "type": "integer" } }),
        ),
        Grammar::JsonSchema(json!({ "type": "string", "minLength": 500_000_000 })),
        Grammar::JsonSchema(json!({ "$defs": { "a": { "$ref": "#/$defs/a" } }, "$ref": "#/$defs/a" })),
        gbnf(&format!("root ::= a0\n{doubled}a60 ::= \"x\"")),
        gbnf(&format!("root ::= a0\n{chain}")),
        gbnf("root ::= ((\"a\"{9999}){9999}){9999}"),
        gbnf("root ::= root"),
        gbnf("root ::= root | root root | \"\""),
        gbnf(&format!("root ::= \"a\"{}", "?".repeat(100_000))),
        gbnf(&format!("root ::= x root | \"a\"\nx ::= {}", "\"a\"? ".repeat(20_000))),
    ];
    for bomb in &bombs {
        let began = Instant::now();
        let name = format!("{bomb:?}").chars().take(60).collect::<String>();
        let constraint = Constraint::new(bomb, &tokenizer("llama"), &[]);
        let said = format!("{:?} {:?}", began.elapsed(), constraint.as_ref().err());
        if let Ok(mut constraint) = constraint {
            let mut logits = vec![0.0; 320];
            for _ in 0..20 {
                if constraint.ended() || constraint.mask(&mut logits).is_err() {
                    break;
                }
                let token = logits.iter().position(|logit| *logit > f32::NEG_INFINITY).unwrap();
                if constraint.accept(token as u32).is_err() {
                    break;
                }
                logits.fill(0.0);
            }
        }
        println!("{:>8.1} ms {name} {said:.120}", began.elapsed().as_secs_f64() * 1e3);
        assert!(began.elapsed() < Duration::from_secs(60), "{name}");
    }
}

#[test]
fn grammars_of_too_many_symbols_are_refused_by_a_limit() {
    let names: String = (0..1100).map(|at| format!("r{at} ")).collect();
    let rules: String = (0..1100).map(|at| format!("r{at}: {}\n", "(x|y) ".repeat(100))).collect();
    let grammar = Grammar::Lark(format!("start: {names}\n{rules}x: \"a\"\ny: \"b\""));
    let error = Constraint::new(&grammar, &tokenizer("llama"), &[]).unwrap_err().to_string();
    assert!(error.contains("Lark grammar") && error.contains("65000"), "{error}");
}

#[test]
fn a_schema_of_a_hundred_kilobytes_is_not_too_large() {
    let fields = |kind: usize| {
        (0..40).map(move |at| {
            let schema = json!({ "type": "string", "description": "what is said of it", "maxLength": at });
            (format!("field-{kind}-{at}"), schema)
        })
    };
    let kinds = (0..40).map(|kind| {
        let properties: serde_json::Map<String, Value> = fields(kind).collect();
        let schema = json!({ "type": "object", "properties": properties, "additionalProperties": false });
        (format!("kind-{kind}"), schema)
    });
    let kinds: serde_json::Map<String, Value> = kinds.collect();
    let schema = json!({ "type": "object", "properties": kinds, "additionalProperties": false });
    assert!(schema.to_string().len() > 100_000);
    Constraint::new(&Grammar::JsonSchema(schema), &tokenizer("llama"), &[]).unwrap();
}

#[test]
fn gbnf_grammars_permit_their_texts() {
    let arithmetic = gbnf(
        "root ::= (expr \"=\" ws term \"\\n\")+\nexpr ::= term ([-+*/] term)*\n\
         term ::= ident | num | \"(\" ws expr \")\" ws\nident ::= [a-z] [a-z0-9_]* ws\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*",
    );
    assert!(fits(&arithmetic, "a1 +( 2*b) = 3\nx = y\n"));
    assert!(!fits(&arithmetic, "a + = 3\n") && !fits(&arithmetic, "(a=b\n"));
    // A word that would swallow the text after it.
    let swallowing = gbnf("root ::= \"(\" root \")\" | [a-z]+ \"b\" | [a-z]* \"c\"{2}");
    for text in ["ab", "bb", "(abb)", "((xcc))", "cc", "(ccc)"] {
        assert!(fits(&swallowing, text), "{text}");
    }
    for text in ["b", "a", "(ab", "c", "()"] {
        assert!(!fits(&swallowing, text), "{text}");
    }
    let moves = gbnf("root ::= \"1. \" move \" \" move\nmove ::= ([a-h] [1-8] | \"O-O\" \"-O\"?) [+#]?");
    assert!(fits(&moves, "1. e4 O-O-O+") && fits(&moves, "1. O-O a1") && !fits(&moves, "1. e9 e4"));
    let escapes =
        gbnf("root ::= [^\"\\\\\\x00-\\x1F] \"\\\"/\\\\\" . [\\u00e9-\\u00ea] [-a] \"\\U0001F600\"?");
    assert!(
        fits(&escapes, "ä\"/\\日é-")
            && fits(&escapes, "]\"/\\\nêa\u{1F600}")
            && !fits(&escapes, "\"\"/\\xéa")
    );
}

#[test]
fn a_grammar_may_contain_special_tokens() {
    let tokenizer = tokenizer("qwen3");
    let (id, name) = (0..tokenizer.vocab_size() as u32)
        .find_map(|id| {
            let name = tokenizer.id_to_token(id)?;
            (tokenizer.is_control(id) && name.starts_with('<') && !tokenizer.is_eos(id)).then_some((id, name))
        })
        .unwrap();
    for grammar in [gbnf(&format!("root ::= {name} \"a\"")), Grammar::Lark(format!("start: {name} \"a\""))] {
        let mut constraint = Constraint::new(&grammar, &tokenizer, &[]).unwrap();
        assert_eq!(constraint.permitted(&[id]), 1);
        constraint.accept(id).unwrap();
    }
    // Written as text, it is a different sequence.
    let spelled = Grammar::Regex(format!("{}a", name.replace('|', "\\|")));
    assert_eq!(Constraint::new(&spelled, &tokenizer, &[]).unwrap().permitted(&[id]), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A grammar without recursion becomes one word and is exact.
    #[test]
    fn regular_grammars_are_exact(rule in rules(false), texts in prop::collection::vec("[abcd]{0,6}", 12)) {
        let grammar = gbnf(&format!("root ::= {}", rule.write()));
        for text in texts {
            let letters: Vec<char> = text.chars().collect();
            let expected = rule.ends(&rule, &letters, 0).contains(&letters.len());
            prop_assert_eq!(fits(&grammar, &text), expected, "{:?}, {}", grammar, text);
        }
    }

    /// A recursive grammar permits no other text, though perhaps not all of its own.
    #[test]
    fn nested_grammars_permit_nothing_else(rule in rules(true), texts in prop::collection::vec("[abc()]{0,7}", 12)) {
        let grammar = gbnf(&format!("root ::= {}", rule.write()));
        for text in texts {
            let letters: Vec<char> = text.chars().collect();
            let expected = rule.ends(&rule, &letters, 0).contains(&letters.len());
            prop_assert!(expected || !fits(&grammar, &text), "{:?}, {}", grammar, text);
        }
    }
}

/// Vocabularies that cannot spell what a grammar requires, or anything.
#[test]
fn a_text_that_no_token_spells_is_stuck() {
    let of = |tokens: &[&str]| {
        let vocabulary = firebox_text::GgufVocabulary {
            model: "gpt2".into(),
            tokens: tokens.iter().map(|token| token.to_string()).collect(),
            token_types: vec![3; tokens.len() - 1].into_iter().chain([1]).collect(),
            ..Default::default()
        };
        let source = Some(firebox_text::TokenizerSource::Gguf(vocabulary));
        let assets = firebox_text::TextAssets { tokenizer: source, ..Default::default() };
        Arc::new(Tokenizer::new(&assets, &Value::Null).unwrap())
    };
    let long = "x".repeat(5000);
    for tokens in [&["x"][..], &["<a>", "<b>", &long], &["<", ">", "a"]] {
        for grammar in [Grammar::Regex("bc".into()), Grammar::JsonObject, Grammar::Regex("[b-d]+".into())] {
            let mut constraint = Constraint::new(&grammar, &of(tokens), &[]).unwrap();
            let mut logits = vec![0.0; tokens.len() + 3];
            assert!(matches!(constraint.mask(&mut logits), Err(GrammarError::Stuck { .. })), "{tokens:?}");
            assert!(constraint.mask(&mut logits).is_err() && constraint.accept(0).is_err());
            assert!(constraint.forced().is_empty() || constraint.permitted(&[0]) == 0);
        }
    }
}

/// Returns a vocabulary of the size of published ones: words of English and of programs, with leading spaces.
fn many_words(count: usize) -> Arc<Tokenizer> {
    let syllables = [
        "con", "ta", "ri", "on", "st", "er", "in", "pro", "le", "qu", "Ġthe", "Ġun", "ing", "_x", "mo", "lar",
    ];
    let mut letters: Vec<String> = (33u8..127).map(|byte| char::from(byte).to_string()).collect();
    letters.extend(
        ["Ġ", "Ċ", "ĉ", "ĠĠ", "ĠĠĠĠ", "\":", "{\"", "\",", "\"},", "]}", "Ġ\"", "):", "Ġ["].map(String::from),
    );
    let mut seen: std::collections::HashSet<String> = letters.iter().cloned().collect();
    let mut at = 1usize;
    while letters.len() < count {
        // Most words have two to four parts, one in eight is a number.
        let mut rest = at.wrapping_mul(2_654_435_761) >> 7;
        let mut word = if at.is_multiple_of(8) { (rest % 100_000).to_string() } else { String::new() };
        for _ in 0..2 + rest % 3 {
            rest /= 3;
            word += syllables[rest % syllables.len()];
            rest = rest / 7 + at;
        }
        if seen.insert(word.clone()) {
            letters.push(word);
        }
        at += 1;
    }
    letters.push("<|end|>".into());
    let types = (0..=count).map(|at| if at == count { 3 } else { 1 }).collect();
    let vocabulary = firebox_text::GgufVocabulary {
        model: "gpt2".into(),
        tokens: letters,
        token_types: types,
        eos: Some(count as u32),
        ..Default::default()
    };
    let source = Some(firebox_text::TokenizerSource::Gguf(vocabulary));
    let assets = firebox_text::TextAssets { tokenizer: source, ..Default::default() };
    Arc::new(Tokenizer::new(&assets, &Value::Null).unwrap())
}

#[test]
#[ignore = "measure: alone, and in release"]
fn cost_of_a_mask() {
    let tokenizer = many_words(150_000);
    let began = Instant::now();
    Vocabulary::of(&tokenizer).unwrap();
    println!(
        "vocabulary of {} made in {:.0} ms",
        tokenizer.vocab_size(),
        began.elapsed().as_secs_f64() * 1e3
    );
    let record = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age", "tags"],
        "properties": {
            "name": { "type": "string", "maxLength": 40 }, "age": { "type": "integer", "minimum": 0, "maximum": 150 },
            "tags": { "type": "array", "maxItems": 5, "items": { "type": "string" } },
        },
    });
    let json_gbnf = "root ::= object\nvalue ::= object | array | string | number | (\"true\" | \"false\" | \"null\") ws\n\
        object ::= \"{\" ws (string \":\" ws value (\",\" ws string \":\" ws value)*)? \"}\" ws\n\
        array ::= \"[\" ws (value (\",\" ws value)*)? \"]\" ws\n\
        string ::= \"\\\"\" ([^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ([\"\\\\/bfnrt] | \"u\" [0-9a-fA-F]{4}))* \"\\\"\" ws\n\
        number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws\n\
        ws ::= | \" \" | \"\\n\" [ \\t]{0,20}";
    for (name, grammar) in [
        ("schema", Grammar::JsonSchema(record)),
        ("any object", Grammar::JsonObject),
        ("regex", Grammar::Regex(r"[A-Z][a-z]+( [A-Za-z]+){0,20}\.".into())),
        ("gbnf json", gbnf(json_gbnf)),
        ("gbnf split", gbnf("root ::= \"(\" root \")\" | [a-z]* \"b\"")),
    ] {
        let (mut compiling, mut masks, mut accepting, mut sampling) =
            (Vec::new(), Vec::new(), Vec::new(), 0.0);
        for seed in 0..20u64 {
            let began = Instant::now();
            let mut constraint = Constraint::new(&grammar, &tokenizer, &[]).unwrap();
            compiling.push(began.elapsed().as_secs_f64() * 1e6);
            let mut random = seed;
            for _ in 0..60 {
                if constraint.ended() {
                    break;
                }
                let mut logits = vec![0.0; tokenizer.vocab_size()];
                let began = Instant::now();
                if let Err(error) = constraint.mask(&mut logits) {
                    println!("{name}: {error}");
                    break;
                }
                masks.push(began.elapsed().as_secs_f64() * 1e6);
                let began = Instant::now();
                let permitted: Vec<u32> =
                    (0u32..).zip(&logits).filter(|(_, logit)| **logit == 0.0).map(|(id, _)| id).collect();
                random = (random * 48_271 + 11) % 2_147_483_647;
                let token = permitted[random as usize % permitted.len()];
                sampling += began.elapsed().as_secs_f64() * 1e6;
                let began = Instant::now();
                constraint.accept(token).unwrap();
                accepting.push(began.elapsed().as_secs_f64() * 1e6);
            }
        }
        let count = masks.len();
        let of = |times: &mut Vec<f64>, share: f64| {
            times.sort_by(f64::total_cmp);
            times[((times.len() - 1) as f64 * share) as usize]
        };
        println!(
            "{name:>10}: grammar {:.0} µs; {count} masks, median {:.0} µs, p99 {:.0} µs, most {:.0} µs; accept {:.0} µs; sampling {:.0} µs",
            of(&mut compiling, 0.5),
            of(&mut masks, 0.5),
            of(&mut masks, 0.99),
            of(&mut masks, 1.0),
            of(&mut accepting, 0.5),
            sampling / count as f64,
        );
    }
}
