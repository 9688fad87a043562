//! Property tests of the engine: batching and time slicing change no answer.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firebox_memory::thermal::Heat;
use firebox_runtime::decode::OutputState;
use firebox_runtime::residency::{ShareOptions, SharedBudget};
use firebox_runtime::{
    AttentionSinks, Finish, Generation, GenerationConfig, KvType, LookupDrafter, Model, ModelDrafter,
    PagePool, PrefixLimits, PrefixTree, RuntimeError, SamplerConfig, Session, Speculation, device,
};
use firebox_schedule::{AdmissionConfig, Priority, ScheduleError};
use firebox_telemetry::Telemetry;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::batch::Batch;
use super::clock::Clock;
use super::engine_core::{EngineConfig, EngineCore, StepOutcome};
use super::event::Event;
use super::request::Request;
use super::sequence::{RequestId, Sequence};

mod drafts;
mod prefixes;
mod preparing;

/// A clock that each reading advances by up to ten milliseconds.
#[derive(Debug, Default)]
struct MadeUp(AtomicU64);

impl Clock for MadeUp {
    fn now(&self) -> Duration {
        let before = self.0.fetch_add(1, Ordering::Relaxed);
        Duration::from_micros(before * 5_000 + before.wrapping_mul(0x9E37_79B9) % 5_000)
    }
}

const FIXTURES: [&str; 4] = [
    "reference/llama",
    "variants/mistral-window7-headdim12",
    "reference/qwen3_5_text",
    "reference/qwen3_moe",
];

fn models() -> Vec<Model> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    FIXTURES.map(|name| Model::open(root.join(name), &device("cpu").unwrap()).unwrap()).into()
}

#[derive(Debug, Clone)]
struct Asked {
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

/// An event between two layers.
#[derive(Debug, Clone)]
enum Happening {
    Joins(Asked),
    Layers(usize),
    Held(usize, bool),
    /// The sequence's cache is dropped.
    Evicted(usize),
    /// The sequence leaves the batch and joins it again as the last.
    Moved(usize),
    Cancelled(usize),
}

fn asked() -> impl Strategy<Value = Asked> {
    let repeated = (prop::collection::vec(3u32..160, 1..6), 2usize..5);
    let prompt = prop_oneof![
        prop::collection::vec(3u32..160, 1..24),
        repeated.prop_map(|(phrase, times)| phrase.repeat(times)),
    ];
    let capacity = prop::option::of(24usize..48);
    let drafts =
        prop::sample::select(vec![Drafts::None, Drafts::SteadyLookup, Drafts::Lookup, Drafts::SteadyModel]);
    let asked = (prompt, 1usize..14, prop::option::of(0u64..9), capacity, drafts);
    asked.prop_map(|(prompt, most, seed, capacity, drafts)| {
        let sampler = match seed {
            Some(seed) => SamplerConfig { temperature: 1.0, seed, ..SamplerConfig::default() },
            None => SamplerConfig::greedy(),
        };
        let config = GenerationConfig { max_tokens: Some(most), sampler, ..GenerationConfig::default() };
        Asked { prompt, config, capacity, drafts }
    })
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        3 => asked().prop_map(Happening::Joins),
        6 => (1usize..12).prop_map(Happening::Layers),
        1 => (0usize..4, any::<bool>()).prop_map(|(which, held)| Happening::Held(which, held)),
        1 => (0usize..4).prop_map(Happening::Evicted),
        1 => (0usize..4).prop_map(Happening::Moved),
        1 => (0usize..4).prop_map(Happening::Cancelled),
    ]
}

fn session(model: &Model, asked: &Asked) -> Session {
    let session = model.session().unwrap().with_kv_type(KvType::F32).with_chunk(16);
    match asked.capacity {
        // Recurrent layers cannot forget single tokens.
        Some(capacity) if !model.decoder().unwrap().layout(KvType::F32).is_recurrent() => {
            session.with_turn_capacity(capacity, AttentionSinks { first: 4 })
        }
        _ => session,
    }
}

