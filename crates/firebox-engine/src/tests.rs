//! Property tests of the engine: batching and time slicing change no answer.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use firebox_memory::thermal::Heat;
use firebox_runtime::decode::OutputState;
use firebox_runtime::{
    AttentionSinks, Finish, Generation, GenerationConfig, KvType, LookupDrafter, Model, ModelDrafter,
    PagePool, PrefixLimits, PrefixTree, SamplerConfig, Session, Speculation, device,
};
use firebox_schedule::{AdmissionConfig, Client, Priority};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::batch::Batch;
use super::clock::Clock;
use super::engine_core::{EngineConfig, EngineCore, StepOutcome};
use super::event::Event;
use super::request::Request;
use super::sequence::{RequestId, Sequence};

mod choices;
mod drafts;
mod failures;
mod fair;
mod prefixes;
mod requests;
mod setup;
mod stalled;

/// A clock that each reading advances by up to ten milliseconds.
#[derive(Debug, Default)]
struct SimulatedClock(AtomicU64);

impl Clock for SimulatedClock {
    fn now(&self) -> Duration {
        let before = self.0.fetch_add(1, Ordering::Relaxed);
        Duration::from_micros(before * 5_000 + before.wrapping_mul(0x9E37_79B9) % 5_000)
    }
}

const FIXTURES: [&str; 8] = [
    "reference/llama",
    "variants/mistral-window7-headdim12",
    "reference/qwen3_5_text",
    "reference/qwen3_moe",
    "reference/qwen3_next",
    "reference/lfm2_moe",
    "variants/mamba2-groups2-kernel3-biases",
    "reference/deepseek_v3",
];

fn models() -> Vec<Model> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    FIXTURES.map(|name| Model::open(root.join(name), &device("cpu").unwrap()).unwrap()).into()
}

#[derive(Debug, Clone)]
struct TestRequest {
    prompt: Vec<u32>,
    config: GenerationConfig,
    capacity: Option<usize>,
    drafts: Drafts,
}

/// The drafter of a request.
#[derive(Debug, Clone, Copy)]
enum Drafts {
    None,
    /// Drafts as many tokens as allowed, whether they are accepted or not.
    SteadyLookup,
    Lookup,
    /// Drafts with the model itself, which is always right.
    SteadyModel,
}

impl Drafts {
    fn speculation(self, model: &Model) -> Option<Speculation> {
        let by_model = || Speculation::new(ModelDrafter::new(model, model).unwrap()).steady();
        match self {
            Self::None => None,
            Self::SteadyLookup => Some(Speculation::new(LookupDrafter::new()).steady()),
            Self::Lookup => Some(Speculation::new(LookupDrafter::new())),
            Self::SteadyModel => Some(by_model().with_draft_tokens(3)),
        }
    }
}

/// An event between two layers of a batch.
#[derive(Debug, Clone)]
enum BatchEvent {
    Submit(TestRequest),
    Layers(usize),
    Pause(usize, bool),
    /// The sequence's cache is dropped.
    DropCache(usize),
    /// The sequence leaves the batch and joins it again as the last.
    Readd(usize),
    Cancel(usize),
}

fn test_request() -> impl Strategy<Value = TestRequest> {
    let repeated = (prop::collection::vec(3u32..160, 1..6), 2usize..5);
    let prompt = prop_oneof![
        prop::collection::vec(3u32..160, 1..24),
        repeated.prop_map(|(phrase, times)| phrase.repeat(times)),
    ];
    let capacity = prop::option::of(24usize..48);
    let drafts =
        prop::sample::select(vec![Drafts::None, Drafts::SteadyLookup, Drafts::Lookup, Drafts::SteadyModel]);
    let parts = (prompt, 1usize..14, prop::option::of(0u64..9), capacity, drafts);
    parts.prop_map(|(prompt, most, seed, capacity, drafts)| {
        let sampler = match seed {
            Some(seed) => SamplerConfig::default().with_temperature(1.0).with_seed(seed),
            None => SamplerConfig::greedy(),
        };
        let config = GenerationConfig::new().with_max_tokens(most).with_sampler(sampler);
        TestRequest { prompt, config, capacity, drafts }
    })
}

fn batch_event() -> impl Strategy<Value = BatchEvent> {
    prop_oneof![
        3 => test_request().prop_map(BatchEvent::Submit),
        6 => (1usize..12).prop_map(BatchEvent::Layers),
        1 => (0usize..4, any::<bool>()).prop_map(|(which, held)| BatchEvent::Pause(which, held)),
        1 => (0usize..4).prop_map(BatchEvent::DropCache),
        1 => (0usize..4).prop_map(BatchEvent::Readd),
        1 => (0usize..4).prop_map(BatchEvent::Cancel),
    ]
}

