//! Tests of several models in less memory than they take together.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use firebox::engine::{Engine, EngineConfig, EngineError, Event, Priority, Request};
use firebox::heads::HeadPoolConfig;
use firebox::internals::model::StreamedConfig;
use firebox::internals::runtime::{Account, Budget};
use firebox::internals::store::{Checkpoint, ReadAt, ReadMethod, StoreError, StreamConfig};
use firebox::residency::{ShareOptions, SharedBudget};
use firebox::{Generation, GenerationConfig, Model, RuntimeError, SamplerConfig, device};
use tempfile::TempDir;

use firebox_testing::model::SyntheticModel;

/// Held by every test, because the memory of the process is measured.
static ALONE: Mutex<()> = Mutex::new(());

fn alone_here() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const NAMES: [&str; 3] = ["small", "middle", "large"];
const MIB: u64 = 1 << 20;

struct Models {
    folder: TempDir,
    made: [SyntheticModel; 3],
}

impl Models {
    /// Writes three models with weights of these sizes in MiB.
    fn new(sizes: [usize; 3]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let made = [(sizes[0], 4), (sizes[1], 8), (sizes[2], 12)];
        let made = made.map(|(size, layers)| SyntheticModel::with_bytes(size << 20, layers, 512));
        for (at, (name, made)) in NAMES.iter().zip(&made).enumerate() {
            made.write(&folder.path().join(name), at as u64).unwrap();
        }
        Self { folder, made }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn bytes(&self) -> u64 {
        self.made.iter().map(|made| made.bytes() as u64).sum()
    }

    /// Generates with one model alone that is resident as a whole.
    fn alone(&self, name: &str, prompt: &[u32], config: GenerationConfig) -> Vec<u32> {
        let model = Model::open(self.path(name), &device("cpu").unwrap()).unwrap();
        let mut session = model.session().unwrap();
        let mut generation = Generation::begin(&mut session, None, prompt, config).unwrap();
        while generation.next_piece().unwrap().is_some() {}
        generation.finish().unwrap().tokens
    }
}

fn options() -> ShareOptions {
    ShareOptions { context: Some(256), rows: 16, ..ShareOptions::default() }
}

/// A budget for this many bytes of weights and what models take beside them.
fn shared(weights: u64) -> SharedBudget {
    SharedBudget::beside(&Budget::new(weights + 6 * MIB)).unwrap()
}

fn open(shared: &SharedBudget, path: &Path, options: &ShareOptions) -> Model {
    shared.open(path, &device("cpu").unwrap(), options).unwrap()
}

fn prompt(from: u32, count: u32) -> Vec<u32> {
    (0..count).map(|index| 3 + (from + index * 31) % 500).collect()
}

fn tokens(most: usize) -> GenerationConfig {
    GenerationConfig::new().with_max_tokens(most).with_ignore_end(true)
}

fn kept(engine: &Engine, name: &'static str) -> u64 {
    let resident = move |core: &mut firebox::internals::engine::EngineCore| {
        core.models()
            .find(|(other, _)| *other == name)
            .map(|(_, model)| model.residency().unwrap().resident_bytes())
    };
    engine.with_core(resident).unwrap().unwrap()
}

#[test]
fn interleaved_models_answer_as_alone_within_their_memory() {
    let _alone = alone_here();
    let models = Models::new([2, 5, 12]);
    for share in [0.35, 0.65, 1.2] {
        let shared = shared((models.bytes() as f64 * share) as u64);
        let engine = Engine::start(EngineConfig::default()).unwrap();
        for name in NAMES {
            engine.add(name, open(&shared, &models.path(name), &options())).unwrap();
        }
        let asked: Vec<_> = (0..9u32)
            .map(|at| {
                let name = NAMES[at as usize % 3];
                let config = tokens(10 + at as usize)
                    .with_sampler(SamplerConfig::default().with_temperature((at % 2) as f32).with_seed(5));
                let prompt = prompt(at, 3 + 7 * at);
                let priority = Priority::ALL[at as usize % 3];
                let request =
                    Request::new(name, prompt.clone()).with_config(config.clone()).with_priority(priority);
                (engine.generate(request), name, prompt, config)
            })
            .collect();
        for (answering, name, prompt, config) in asked {
            let said = answering.wait().unwrap().summary.tokens;
            assert_eq!(said, models.alone(name, &prompt, config), "{name} with {share}");
        }
        assert!(shared.budget().most_held() <= shared.budget().total());
        drop(engine);
    }
}

#[test]
fn an_idle_model_yields_memory_and_regains_it() {
    let _alone = alone_here();
    let models = Models::new([2, 5, 12]);
    let large = models.made[2].bytes() as u64;
    let shared = shared(large - 2 * MIB);
    let engine = Engine::start(EngineConfig::default()).unwrap();
    engine.add("large", open(&shared, &models.path("large"), &options())).unwrap();
    engine
        .add("middle", open(&shared, &models.path("middle"), &ShareOptions { preload: false, ..options() }))
        .unwrap();
    let whole = kept(&engine, "large");
    assert!(whole >= large, "the whole model fits: {whole} of {large}");
    assert_eq!(kept(&engine, "middle"), 0);
    let ask = |name: &str| {
        let request = Request::new(name, prompt(1, 9)).with_config(tokens(12));
        let said = engine.generate(request).wait().unwrap().summary.tokens;
        assert_eq!(said, models.alone(name, &prompt(1, 9), tokens(12)), "{name}");
    };
    ask("middle");
    let (middle, rest) = (kept(&engine, "middle"), kept(&engine, "large"));
    assert!(middle >= models.made[1].bytes() as u64, "the model in use has the memory: {middle}");
    assert!(rest > 0 && rest < whole, "no more is evicted than needed: {rest} of {whole}");
    ask("large");
    assert!(kept(&engine, "large") > rest + middle / 2, "its parts are loaded again");
    assert!(kept(&engine, "middle") < middle);
    assert!(shared.budget().most_held() <= shared.budget().total());
}

#[test]
fn a_model_that_does_not_fit_runs_its_first_pass() {
    let _alone = alone_here();
    let models = Models::new([2, 5, 12]);
    let large = models.made[2].bytes() as u64;
    for (weights, fits) in [(large / 2, false), (large + 2 * MIB, true)] {
        let engine = Engine::start(EngineConfig::default()).unwrap();
        let unfilled = ShareOptions { preload: false, ..options() };
        engine.add("large", open(&shared(weights), &models.path("large"), &unfilled)).unwrap();
        let kept_after_another = || {
            engine.generate(Request::new("large", prompt(0, 9)).with_config(tokens(1))).wait().unwrap();
            kept(&engine, "large")
        };
        let (first, second) = (kept_after_another(), kept_after_another());
        assert_eq!(first > 0, fits, "{first} bytes stay resident if all of it fits: {fits}");
        assert!(second > large / 3, "{second} of {large} bytes stay");
    }
}

#[test]
fn a_pinned_model_stays_resident() {
    let _alone = alone_here();
    let models = Models::new([2, 5, 12]);
    let shared = shared(2 * MIB);
    let engine = Engine::start(EngineConfig::default()).unwrap();
    engine.add("large", open(&shared, &models.path("large"), &options())).unwrap();
    // Preloaded parts of other models make room for it.
    let pinned = ShareOptions { pinned: true, ..options() };
    engine.add("small", open(&shared, &models.path("small"), &pinned)).unwrap();
    let whole = kept(&engine, "small");
    assert!(whole >= models.made[0].bytes() as u64);
    let asked = ["large", "small", "large"].map(|name| {
        let request = Request::new(name, prompt(4, 20)).with_config(tokens(8));
        (name, engine.generate(request.with_priority(Priority::Interactive)))
    });
    for (name, answering) in asked {
        let said = answering.wait().unwrap().summary.tokens;
        assert_eq!(said, models.alone(name, &prompt(4, 20), tokens(8)));
        assert_eq!(kept(&engine, "small"), whole);
    }
    // There is no room for a second one.
    let error = shared.open(
        models.path("middle"),
        &device("cpu").unwrap(),
        &ShareOptions { pinned: true, ..options() },
    );
    assert!(matches!(error.map(drop), Err(RuntimeError::TooLittleShared { .. })));
    assert_eq!(kept(&engine, "small"), whole);
}

#[test]
fn a_guaranteed_model_keeps_its_memory_whatever_others_take() {
    let _alone = alone_here();
    let models = Models::new([2, 5, 12]);
    let shared = shared(4 * MIB);
    let small =
        open(&shared, &models.path("small"), &ShareOptions { guaranteed: true, preload: false, ..options() });
    let kept = small.residency().unwrap().budget().reserved().unwrap();
    assert!(kept > 0);
    let large = open(&shared, &models.path("large"), &options());
    // The other model has taken everything that is not reserved for this one.
    let part = |model: &Model| {
        let budget = model.residency().unwrap().budget().clone();
        let held: u64 = Account::ALL.into_iter().map(|account| budget.held(account)).sum();
        (held, budget.left())
    };
    let ((held, left), (_, others)) = (part(&small), part(&large));
    assert!(left >= kept - held && left > others, "{left} of {kept}, {held} held, {others} for others");
    // A model cannot reserve more than it can use.
    let greedy = ShareOptions { reserved: u64::MAX, ..options() };
    let shared = SharedBudget::beside(&Budget::new(64 * MIB)).unwrap();
    let small = open(&shared, &models.path("small"), &greedy);
    let reserved = small.residency().unwrap().budget().reserved().unwrap();
    let bytes = models.made[0].bytes() as u64;
    assert!(reserved > bytes && reserved < bytes + 8 * MIB, "{reserved} of {bytes}");
}

#[test]
fn a_head_gets_the_memory_of_parts_that_can_be_read_again() {
    let _alone = alone_here();
    let models = Models::new([2, 5, 12]);
    let shared = shared(2 * MIB);
    let pocket = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/pocket");
    let pocket = open(&shared, &pocket, &ShareOptions { preload: false, ..options() });
    let pocket = pocket.with_heads(HeadPoolConfig::patient()).unwrap();
    let large = open(&shared, &models.path("large"), &options());
    let pool = pocket.heads().unwrap();
    let bytes: u64 = pool.names().iter().map(|name| pool.bytes_of(name).unwrap()).sum();
    let before = large.residency().unwrap().resident_bytes();
    assert!(shared.budget().left() < bytes, "the other model has it");
    // Heads in use are not evicted for each other.
    let acquired: Vec<_> = pool.names().iter().map(|name| pool.acquire(name)).collect();
    assert!(acquired.iter().all(|acquired| acquired.fallback_reason.is_none()), "{acquired:?}");
    assert!(pocket.residency().unwrap().budget().held(Account::Weights) >= bytes);
    assert!(large.residency().unwrap().resident_bytes() < before);
    assert!(shared.budget().most_held() <= shared.budget().total());
}

#[test]
fn an_encoder_stays_resident() {
    let _alone = alone_here();
    let models = Models::new([2, 5, 12]);
    let encoder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/bert");
    let bytes: u64 = Checkpoint::open(&encoder).unwrap().segments().iter().map(|segment| segment.bytes).sum();
    let shared = shared(2 * MIB);
    let large = open(&shared, &models.path("large"), &options());
    let before = large.residency().unwrap().resident_bytes();
    let taken = shared.budget().left().saturating_sub(bytes / 2);
    let _taken = shared.budget().charge(Account::Program, taken).unwrap();
    // Parts of other models are evicted for it, and it is charged.
    let whole = open(&shared, &encoder, &options());
    assert!(whole.encoder().is_ok() && large.residency().unwrap().resident_bytes() < before);
    let weights =
        shared.budget().held(Account::Weights) - large.residency().unwrap().budget().held(Account::Weights);
    assert!(weights >= bytes && weights < bytes + MIB, "{weights} of {bytes}");
    drop(whole);
    let left =
        shared.budget().held(Account::Weights) - large.residency().unwrap().budget().held(Account::Weights);
    assert_eq!(left, 0, "a dropped model is not charged");
    let little = SharedBudget::beside(&Budget::new(bytes / 2)).unwrap();
    let error = little.open(&encoder, &device("cpu").unwrap(), &options()).map(drop).unwrap_err();
    assert!(error.to_string().contains("beside the other models"), "{error}");
}

#[test]
fn a_lazy_model_is_opened_by_its_first_request() {
    let _alone = alone_here();
    let models = Models::new([2, 5, 12]);
    let shared = shared(models.bytes());
    let engine = Engine::start(EngineConfig::default()).unwrap();
    let opened = Arc::new(AtomicUsize::new(0));
    let (path, budget, count) = (models.path("middle"), shared.clone(), opened.clone());
    engine
        .add_later("middle", move || match count.fetch_add(1, Ordering::SeqCst) {
            0 => Err(RuntimeError::Device { name: "none".into(), available: Vec::new() }),
            _ => budget.open(&path, &device("cpu")?, &options()),
        })
        .unwrap();
    assert!(matches!(engine.add_later("middle", || unreachable!()), Err(EngineError::ModelNamed { .. })));
    assert_eq!(shared.budget().held(Account::Weights), 0);
    let request = || Request::new("middle", prompt(2, 6)).with_config(tokens(7));
    let error = engine.generate(request()).wait().unwrap_err();
    assert!(matches!(error, EngineError::NotOpened { .. }), "{error}");
    // The next requests retry, and wait for it together.
    let asked = [request(), request()].map(|request| engine.generate(request));
    let cancelled = engine.generate(request());
    cancelled.cancel();
    for answering in asked {
        let said = answering.wait().unwrap().summary.tokens;
        assert_eq!(said, models.alone("middle", &prompt(2, 6), tokens(7)));
    }
    assert!(cancelled.wait().is_ok());
    assert_eq!(opened.load(Ordering::SeqCst), 2);
    assert!(shared.budget().held(Account::Weights) > 0);
    engine.add_later("never", || unreachable!("no request asks for it")).unwrap();
    engine.remove("never").unwrap();
    let late = Request::new("never", vec![3]);
    assert!(matches!(engine.generate(late).wait(), Err(EngineError::NoModel { .. })));
}

#[test]
fn the_process_stays_within_its_budget() {
    let _alone = alone_here();
    let models = Models::new([6, 18, 48]);
    // Allocates what the program takes beside its models.
    models.alone("middle", &prompt(1, 16), tokens(4));
    let own = firebox::internals::runtime::resident_bytes().unwrap();
    let memory = own + 20 * MIB + (models.bytes() as f64 * 0.65) as u64;
    let shared = SharedBudget::new(memory).unwrap();
    let engine = Engine::start(EngineConfig::default()).unwrap();
    for name in NAMES {
        engine.add(name, open(&shared, &models.path(name), &options())).unwrap();
    }
    let over = Arc::new(AtomicUsize::new(0));
    let watching = Arc::new(());
    let (watched, most) = (Arc::downgrade(&watching), over.clone());
    let watch = thread::spawn(move || {
        while watched.strong_count() > 0 {
            let taken = firebox::internals::runtime::anonymous_bytes().unwrap()
                + firebox::internals::runtime::mapped_file_bytes().unwrap();
            most.fetch_max(taken as usize, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(1));
        }
    });
    for round in 0..3u32 {
        let asked = NAMES.map(|name| {
            let request = Request::new(name, prompt(round, 16)).with_config(tokens(12 + 9 * round as usize));
            engine.generate(request.with_priority(Priority::Interactive))
        });
        for answering in asked {
            answering.wait().unwrap();
        }
    }
    drop(watching);
    watch.join().unwrap();
    let most = over.load(Ordering::Relaxed) as u64;
    assert!(most > own + 10 * MIB, "memory was measured: {most}");
    assert!(most <= memory, "{} MiB of {}", most / MIB, memory / MIB);
    assert!(shared.budget().most_held() <= memory);
}

/// What a slow disk waits for.
#[derive(Debug, Default)]
struct Others {
    /// Whether it waits at all.
    speak: AtomicBool,
    tokens: AtomicUsize,
    /// Reads during which other requests got tokens.
    reads: AtomicUsize,
    /// Whether a read saw no token for a minute.
    silent: AtomicBool,
}

/// A disk whose reads last until other requests get tokens: they must make progress meanwhile, however slow the machine
/// is.
#[derive(Debug)]
struct Slow {
    disk: Arc<dyn ReadAt>,
    others: Arc<Others>,
}

impl ReadAt for Slow {
    fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError> {
        let Others { speak, tokens, reads, silent } = &*self.others;
        if thread::current().name() == Some("firebox-read") {
            let (began, enough) = (Instant::now(), tokens.load(Ordering::Relaxed) + 2);
            while speak.load(Ordering::Relaxed) && tokens.load(Ordering::Relaxed) < enough {
                if began.elapsed() > Duration::from_secs(60) {
                    silent.store(true, Ordering::Relaxed);
                    speak.store(false, Ordering::Relaxed);
                }
                thread::sleep(Duration::from_millis(1));
            }
            reads.fetch_add(usize::from(speak.load(Ordering::Relaxed)), Ordering::Relaxed);
        }
        self.disk.read_at(file, buffer, start)
    }
}

/// While one model waits for the disk, another one runs.
#[test]
fn no_model_waits_for_the_disk_reads_of_another() {
    let _alone = alone_here();
    let models = Models::new([2, 5, 12]);
    let checkpoint = Checkpoint::open(models.path("middle")).unwrap();
    let others = Arc::new(Others::default());
    let disk = Slow { disk: checkpoint.disk(ReadMethod::Buffered), others: others.clone() };
    let config = StreamedConfig {
        stream: StreamConfig { buffers: 2, ..StreamConfig::default() },
        source: Some(Arc::new(disk)),
        ..StreamedConfig::default()
    };
    let cpu = device("cpu").unwrap();
    let slow = Model::streamed(checkpoint, &cpu, &config).unwrap();
    let engine = Engine::start(EngineConfig::default()).unwrap();
    engine.add("slow", slow).unwrap();
    engine.add("quick", Model::open(models.path("small"), &cpu).unwrap()).unwrap();
    let quick = engine.generate(Request::new("quick", prompt(2, 6)).with_config(tokens(100_000)));
    let (first, speaks) = mpsc::channel();
    let enough = Arc::new(AtomicBool::new(false));
    let listening = thread::spawn({
        let (enough, others) = (enough.clone(), others.clone());
        move || {
            let tokens = quick.filter(|event| matches!(event, Event::Piece(piece) if piece.token.is_some()));
            for _ in tokens.take_while(|_| !enough.load(Ordering::Relaxed)) {
                others.tokens.fetch_add(1, Ordering::Relaxed);
                let _ = first.send(());
            }
        }
    });
    speaks.recv().unwrap();
    others.speak.store(true, Ordering::Relaxed);
    let urgent =
        Request::new("slow", prompt(1, 6)).with_config(tokens(4)).with_priority(Priority::Interactive);
    assert_eq!(
        engine.generate(urgent).wait().unwrap().summary.tokens,
        models.alone("middle", &prompt(1, 6), tokens(4))
    );
    others.speak.store(false, Ordering::Relaxed);
    enough.store(true, Ordering::Relaxed);
    listening.join().unwrap();
    let (reads, silent) = (others.reads.load(Ordering::Relaxed), others.silent.load(Ordering::Relaxed));
    assert!(!silent, "after {reads} reads no token came until the next one ended");
    assert!(reads > 20, "{reads} reads");
}