fn alone(model: &Model, asked: &Asked) -> (Vec<u32>, Finish) {
    let mut session = session(model, asked);
    let mut generation = Generation::begin(&mut session, None, &asked.prompt, asked.config.clone()).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    let summary = generation.finish().unwrap();
    (summary.tokens, summary.finish)
}

/// Runs sequences in one batch and compares each with a solo run. Returns how many tokens were drafted and accepted.
fn together(model: &Model, happenings: &[Happening]) -> (usize, usize) {
    let clock = MadeUp(AtomicU64::new(0));
    let decoder = model.decoder().unwrap();
    let pool = PagePool::new(decoder.layout(KvType::F32));
    let mut lane = Batch::new(decoder.clone(), PrefixTree::new(&decoder, &pool, PrefixLimits::default()));
    let mut all: Vec<Asked> = Vec::new();
    let mut drafts = (0, 0);
    let mut cancelled = Vec::new();
    let mut said: HashMap<RequestId, Vec<u32>> = HashMap::new();
    let mut ended: HashMap<RequestId, (Vec<u32>, Finish)> = HashMap::new();
    let mut sink = |id: RequestId, event: Event| match event {
        Event::Piece(piece) => said.entry(id).or_default().extend(piece.token),
        Event::Finished(outcome) => {
            let summary = outcome.summary;
            assert!(summary.accepted_tokens <= summary.drafted_tokens);
            drafts = (drafts.0 + summary.drafted_tokens, drafts.1 + summary.accepted_tokens);
            assert!(ended.insert(id, (summary.tokens, summary.finish)).is_none());
        }
        Event::Failed(failure) => panic!("{}", failure.error),
        Event::Waiting { .. } => {}
    };
    let which = |lane: &Batch, at: usize| {
        let count = lane.sequences().len().max(1);
        lane.sequences().nth(at % count).map(|sequence| sequence.id)
    };
    for happening in happenings {
        match happening {
            Happening::Joins(asked) => {
                let id = RequestId(all.len() as u64);
                let answer = OutputState::new(asked.config.clone(), None).unwrap();
                let session = session(model, asked);
                let (scope, priority) = (String::new(), Priority::Normal);
                let mut sequence =
                    Sequence::new(id, session, asked.prompt.clone(), answer, scope, priority, clock.now());
                sequence.speculation = asked.drafts.speculation(model);
                sequence.starts(lane.prefixes(), clock.now());
                lane.join(sequence);
                all.push(asked.clone());
            }
            Happening::Layers(count) => {
                for _ in 0..*count {
                    lane.step(&clock, &mut sink);
                }
            }
            Happening::Held(at, held) => {
                if let Some(id) = which(&lane, *at) {
                    lane.get_mut(id).unwrap().held = *held;
                }
            }
            Happening::Evicted(at) => {
                let Some(id) = which(&lane, *at).filter(|id| !lane.is_passing(*id)) else { continue };
                // With a capacity, tokens that have attended to forgotten ones cannot be recomputed exactly.
                if all[id.0 as usize].capacity.is_none() {
                    lane.get_mut(id).unwrap().session.drop_cache();
                }
            }
            Happening::Moved(at) => {
                if let Some(sequence) = which(&lane, *at).and_then(|id| lane.leave(id)) {
                    lane.join(sequence);
                }
            }
            Happening::Cancelled(at) => {
                if let Some(id) = which(&lane, *at) {
                    lane.get_mut(id).unwrap().cancelled = true;
                    cancelled.push(id);
                }
            }
        }
    }
    let count = lane.sequences().len();
    for at in 0..count {
        let id = which(&lane, at).unwrap();
        lane.get_mut(id).unwrap().held = false;
    }
    while lane.has_work() {
        lane.step(&clock, &mut sink);
    }
    assert_eq!(ended.len(), all.len(), "every request ends");
    for (index, asked) in all.iter().enumerate() {
        let id = RequestId(index as u64);
        let (found, finish) = &ended[&id];
        assert_eq!(found, said.get(&id).unwrap_or(&Vec::new()));
        let (expected, why) = alone(model, asked);
        if cancelled.contains(&id) && *finish == Finish::Cancelled {
            assert!(expected.starts_with(found), "{found:?} of {expected:?}");
        } else {
            assert_eq!((found, *finish), (&expected, why), "{asked:?}");
        }
    }
    drafts
}

