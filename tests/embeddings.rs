//! Tests of embeddings as requests of an engine: they share passes with answers, and change nothing of either.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use firebox::engine::{Engine, EngineConfig, Event, Request};
use firebox::internals::engine::{Clock, EngineCore, RequestId, StepOutcome};
use firebox::internals::model::{Observer, Passed, StreamedConfig};
use firebox::internals::runtime::schedule::AdmissionConfig;
use firebox::internals::runtime::{Account, Budget, EmbedOptions, MemoryError};
use firebox::internals::store::{Checkpoint, ReadMethod, StreamConfig};
use firebox::residency::{ShareOptions, SharedBudget};
use firebox::{Finish, GenerationConfig, Model, RuntimeError, device};
use firebox_testing::model::SyntheticModel;

fn path(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/gguf/{family}/model.gguf"))
}

fn resident(family: &str) -> Model {
    Model::open(path(family), &device("cpu").unwrap()).unwrap()
}

/// A model whose weights are all read from disk while it runs.
fn streamed(family: &str) -> Model {
    let stream = StreamConfig { buffers: 2, ..StreamConfig::default() };
    let config = StreamedConfig { stream, method: Some(ReadMethod::Buffered), ..StreamedConfig::default() };
    Model::streamed(Checkpoint::open(path(family)).unwrap(), &device("cpu").unwrap(), &config).unwrap()
}

/// A clock that each reading advances by five milliseconds.
#[derive(Debug, Default)]
struct SimulatedClock(AtomicU64);

impl Clock for SimulatedClock {
    fn now(&self) -> Duration {
        Duration::from_millis(5 * self.0.fetch_add(1, Ordering::Relaxed))
    }
}

/// Counts rows that go through layers, and notes the count at every token.
#[derive(Debug, Default)]
struct Rows {
    all: AtomicUsize,
    at_logits: Mutex<Vec<usize>>,
}

impl Rows {
    fn of(model: &Model) -> Arc<Self> {
        let rows = Arc::new(Self::default());
        model.decoder().unwrap().set_observer(rows.clone());
        rows
    }

    fn all(&self) -> usize {
        self.all.load(Ordering::Relaxed)
    }
}

impl Observer for Rows {
    fn follows(&self) -> bool {
        true
    }

    fn layer(&self, _: usize, rows: usize, _: Instant) {
        self.all.fetch_add(rows, Ordering::Relaxed);
    }

    fn logits(&self, _: usize, _: Instant) {
        self.at_logits.lock().unwrap().push(self.all());
    }

    fn pass(&self, _: Passed, _: Instant) {}

    fn replay(&self, _: usize, _: Instant) {}
}

fn core(model: &Model, most_running: usize) -> EngineCore {
    let admission = AdmissionConfig { most_running, ..AdmissionConfig::default() };
    let mut core = EngineCore::new(EngineConfig { admission, ..EngineConfig::default() }).unwrap();
    core.add("model", model.clone()).unwrap();
    core
}

fn embedding<T: AsRef<str>>(model: &Model, texts: &[T]) -> Request {
    Request::embedding("model", model.embedding(texts, &EmbedOptions::default()).unwrap())
}

fn answer(seed: u32, tokens: usize) -> Request {
    let config = GenerationConfig::new().with_max_tokens(tokens).with_ignore_end(true);
    Request::new("model", vec![3 + seed, 5, 8]).with_config(config)
}

/// What a core sent.
#[derive(Debug, Default)]
struct Sent {
    vectors: Vec<(RequestId, usize, Vec<f32>)>,
    answers: Vec<(RequestId, Vec<u32>)>,
    embedded: Vec<(RequestId, Finish)>,
    failed: Vec<(RequestId, String)>,
}

impl Sent {
    fn take(&mut self, id: RequestId, event: Event) {
        match event {
            Event::Vectors(vectors) => {
                self.vectors.extend(vectors.into_iter().map(|text| (id, text.text, text.vector)));
            }
            Event::Finished(outcome) => self.answers.push((id, outcome.summary.tokens)),
            Event::Embedded(summary) => self.embedded.push((id, summary.finish)),
            Event::Failed(failure) => self.failed.push((id, failure.error.to_string())),
            _ => {}
        }
    }

    /// Works until no request can go on.
    fn work(&mut self, core: &mut EngineCore, clock: &SimulatedClock) {
        while core.work(clock, &mut |id, event| self.take(id, event)) != StepOutcome::Idle {}
    }

    fn of(&self, id: RequestId) -> Vec<Vec<f32>> {
        let mine: Vec<_> = self.vectors.iter().filter(|(of, ..)| *of == id).collect();
        assert!(mine.iter().enumerate().all(|(at, (_, text, _))| at == *text), "in order");
        mine.into_iter().map(|(.., vector)| vector.clone()).collect()
    }
}