fn session(model: &Model, request: &TestRequest) -> Session {
    let session = model.session().unwrap().with_kv_type(KvType::F32).with_chunk(16);
    match request.capacity {
        // Recurrent layers cannot forget single tokens.
        Some(capacity) if !model.decoder().unwrap().layout(KvType::F32).is_recurrent() => {
            session.with_turn_capacity(capacity, AttentionSinks { first: 4 })
        }
        _ => session,
    }
}

fn answer_alone(model: &Model, request: &TestRequest) -> (Vec<u32>, Finish) {
    let mut session = session(model, request);
    let mut generation =
        Generation::begin(&mut session, None, &request.prompt, request.config.clone()).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    let summary = generation.finish().unwrap();
    (summary.tokens, summary.finish)
}

/// Runs sequences in one batch and compares each with a solo run. Returns how many tokens were drafted and accepted.
fn compare_batched(model: &Model, events: &[BatchEvent]) -> (usize, usize) {
    let clock = SimulatedClock(AtomicU64::new(0));
    let decoder = model.decoder().unwrap();
    let pool = PagePool::new(decoder.layout(KvType::F32));
    let mut batch = Batch::new(decoder.clone(), PrefixTree::new(&decoder, &pool, PrefixLimits::default()));
    let mut all: Vec<TestRequest> = Vec::new();
    let mut drafts = (0, 0);
    let mut cancelled = Vec::new();
    let mut streamed: HashMap<RequestId, Vec<u32>> = HashMap::new();
    let mut ended: HashMap<RequestId, (Vec<u32>, Finish)> = HashMap::new();
    let mut sink = |id: RequestId, event: Event| match event {
        Event::Piece(piece) => streamed.entry(id).or_default().extend(piece.token),
        Event::Finished(outcome) => {
            let summary = outcome.summary;
            assert!(summary.accepted_tokens <= summary.drafted_tokens);
            drafts = (drafts.0 + summary.drafted_tokens, drafts.1 + summary.accepted_tokens);
            assert!(ended.insert(id, (summary.tokens, summary.finish)).is_none());
        }
        Event::Failed(failure) => panic!("{}", failure.error),
        Event::Waiting { .. } | Event::Vectors(_) | Event::Embedded(_) => {}
    };
    let which = |batch: &Batch, at: usize| {
        let count = batch.sequences().len().max(1);
        batch.sequences().nth(at % count).map(|sequence| sequence.id)
    };
    for event in events {
        match event {
            BatchEvent::Submit(request) => {
                let id = RequestId(all.len() as u64);
                let output = OutputState::new(request.config.clone(), None).unwrap();
                let session = session(model, request);
                let (scope, priority) = (String::new(), Priority::Normal);
                let mut sequence =
                    Sequence::new(id, session, request.prompt.clone(), output, scope, priority, clock.now());
                sequence.speculation = request.drafts.speculation(model);
                sequence.start(batch.prefixes(), clock.now());
                batch.add(sequence);
                all.push(request.clone());
            }
            BatchEvent::Layers(count) => {
                for _ in 0..*count {
                    batch.step(&clock, &mut sink);
                }
            }
            BatchEvent::Pause(at, held) => {
                if let Some(id) = which(&batch, *at) {
                    batch.get_mut(id).unwrap().held = *held;
                }
            }
            BatchEvent::DropCache(at) => {
                let Some(id) = which(&batch, *at).filter(|id| !batch.is_in_pass(*id)) else { continue };
                // With a capacity, tokens that have attended to forgotten ones cannot be recomputed exactly.
                if all[id.0 as usize].capacity.is_none() {
                    batch.get_mut(id).unwrap().session.drop_cache();
                }
            }
            BatchEvent::Readd(at) => {
                if let Some(sequence) = which(&batch, *at).and_then(|id| batch.remove(id)) {
                    batch.add(sequence);
                }
            }
            BatchEvent::Cancel(at) => {
                if let Some(id) = which(&batch, *at) {
                    batch.get_mut(id).unwrap().cancelled = true;
                    cancelled.push(id);
                }
            }
        }
    }
    let count = batch.sequences().len();
    for at in 0..count {
        let id = which(&batch, at).unwrap();
        batch.get_mut(id).unwrap().held = false;
    }
    while batch.has_work() {
        batch.step(&clock, &mut sink);
    }
    assert_eq!(ended.len(), all.len(), "every request ends");
    for (index, request) in all.iter().enumerate() {
        let id = RequestId(index as u64);
        let (found, finish) = &ended[&id];
        assert_eq!(found, streamed.get(&id).unwrap_or(&Vec::new()));
        let (expected, why) = answer_alone(model, request);
        if cancelled.contains(&id) && *finish == Finish::Cancelled {
            assert!(expected.starts_with(found), "{found:?} of {expected:?}");
        } else {
            assert_eq!((found, *finish), (&expected, why), "{request:?}");
        }
    }
    drafts
}