/// An event of a host with several models.
#[derive(Debug, Clone)]
enum Turn {
    Asked(usize, Priority, Asked),
    Works(usize),
    Held(usize, bool),
    Cancelled(usize),
    Heat(Heat),
}

fn event() -> impl Strategy<Value = Turn> {
    let priority = prop::sample::select(Priority::ALL.to_vec());
    let heat = prop::sample::select(vec![Heat::Nominal, Heat::Serious, Heat::Critical]);
    prop_oneof![
        3 => (0usize..3, priority, asked()).prop_map(|(model, priority, asked)| Turn::Asked(model, priority, asked)),
        6 => (1usize..20).prop_map(Turn::Works),
        1 => (0usize..6, any::<bool>()).prop_map(|(which, held)| Turn::Held(which, held)),
        1 => (0usize..6).prop_map(Turn::Cancelled),
        1 => heat.prop_map(Turn::Heat),
    ]
}

fn in_turn(models: &[Model], pages: usize, events: &[Turn]) {
    let clock = MadeUp(AtomicU64::new(0));
    let admission = AdmissionConfig { most_running: 3, ..AdmissionConfig::default() };
    let mut host = EngineCore::new(EngineConfig { admission, ..EngineConfig::default() }).unwrap();
    for (index, model) in models.iter().enumerate() {
        let pool = PagePool::with_pages(model.decoder().unwrap().layout(KvType::F32), pages);
        // One of the models is its own draft model.
        let model = if index == 1 { model.clone().with_draft(model.clone()).unwrap() } else { model.clone() };
        host.add_in_pool(&index.to_string(), model, pool).unwrap();
    }
    let mut all: Vec<(usize, Asked, RequestId)> = Vec::new();
    let mut cancelled = Vec::new();
    let mut said: HashMap<RequestId, Vec<u32>> = HashMap::new();
    let mut ended: HashMap<RequestId, (Vec<u32>, Finish)> = HashMap::new();
    let mut sink = |id: RequestId, event: Event| match event {
        Event::Piece(piece) => said.entry(id).or_default().extend(piece.token),
        Event::Finished(outcome) => {
            let summary = outcome.summary;
            assert!(ended.insert(id, (summary.tokens, summary.finish)).is_none());
        }
        Event::Failed(failure) => panic!("{}", failure.error),
        Event::Waiting { .. } => {}
    };
    for event in events {
        match event {
            Turn::Asked(model, priority, asked) => {
                // Keys are exact, so that recomputed sequences yield the same tokens.
                let request = Request::new(model.to_string(), asked.prompt.clone())
                    .with_config(asked.config.clone())
                    .with_lookup(!matches!(asked.drafts, Drafts::None))
                    .with_priority(*priority);
                let id = host.submit(request, clock.now()).map_err(|failure| failure.error).unwrap();
                all.push((*model, Asked { capacity: None, ..asked.clone() }, id));
            }
            Turn::Works(count) => {
                for _ in 0..*count {
                    host.work(&clock, &mut sink);
                }
            }
            Turn::Held(at, held) => {
                if let Some((.., id)) = all.get(at % all.len().max(1)) {
                    host.hold(*id, *held, clock.now());
                }
            }
            Turn::Cancelled(at) => {
                if let Some((.., id)) = all.get(at % all.len().max(1)) {
                    host.cancel(*id, clock.now(), &mut sink);
                    cancelled.push(*id);
                }
            }
            Turn::Heat(heat) => host.set_heat(*heat),
        }
    }
    for (.., id) in &all {
        host.hold(*id, false, clock.now());
    }
    let (mut idle, mut works) = (0, 0);
    while idle < 3 {
        works += 1;
        assert!(works < 20_000, "the host does not become idle: {} of {} ended", ended.len(), all.len());
        match host.work(&clock, &mut sink) {
            StepOutcome::Idle => idle += 1,
            StepOutcome::Layer { .. } | StepOutcome::Waiting => idle = 0,
        }
    }
    assert_eq!(ended.len(), all.len(), "every request ends: {events:?}");
    for (model, asked, id) in &all {
        let (found, finish) = &ended[id];
        assert_eq!(found, said.get(id).unwrap_or(&Vec::new()));
        let (expected, why) = alone(&models[*model], asked);
        if cancelled.contains(id) && *finish == Finish::Cancelled {
            assert!(expected.starts_with(found), "{found:?} of {expected:?}");
        } else {
            assert_eq!((found, *finish), (&expected, why), "{asked:?}");
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
fn in_turn_each_says_what_it_says_alone() {
    let models = models();
    run(300, (1usize..4, prop::collection::vec(event(), 4..24)), |(pages, events)| {
        in_turn(&models[..3], pages, &events);
    });
}

/// Covers sequences that join, leave, pause, are cancelled or lose their cache between any two layers.
#[test]
fn together_each_says_what_it_says_alone() {
    let models = models();
    let (drafted, accepted) = (AtomicU64::new(0), AtomicU64::new(0));
    run(400, (0..FIXTURES.len(), prop::collection::vec(happening(), 4..24)), |(model, happenings)| {
        let drafts = together(&models[model], &happenings);
        drafted.fetch_add(drafts.0 as u64, Ordering::Relaxed);
        accepted.fetch_add(drafts.1 as u64, Ordering::Relaxed);
    });
    let (drafted, accepted) = (drafted.into_inner(), accepted.into_inner());
    assert!(accepted > 0 && drafted > accepted, "{accepted} of {drafted} draft tokens were accepted");
}

/// Covers a batch that decodes, where prefill passes are short, and one that does not.
#[test]
fn a_question_does_not_wait_for_a_book() {
    let (model, clock) = (models().remove(0), MadeUp(AtomicU64::new(0)));
    let (book, question, answer) = (RequestId(0), RequestId(1), RequestId(2));
    for beside in [false, true] {
        let decoder = model.decoder().unwrap();
        let pool = PagePool::new(decoder.layout(KvType::F32));
        let mut lane = Batch::new(decoder.clone(), PrefixTree::new(&decoder, &pool, PrefixLimits::default()));
        let mut order = Vec::new();
        let mut sink = |id: RequestId, event: Event| match event {
            Event::Piece(_) if !order.contains(&id) => order.push(id),
            Event::Failed(failure) => panic!("{}", failure.error),
            _ => {}
        };
        let join = |lane: &mut Batch, id: RequestId, prompt: usize, most: usize| {
            let config =
                GenerationConfig { max_tokens: Some(most), ignore_end: true, ..GenerationConfig::default() };
            let asked = Asked {
                prompt: (0..prompt as u32).map(|at| 3 + at % 150).collect(),
                config,
                capacity: None,
                drafts: Drafts::None,
            };
            let answer = OutputState::new(asked.config.clone(), None).unwrap();
            let (session, scope) = (session(&model, &asked), String::new());
            let mut sequence =
                Sequence::new(id, session, asked.prompt, answer, scope, Priority::Normal, clock.now());
            sequence.starts(lane.prefixes(), clock.now());
            lane.join(sequence);
        };
        if beside {
            join(&mut lane, answer, 3, 100);
            (0..20).for_each(|_| drop(lane.step(&clock, &mut sink)));
        }
        join(&mut lane, book, 300, 1);
        (0..5).for_each(|_| drop(lane.step(&clock, &mut sink)));
        join(&mut lane, question, 20, 1);
        while lane.has_work() {
            lane.step(&clock, &mut sink);
        }
        order.retain(|id| *id != answer);
        assert_eq!(order, [question, book], "beside an answer: {beside}");
    }
}

/// A host of one model that runs at most `most_running` requests at once, and its clock.
fn small(most_running: usize) -> (EngineCore, MadeUp) {
    let admission = AdmissionConfig { most_running, ..AdmissionConfig::default() };
    let mut host = EngineCore::new(EngineConfig { admission, ..EngineConfig::default() }).unwrap();
    host.add("model", models().remove(0)).unwrap();
    (host, MadeUp(AtomicU64::new(0)))
}

fn answer_of(tokens: usize) -> Request {
    let config =
        GenerationConfig { max_tokens: Some(tokens), ignore_end: true, ..GenerationConfig::default() };
    Request::new("model", vec![3, 5, 8]).with_config(config)
}

#[test]
fn who_is_held_and_cancelled_ends() {
    let (mut host, clock) = small(2);
    let mut ended = Vec::new();
    let mut sink = |id: RequestId, event: Event| match event {
        Event::Finished(outcome) => ended.push((id, outcome.summary.finish)),
        Event::Failed(failure) => panic!("{}", failure.error),
        Event::Piece(_) | Event::Waiting { .. } => {}
    };
    let id = host.submit(answer_of(1000), clock.now()).unwrap();
    // First in the middle of a pass, then between two.
    for _ in 0..7 {
        host.work(&clock, &mut sink);
    }
    host.hold(id, true, clock.now());
    host.cancel(id, clock.now(), &mut sink);
    for _ in 0..20 {
        host.work(&clock, &mut sink);
    }
    assert_eq!(ended, [(id, Finish::Cancelled)]);
    assert_eq!(host.under_way(), 0);
}

#[test]
fn a_session_comes_back_from_a_model_that_is_let_go_of() {
    let layers = models()[0].decoder().unwrap().layers();
    // Covers positions between passes and within one, in prefill and in decoding.
    for works in 0..=3 * layers {
        let (mut host, clock) = small(2);
        let asked = answer_of(1000).in_session(host.session("model").unwrap());
        let id = host.submit(asked, clock.now()).unwrap();
        for _ in 0..works {
            host.work(&clock, &mut |_, _| {});
        }
        let mut returned = None;
        let mut sink = |of: RequestId, event: Event| match event {
            Event::Failed(failure) => returned = Some((of, failure.session)),
            other => panic!("{other:?}"),
        };
        let model = host.remove("model", &mut sink).unwrap().unwrap();
        let (of, mut session) = returned.unwrap();
        assert_eq!(of, id);
        let session = session.as_mut().unwrap_or_else(|| panic!("after {works}"));
        let mut again = model.session().unwrap();
        let tokens = session.tokens().to_vec();
        let expected = again.feed(&[&tokens[..], &[7]].concat()).unwrap();
        assert_eq!(session.feed(&[7]).unwrap(), expected, "after {works}");
    }
}

#[test]
fn others_run_in_the_place_of_who_is_held() {
    let (mut host, clock) = small(1);
    let mut ended = Vec::new();
    let mut sink = |id: RequestId, event: Event| {
        if event.is_last() {
            ended.push(id);
        }
    };
    let slow = host.submit(answer_of(1000), clock.now()).unwrap();
    let other = host.submit(answer_of(4), clock.now()).unwrap();
    for _ in 0..5 {
        host.work(&clock, &mut sink);
    }
    host.hold(slow, true, clock.now());
    while host.work(&clock, &mut sink) != StepOutcome::Idle {}
    host.hold(slow, false, clock.now());
    host.cancel(slow, clock.now(), &mut sink);
    while host.work(&clock, &mut sink) != StepOutcome::Idle {}
    assert_eq!(ended, [other, slow]);
}

/// The queue of a model that is being opened is no longer than that of an open one.
#[test]
fn those_who_wait_for_a_model_to_open_are_not_too_many() {
    let admission = AdmissionConfig { most_running: 1, most_waiting: 2, ..AdmissionConfig::default() };
    let mut host = EngineCore::new(EngineConfig { admission, ..EngineConfig::default() }).unwrap();
    let (open, opens) = std::sync::mpsc::channel::<()>();
    let opens = std::sync::Mutex::new(opens);
    let opened = move || {
        opens.lock().unwrap().recv().unwrap();
        Ok(models().remove(0))
    };
    host.add_later("model", opened).unwrap();
    let clock = MadeUp(AtomicU64::new(0));
    for _ in 0..3 {
        host.submit(answer_of(2), clock.now()).unwrap();
    }
    let refused = host.submit(answer_of(2), clock.now()).unwrap_err();
    assert!(
        matches!(refused.error, RuntimeError::Schedule(ScheduleError::QueueFull { limit: 2, .. })),
        "{}",
        refused.error
    );
    host.submit(answer_of(2).with_priority(Priority::Interactive), clock.now()).unwrap();
    open.send(()).unwrap();
    let mut finished = 0;
    let mut sink = |_: RequestId, event: Event| finished += usize::from(matches!(event, Event::Finished(_)));
    while host.work(&clock, &mut sink) != StepOutcome::Idle {
        std::thread::sleep(Duration::from_micros(100));
    }
    assert_eq!(finished, 4);
}

#[test]
fn a_model_that_comes_while_it_is_hot_runs_as_few_as_others() {
    let mut host = EngineCore::new(EngineConfig::default()).unwrap();
    host.set_heat(Heat::Critical);
    host.add("model", models().remove(0)).unwrap();
    let clock = MadeUp(AtomicU64::new(0));
    let count = AdmissionConfig::default().most_running;
    for _ in 0..count {
        host.submit(answer_of(2), clock.now()).unwrap();
    }
    let mut waited = HashSet::new();
    let mut sink = |id: RequestId, event: Event| {
        if matches!(event, Event::Waiting { .. }) {
            waited.insert(id.0);
        }
    };
    while host.work(&clock, &mut sink) != StepOutcome::Idle {}
    assert_eq!(waited.len(), count - Heat::Critical.batch(count));
}

#[test]
fn a_model_that_was_removed_is_gone() {
    let (telemetry, shared) = (Telemetry::default(), SharedBudget::new(1 << 30).unwrap());
    let path = models()[0].checkpoint().path().to_owned();
    let model = shared.open(path, &device("cpu").unwrap(), &ShareOptions::default()).unwrap();
    let model = model.with_telemetry(&telemetry, "model");
    let decoder = Arc::downgrade(&model.decoder().unwrap());
    let mut host = EngineCore::new(EngineConfig::default()).unwrap();
    host.add("model", model).unwrap();
    drop(host.remove("model", &mut |_, _| {}).unwrap());
    // The pressure monitor may still hold a reference for a moment.
    let began = Instant::now();
    while decoder.upgrade().is_some() && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(decoder.upgrade().is_none());
}

#[test]
fn who_must_not_be_late_fails_with_its_session() {
    let (mut host, clock) = small(1);
    let (mut late, mut finished) = (Vec::new(), Vec::new());
    let mut sink = |id: RequestId, event: Event| match event {
        Event::Failed(failure) => {
            assert!(matches!(failure.error, RuntimeError::Late { .. }), "{}", failure.error);
            assert!(failure.session.is_some());
            late.push(id);
        }
        Event::Finished(_) => finished.push(id),
        Event::Piece(_) | Event::Waiting { .. } => {}
    };
    let first = host.submit(answer_of(60), clock.now()).unwrap();
    let soon = Duration::from_millis(50);
    let second = host.submit(answer_of(4).with_first_by(soon).or_not_at_all(), clock.now()).unwrap();
    let third = host.submit(answer_of(4).with_first_by(soon), clock.now()).unwrap();
    while host.work(&clock, &mut sink) != StepOutcome::Idle {}
    assert_eq!((late, finished), (vec![second], vec![first, third]));
}