#[test]
fn vectors_and_answers_do_not_depend_on_their_company() {
    for family in ["llama", "qwen3_5_text", "gemma3_text", "qwen3"] {
        for model in [resident(family), streamed(family)] {
            let longest = model.decoder().unwrap().config().max_positions;
            let texts: Vec<String> = (0..60)
                .map(|at| format!("the quick brown fox {at} ").repeat(1 + at % 7))
                // One that takes several passes, and one that is longer than the model reads.
                .chain(["a b ".repeat(longest / 4), "c d ".repeat(longest), "a".into()])
                .collect();
            let expected = model.embed(&texts, &EmbedOptions::default()).unwrap();
            let (mut alone, clock) = (core(&model, 4), SimulatedClock::default());
            let mut said = Sent::default();
            for seed in 0..3 {
                alone.submit(answer(seed, 30), clock.now()).unwrap();
            }
            said.work(&mut alone, &clock);

            let (mut beside, mut sent) = (core(&model, 4), Sent::default());
            let answers = [0, 1, 2].map(|seed| beside.submit(answer(seed, 30), clock.now()).unwrap());
            let first = beside.submit(embedding(&model, &texts), clock.now()).unwrap();
            let second = beside.submit(embedding(&model, &texts[..9]), clock.now()).unwrap();
            sent.work(&mut beside, &clock);
            assert_eq!(sent.of(first), expected, "{family}");
            assert_eq!(sent.of(second), expected[..9], "{family}");
            assert_eq!(sent.embedded.len(), 2);
            for (id, (_, tokens)) in answers.iter().zip(&said.answers) {
                let beside = sent.answers.iter().find(|(of, _)| of == id).unwrap();
                assert_eq!(&beside.1, tokens, "{family}");
            }
            assert_eq!((beside.under_way(), sent.failed), (0, Vec::new()));
        }
    }
}

#[test]
fn texts_share_passes_with_answers_and_take_no_place_of_one() {
    for model in [resident("llama"), streamed("llama")] {
        let (rows, layers) = (Rows::of(&model), model.decoder().unwrap().layers());
        let (mut core, clock, mut sent) = (core(&model, 1), SimulatedClock::default(), Sent::default());
        let texts: Vec<String> = (0..1000).map(|at| format!("the quick brown fox {at}")).collect();
        core.submit(embedding(&model, &texts), clock.now()).unwrap();
        for _ in 0..3 {
            core.work(&clock, &mut |id, event| sent.take(id, event));
        }
        core.submit(answer(0, 40), clock.now()).unwrap();
        while sent.answers.is_empty() {
            assert_ne!(core.work(&clock, &mut |id, event| sent.take(id, event)), StepOutcome::Idle);
        }
        assert!(sent.embedded.is_empty() && sent.vectors.len() < texts.len(), "{}", sent.vectors.len());
        let gaps: Vec<usize> =
            rows.at_logits.lock().unwrap().windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.iter().any(|rows| *rows > layers), "texts ran between tokens: {gaps:?}");
        assert!(gaps.iter().all(|rows| *rows <= layers * (512 + 1)), "{gaps:?}");
        sent.work(&mut core, &clock);
        assert_eq!(sent.vectors.len(), texts.len());
    }
}

#[test]
fn a_cancelled_embedding_stops() {
    let model = resident("llama");
    let (rows, layers) = (Rows::of(&model), model.decoder().unwrap().layers());
    let texts: Vec<String> = (0..2000).map(|at| format!("the quick brown fox {at}")).collect();
    for steps in [0, 1, 2, 5, 8] {
        let (mut core, clock, mut sent) = (core(&model, 2), SimulatedClock::default(), Sent::default());
        let id = core.submit(embedding(&model, &texts), clock.now()).unwrap();
        let waiting = core.submit(embedding(&model, &texts[..2]), clock.now()).unwrap();
        for _ in 0..steps {
            core.work(&clock, &mut |id, event| sent.take(id, event));
        }
        let before = rows.all();
        core.cancel(id, clock.now(), &mut |id, event| sent.take(id, event));
        sent.work(&mut core, &clock);
        assert!(rows.all() - before <= 2 * 512 * layers, "{} rows more", rows.all() - before);
        assert!(sent.embedded.contains(&(id, Finish::Cancelled)), "{:?}", sent.embedded);
        assert!(sent.embedded.contains(&(waiting, Finish::Stop)) && sent.of(waiting).len() == 2);
        assert_eq!(core.under_way(), 0);
    }
}