/// An event of an engine with several models.
#[derive(Debug, Clone)]
enum EngineEvent {
    /// A request to a model, for so many choices.
    Submit(usize, Priority, TestRequest, usize),
    Steps(usize),
    Pause(usize, bool),
    Cancel(usize),
    Heat(Heat),
}

fn engine_event() -> impl Strategy<Value = EngineEvent> {
    let priority = prop::sample::select(Priority::ALL.to_vec());
    let heat = prop::sample::select(vec![Heat::Nominal, Heat::Serious, Heat::Critical]);
    prop_oneof![
        3 => (0usize..3, priority, test_request(), 1usize..4)
            .prop_map(|(model, priority, request, count)| EngineEvent::Submit(model, priority, request, count)),
        6 => (1usize..20).prop_map(EngineEvent::Steps),
        1 => (0usize..6, any::<bool>()).prop_map(|(which, held)| EngineEvent::Pause(which, held)),
        1 => (0usize..6).prop_map(EngineEvent::Cancel),
        1 => heat.prop_map(EngineEvent::Heat),
    ]
}

fn compare_time_sliced(models: &[Model], pages: usize, events: &[EngineEvent]) {
    let clock = SimulatedClock(AtomicU64::new(0));
    let admission = AdmissionConfig { most_running: 3, ..AdmissionConfig::default() };
    let mut core = EngineCore::new(EngineConfig { admission, ..EngineConfig::default() }).unwrap();
    for (index, model) in models.iter().enumerate() {
        let pool = PagePool::with_pages(model.decoder().unwrap().layout(KvType::F32), pages);
        // One of the models is its own draft model.
        let model = if index == 1 { model.clone().with_draft(model.clone()).unwrap() } else { model.clone() };
        core.add_in_pool(&index.to_string(), model, pool).unwrap();
    }
    let mut all: Vec<(usize, TestRequest, RequestId)> = Vec::new();
    let mut cancelled = Vec::new();
    let mut streamed: HashMap<RequestId, Vec<u32>> = HashMap::new();
    let mut ended: HashMap<RequestId, (Vec<u32>, Finish)> = HashMap::new();
    let mut sink = |id: RequestId, event: Event| match event {
        Event::Piece(piece) => streamed.entry(id).or_default().extend(piece.token),
        Event::Finished(outcome) => {
            let summary = outcome.summary;
            assert!(ended.insert(id, (summary.tokens, summary.finish)).is_none());
        }
        Event::Failed(failure) => panic!("{}", failure.error),
        Event::Waiting { .. } | Event::Vectors(_) | Event::Embedded(_) => {}
    };
    for event in events {
        match event {
            EngineEvent::Submit(model, priority, test, count) => {
                // Keys are exact, so that recomputed sequences yield the same tokens.
                let request = Request::new(model.to_string(), test.prompt.clone())
                    .with_config(test.config.clone())
                    .with_lookup(!matches!(test.drafts, Drafts::None))
                    .with_priority(*priority);
                let client = Client::new(["one", "other"][test.prompt.len() % 2]);
                let ids = core.submit_choices(request.for_client(client), *count, clock.now());
                for (nth, id) in ids.map_err(|failure| failure.error).unwrap().into_iter().enumerate() {
                    let mut choice = TestRequest { capacity: None, ..test.clone() };
                    choice.config.sampler.seed += nth as u64;
                    all.push((*model, choice, id));
                }
            }
            EngineEvent::Steps(count) => {
                for _ in 0..*count {
                    core.work(&clock, &mut sink);
                }
            }
            EngineEvent::Pause(at, held) => {
                if let Some((.., id)) = all.get(at % all.len().max(1)) {
                    core.hold(*id, *held, clock.now());
                }
            }
            EngineEvent::Cancel(at) => {
                if let Some((.., id)) = all.get(at % all.len().max(1)) {
                    core.cancel(*id, clock.now(), &mut sink);
                    cancelled.push(*id);
                }
            }
            EngineEvent::Heat(heat) => core.set_heat(*heat),
        }
    }
    for (.., id) in &all {
        core.hold(*id, false, clock.now());
    }
    let (mut idle, mut steps) = (0, 0);
    while idle < 3 {
        steps += 1;
        assert!(steps < 20_000, "the engine does not become idle: {} of {} ended", ended.len(), all.len());
        match core.work(&clock, &mut sink) {
            StepOutcome::Idle => idle += 1,
            StepOutcome::Layer { .. } | StepOutcome::Waiting => idle = 0,
        }
    }
    assert_eq!(ended.len(), all.len(), "every request ends: {events:?}");
    for (model, request, id) in &all {
        let (found, finish) = &ended[id];
        assert_eq!(found, streamed.get(id).unwrap_or(&Vec::new()));
        let (expected, why) = answer_alone(&models[*model], request);
        if cancelled.contains(id) && *finish == Finish::Cancelled {
            assert!(expected.starts_with(found), "{found:?} of {expected:?}");
        } else {
            assert_eq!((found, *finish), (&expected, why), "{request:?}");
        }
    }
}

