//! Tests that drafts within a batch change no token.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use firebox_runtime::{
    Finish, Generation, GenerationConfig, Grammar, KvType, LogProbabilities, Model, PagePool, SamplerConfig,
    device,
};
use firebox_telemetry::{Counter, Telemetry};
use proptest::prelude::*;
use serde_json::json;

use super::{SimulatedClock, run};
use crate::clock::Clock;
use crate::engine_core::{EngineConfig, EngineCore, StepOutcome};
use crate::event::Event;
use crate::request::Request;
use crate::sequence::RequestId;

const FAMILIES: [&str; 3] = ["llama", "qwen3_5_text", "gemma3_text"];

fn model(family: &str) -> Model {
    let path = format!("../../tests/fixtures/gguf/{family}/model.gguf");
    Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join(path), &device("cpu").unwrap()).unwrap()
}

#[derive(Debug, Clone)]
struct TextRequest {
    prompt: &'static str,
    config: GenerationConfig,
    lookup: bool,
}

fn grammars() -> Vec<Option<Grammar>> {
    let schema = json!({
        "type": "object",
        "properties": { "name": { "enum": ["first", "second"] }, "certain": { "const": "always the same" } },
        "required": ["name", "certain"],
        "additionalProperties": false,
    });
    vec![
        None,
        None,
        Some(Grammar::JsonSchema(schema)),
        Some(Grammar::Regex("(yes|no) it is, (yes|no) it is".into())),
    ]
}

fn text_request() -> impl Strategy<Value = TextRequest> {
    let prompts = ["He", "once upon a time once upon a time once upon a time", "one, two, one, two, one"];
    let sampler = prop::option::of(0u64..9).prop_map(|seed| match seed {
        Some(seed) => {
            SamplerConfig::default().with_temperature(1.0).with_seed(seed).with_repetition_penalty(1.1)
        }
        None => SamplerConfig::greedy(),
    });
    let stop =
        prop::sample::select(vec![vec![], vec!["e".to_owned()], vec!["th".to_owned(), "an".to_owned()]]);
    let grammar = prop::sample::select(grammars());
    let prompt = prop::sample::select(prompts.to_vec());
    let logprobs = prop::option::of(0usize..3);
    (prompt, sampler, stop, grammar, 1usize..40, logprobs, any::<bool>()).prop_map(
        |(prompt, sampler, stop, grammar, most, logprobs, lookup)| {
            let mut config = GenerationConfig::new()
                .with_max_tokens(most)
                .with_ignore_end(grammar.is_none())
                .with_sampler(sampler);
            // A stop string would cut the text that the grammar is checked against.
            config.stop = if grammar.is_some() { Vec::new() } else { stop };
            config.grammar = grammar;
            config.logprobs = logprobs;
            TextRequest { prompt, config, lookup }
        },
    )
}

type Answer = (String, Vec<u32>, Finish, Vec<Option<LogProbabilities>>);

fn answer_alone(model: &Model, text: &TextRequest) -> Answer {
    let tokenizer = model.tokenizer().unwrap();
    let mut session = model.session().unwrap().with_kv_type(KvType::F32);
    let prompt = tokenizer.encode(text.prompt, true).unwrap();
    let mut generation =
        Generation::begin(&mut session, Some(tokenizer.clone()), &prompt, text.config.clone()).unwrap();
    let mut logprobs = Vec::new();
    while let Some(piece) = generation.next_piece().unwrap() {
        logprobs.extend(piece.token.map(|_| piece.logprobs));
    }
    let summary = generation.finish().unwrap();
    (summary.text, summary.tokens, summary.finish, logprobs)
}

/// Answers texts together, each of which may be submitted some layers after the one before. Returns how many tokens
/// were drafted.
fn compare_batched(model: &Model, texts: &[(TextRequest, usize)]) -> usize {
    let clock = SimulatedClock(AtomicU64::new(0));
    let mut core = EngineCore::new(EngineConfig::default()).unwrap();
    let pool = PagePool::new(model.decoder().unwrap().layout(KvType::F32));
    core.add_in_pool("model", model.clone(), pool).unwrap();
    let (mut drafted, mut streamed) = (0, HashMap::<RequestId, (String, Vec<_>)>::new());
    let mut ended: HashMap<RequestId, Answer> = HashMap::new();
    let mut sink = |id: RequestId, event: Event| match event {
        Event::Piece(piece) => {
            let (text, logprobs) = streamed.entry(id).or_default();
            *text += &piece.text;
            logprobs.extend(piece.token.map(|_| piece.logprobs));
        }
        Event::Finished(outcome) => {
            let summary = outcome.summary;
            drafted += summary.drafted_tokens;
            let (text, logprobs) = streamed.remove(&id).unwrap_or_default();
            assert_eq!(text, summary.text, "the pieces add up to the text");
            ended.insert(id, (summary.text, summary.tokens, summary.finish, logprobs));
        }
        Event::Failed(failure) => panic!("{}", failure.error),
        Event::Waiting { .. } | Event::Vectors(_) | Event::Embedded(_) => {}
    };
    let mut ids = Vec::new();
    for (text, wait) in texts {
        let prompt = model.tokenizer().unwrap().encode(text.prompt, true).unwrap();
        let request = Request::new("model", prompt).with_config(text.config.clone()).with_lookup(text.lookup);
        ids.push(core.submit(request, clock.now()).map_err(|failure| failure.error).unwrap());
        for _ in 0..*wait {
            core.work(&clock, &mut sink);
        }
    }
    // Grammars are compiled on threads of their own.
    while core.work(&clock, &mut sink) != StepOutcome::Idle {}
    for (id, (text, _)) in ids.into_iter().zip(texts) {
        assert_eq!(ended[&id], answer_alone(model, text), "{text:?}");
    }
    drafted
}

/// Grammars, stop strings and log-probabilities included, with drafts by lookup and forced tokens.
#[test]
fn drafts_within_a_batch_change_no_token() {
    let models = FAMILIES.map(model);
    let drafted = AtomicU64::new(0);
    run(60, (0..FAMILIES.len(), prop::collection::vec((text_request(), 0usize..30), 1..5)), |(at, texts)| {
        drafted.fetch_add(compare_batched(&models[at], &texts) as u64, Ordering::Relaxed);
    });
    assert!(drafted.into_inner() > 0, "tokens were drafted");
}

#[test]
fn forced_tokens_are_drafted_without_being_asked_for() {
    let (model, telemetry) = (model("llama"), Telemetry::default());
    let model = model.with_telemetry(&telemetry, "model");
    let config =
        GenerationConfig::new().with_grammar(Grammar::Regex("this is certain, every letter of it".into()));
    let text = TextRequest { prompt: "He", config, lookup: false };
    let drafted = compare_batched(&model, &[(text, 0)]);
    assert!(drafted > 0);
    let counted = telemetry.snapshot().model("model").unwrap().meters.counters[&Counter::DraftedTokens];
    // The solo generation that the answer is compared with drafts them, too.
    assert_eq!(counted, 2 * drafted as u64);
}