#[test]
fn a_held_embedding_pauses_and_goes_on() {
    let model = resident("llama");
    let rows = Rows::of(&model);
    let texts: Vec<String> = (0..700).map(|at| format!("the quick brown fox {at}")).collect();
    let expected = model.embed(&texts, &EmbedOptions::default()).unwrap();
    let (mut core, clock, mut sent) = (core(&model, 2), SimulatedClock::default(), Sent::default());
    let id = core.submit(embedding(&model, &texts), clock.now()).unwrap();
    while sent.vectors.is_empty() {
        core.work(&clock, &mut |id, event| sent.take(id, event));
    }
    core.hold(id, true, clock.now());
    sent.work(&mut core, &clock);
    let held = rows.all();
    sent.work(&mut core, &clock);
    assert!(rows.all() == held && sent.vectors.len() < texts.len());
    core.hold(id, false, clock.now());
    sent.work(&mut core, &clock);
    assert_eq!(sent.of(id), expected);
}

fn held(budget: &Budget) -> u64 {
    Account::ALL.iter().map(|account| budget.held(*account)).sum()
}

#[test]
fn an_embedding_is_charged_or_refused() {
    let shared = SharedBudget::beside(&Budget::new(256 << 20)).unwrap();
    let options = ShareOptions { rows: 16, ..ShareOptions::pinned() };
    let model = shared.open(path("llama"), &device("cpu").unwrap(), &options).unwrap();
    let decoder = model.decoder().unwrap();
    let width = decoder.config().hidden_size;
    let texts = vec!["a b ".repeat(50); 40];
    let expected = resident("llama").embed(&texts, &EmbedOptions::default()).unwrap();
    let budget = shared.budget();
    let before = held(budget);
    let prepared = model.embedding(&texts, &EmbedOptions::default()).unwrap();
    let vectors = (16 * width * size_of::<f32>()) as u64;
    assert!(held(budget) >= before + vectors, "vectors that wait are charged");
    let (mut core, clock, mut sent) = (core(&model, 2), SimulatedClock::default(), Sent::default());
    let id = core.submit(Request::embedding("model", prepared), clock.now()).unwrap();
    let mut most_pages = 0;
    while core.work(&clock, &mut |id, event| sent.take(id, event)) != StepOutcome::Idle {
        most_pages = most_pages.max(budget.held(Account::Streams));
    }
    assert!(most_pages > 0, "keys and values are charged");
    assert_eq!(sent.of(id), expected);
    drop(core);
    drop(sent);
    assert_eq!(held(budget), before);

    let taken = budget.charge(Account::Scratch, budget.left()).unwrap();
    let refused = model.embedding(&texts, &EmbedOptions::default()).unwrap_err();
    assert!(matches!(refused, RuntimeError::Memory(MemoryError::OverBudget { .. })), "{refused}");
    drop(taken);
}

/// Counts passes outside an engine between two of its tokens.
#[derive(Debug, Default)]
struct Outside {
    passes: AtomicUsize,
    at_logits: Mutex<Vec<usize>>,
}

impl Observer for Outside {
    fn follows(&self) -> bool {
        true
    }

    fn layer(&self, _: usize, _: usize, _: Instant) {}

    fn logits(&self, _: usize, _: Instant) {
        self.at_logits.lock().unwrap().push(self.passes.load(Ordering::Relaxed));
    }

    fn pass(&self, _: Passed, _: Instant) {}

    fn replay(&self, _: usize, _: Instant) {}
}

#[test]
fn a_token_waits_for_one_pass_outside_the_engine_at_most() {
    let folder = tempfile::tempdir().unwrap();
    SyntheticModel::with_bytes(1 << 20, 12, 512).write(folder.path(), 1).unwrap();
    let stream = StreamConfig { buffers: 2, ..StreamConfig::default() };
    let config = StreamedConfig { stream, method: Some(ReadMethod::Buffered), ..StreamedConfig::default() };
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let model = Model::streamed(checkpoint, &device("cpu").unwrap(), &config).unwrap();
    let (decoder, outside) = (model.decoder().unwrap(), Arc::new(Outside::default()));
    let engine = Engine::start(EngineConfig::default()).unwrap();
    engine.add("model", model).unwrap();
    decoder.set_observer(outside.clone());
    let answering = AtomicBool::new(true);
    thread::scope(|scope| {
        scope.spawn(|| {
            let tokens: Vec<u32> = (0..64).map(|at| 3 + at * 7 % 500).collect();
            while answering.load(Ordering::Relaxed) {
                decoder.hidden_after(&tokens, decoder.layers()).unwrap();
                outside.passes.fetch_add(1, Ordering::Relaxed);
            }
        });
        while outside.passes.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        let said = engine.generate(answer(0, 30)).wait();
        answering.store(false, Ordering::Relaxed);
        said.unwrap();
    });
    let at_logits = outside.at_logits.lock().unwrap();
    let gaps: Vec<usize> = at_logits.windows(2).map(|pair| pair[1] - pair[0]).collect();
    // One that waited, and one that was counted late.
    assert!(gaps.iter().all(|passes| *passes <= 2), "{gaps:?}");
    assert!(gaps.iter().any(|passes| *passes > 0), "neither starves the other: {gaps:?}");
}