fn run<S: Strategy>(cases: u32, strategy: S, check: impl Fn(S::Value)) {
    let cases = std::env::var("FIREBOX_SCHEDULES").map_or(cases, |cases| cases.parse().unwrap());
    let mut runner =
        TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() });
    let done = runner.run(&strategy, |value| {
        check(value);
        Ok(())
    });
    if let Err(error) = done {
        panic!("{error}");
    }
}

/// Covers several models, with little memory and changing heat.
#[test]
fn time_slicing_changes_no_answer() {
    let models = models();
    run(300, (1usize..4, prop::collection::vec(engine_event(), 4..24)), |(pages, events)| {
        compare_time_sliced(&models[..3], pages, &events);
    });
}

/// Covers sequences that join, leave, pause, are cancelled or lose their cache between any two layers.
#[test]
fn batching_changes_no_answer() {
    let models = models();
    let (drafted, accepted) = (AtomicU64::new(0), AtomicU64::new(0));
    run(400, (0..FIXTURES.len(), prop::collection::vec(batch_event(), 4..24)), |(model, events)| {
        let drafts = compare_batched(&models[model], &events);
        drafted.fetch_add(drafts.0 as u64, Ordering::Relaxed);
        accepted.fetch_add(drafts.1 as u64, Ordering::Relaxed);
    });
    let (drafted, accepted) = (drafted.into_inner(), accepted.into_inner());
    assert!(accepted > 0 && drafted > accepted, "{accepted} of {drafted} draft tokens were accepted");
}

/// Covers a batch that decodes, where prefill passes are short, and one that does not.
#[test]
fn short_prompts_do_not_wait_for_long_ones() {
    let (model, clock) = (models().remove(0), SimulatedClock(AtomicU64::new(0)));
    let (long, short, decoding) = (RequestId(0), RequestId(1), RequestId(2));
    for beside in [false, true] {
        let decoder = model.decoder().unwrap();
        let pool = PagePool::new(decoder.layout(KvType::F32));
        let mut batch =
            Batch::new(decoder.clone(), PrefixTree::new(&decoder, &pool, PrefixLimits::default()));
        let mut order = Vec::new();
        let mut sink = |id: RequestId, event: Event| match event {
            Event::Piece(_) if !order.contains(&id) => order.push(id),
            Event::Failed(failure) => panic!("{}", failure.error),
            _ => {}
        };
        let submit = |batch: &mut Batch, id: RequestId, prompt: usize, most: usize| {
            let config = GenerationConfig::new().with_max_tokens(most).with_ignore_end(true);
            let request = TestRequest {
                prompt: (0..prompt as u32).map(|at| 3 + at % 150).collect(),
                config,
                capacity: None,
                drafts: Drafts::None,
            };
            let output = OutputState::new(request.config.clone(), None).unwrap();
            let (session, scope) = (session(&model, &request), String::new());
            let mut sequence =
                Sequence::new(id, session, request.prompt, output, scope, Priority::Normal, clock.now());
            sequence.start(batch.prefixes(), clock.now());
            batch.add(sequence);
        };
        if beside {
            submit(&mut batch, decoding, 3, 100);
            (0..20).for_each(|_| drop(batch.step(&clock, &mut sink)));
        }
        submit(&mut batch, long, 300, 1);
        (0..5).for_each(|_| drop(batch.step(&clock, &mut sink)));
        submit(&mut batch, short, 20, 1);
        while batch.has_work() {
            batch.step(&clock, &mut sink);
        }
        order.retain(|id| *id != decoding);
        assert_eq!(order, [short, long], "beside decoding: {beside}");
    }
}

/// An engine of one model that runs at most `most_running` requests at once, and its clock.
fn one_model(most_running: usize) -> (EngineCore, SimulatedClock) {
    let admission = AdmissionConfig { most_running, ..AdmissionConfig::default() };
    let mut core = EngineCore::new(EngineConfig { admission, ..EngineConfig::default() }).unwrap();
    core.add("model", models().remove(0)).unwrap();
    (core, SimulatedClock(AtomicU64::new(0)))
}

fn answer_of(tokens: usize) -> Request {
    let config = GenerationConfig::new().with_max_tokens(tokens).with_ignore_end(true);
    Request::new("model", vec![3, 5, 8]).with_config(config)
}
