//! Tests that faults are contained: disks that fail under sessions, prefixes, paused answers and streamed weights,
//! refused memory, and components that panic in the middle of a pass.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use burn::tensor::Tensor;
use firebox::components::{ComponentError, FeedForward, OwnFeedForward};
use firebox::engine::{Engine, EngineConfig, EngineError, Event, Request};
use firebox::internals::cache::PAGE_TOKENS;
use firebox::internals::model::{ModelError, StreamedConfig};
use firebox::internals::runtime::{Account, Budget, MemoryError, Origin};
use firebox::internals::store::files::{Fault, Faults};
use firebox::internals::store::{Checkpoint, ReadMethod, StoreError};
use firebox::residency::{ShareOptions, SharedBudget};
use firebox::{
    CacheError, Generation, GenerationConfig, KvType, Model, PausedGeneration, PersistentPrefix,
    PrefixOptions, RuntimeError, Session, device,
};
use tempfile::TempDir;

const CHANGING: [Fault; 2] = [Fault::Full, Fault::Broken];
const READING: [Fault; 3] = [Fault::Broken, Fault::Short, Fault::Vanished];

/// Returns a temporary folder, in memory if possible: thousands of files are synced here, which a disk would slow down.
fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference").join(name)
}

fn open(name: &str) -> Model {
    Model::open(fixture(name), &device("cpu").unwrap()).unwrap()
}

fn prompt(from: u32, count: u32) -> Vec<u32> {
    (0..count).map(|at| 3 + (from + at * 31) % 150).collect()
}

fn tokens(most: usize) -> GenerationConfig {
    GenerationConfig::new().with_max_tokens(most).with_ignore_end(true)
}

fn alone(model: &Model, prompt: &[u32], most: usize) -> Vec<u32> {
    let mut session = model.session().unwrap();
    let mut generation = Generation::begin(&mut session, None, prompt, tokens(most)).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    generation.finish().unwrap().tokens
}

/// Returns the runtime's error in one of the engine.
#[track_caller]
fn runtime_error(error: &EngineError) -> &RuntimeError {
    match error {
        EngineError::Runtime(error) => error,
        EngineError::Together { source } => runtime_error(source),
        other => panic!("{other:?}"),
    }
}

/// Checks that an error reports the fault of the disk.
#[track_caller]
fn check_error(fault: Fault, error: &RuntimeError) {
    let store = match error {
        RuntimeError::Store(store) | RuntimeError::Model(ModelError::Store(store)) => store,
        other => panic!("{fault:?} is reported as {other:?}"),
    };
    let kind = match fault {
        Fault::Full => ErrorKind::StorageFull,
        Fault::Short => ErrorKind::UnexpectedEof,
        Fault::Vanished => ErrorKind::NotFound,
        _ => std::io::Error::from_raw_os_error(5).kind(),
    };
    match store {
        StoreError::Io { source, .. } => assert_eq!(source.kind(), kind, "{fault:?}: {store}"),
        // Missing content may be noticed when it is parsed.
        StoreError::Malformed { .. } if matches!(fault, Fault::Torn | Fault::Short) => {}
        other => panic!("{fault:?} is reported as {other:?}"),
    }
}

/// Lets each file operation of `attempt` fail in turn, until it has no more operations. Returns how many attempts
/// failed. `attempt` returns its result and how many operations were affected.
fn at_every_operation(
    fault: Fault,
    mut attempt: impl FnMut(&dyn Fn(&Faults)) -> (Result<(), RuntimeError>, usize),
) -> usize {
    let mut failed = 0;
    for goes_on in [true, false] {
        for nth in 0.. {
            assert!(nth < 500, "{fault:?}: more than 500 operations");
            let begin = |faults: &Faults| {
                if goes_on { faults.from(nth, fault) } else { faults.once(nth, fault) }
            };
            let (done, struck) = attempt(&begin);
            if struck == 0 {
                done.unwrap();
                break;
            }
            if let Err(error) = done {
                check_error(fault, &error);
                failed += 1;
            }
        }
    }
    assert!(failed > 0, "{fault:?} makes no difference");
    failed
}

#[test]
fn a_session_that_cannot_be_saved_goes_on_and_its_file_stays() {
    for name in ["llama", "qwen3_5_text"] {
        let model = open(name);
        let (next, restore) = (prompt(9, 5), |path: &Path| Session::restore(path, &model, KvType::default()));
        // Up to the end of a page, so that clones continue in pages of their own with bit-equal logits.
        let mut old = model.session().unwrap();
        old.feed(&prompt(1, PAGE_TOKENS as u32)).unwrap();
        let mut new = old.clone();
        new.feed(&prompt(5, PAGE_TOKENS as u32)).unwrap();
        let [expected_old, expected_new] = [&old, &new].map(|session| session.clone().feed(&next).unwrap());
        for fault in CHANGING.into_iter().chain([Fault::Torn]) {
            let failed = at_every_operation(fault, |begin| {
                let (folder, others) = (scratch(), scratch());
                let (path, other) = (folder.path().join("session"), others.path().join("session"));
                old.save(&path, &model).unwrap();
                let held = restore(&path).unwrap();
                let faults = Faults::below(folder.path());
                begin(&faults);
                let mut done = new.save(&path, &model);
                // Another session is saved meanwhile, and this one continues.
                old.save(&other, &model).unwrap();
                assert_eq!(new.clone().feed(&next).unwrap(), expected_new);
                let struck = faults.lift();
                match restore(&path) {
                    Ok(mut found) if found.tokens() == new.tokens() => {
                        assert_eq!(found.feed(&next).unwrap(), expected_new);
                    }
                    Ok(mut found) => {
                        assert!(done.is_err());
                        assert_eq!(found.feed(&next).unwrap(), expected_old);
                    }
                    // Only a disk that reports unwritten data as written can damage the old file.
                    Err(error) => {
                        assert_eq!((fault, done.is_ok()), (Fault::Torn, true), "{error}");
                        done = Err(error);
                    }
                }
                assert_eq!(restore(&other).unwrap().feed(&next).unwrap(), expected_old);
                assert_eq!(held.clone().feed(&next).unwrap(), expected_old, "the old file is intact");
                new.save(&path, &model).unwrap();
                assert_eq!(restore(&path).unwrap().feed(&next).unwrap(), expected_new);
                (done, struck)
            });
            println!("{name}, saving, {fault:?}: {failed} failures");
        }
        for fault in READING {
            let folder = scratch();
            let path = folder.path().join("session");
            old.save(&path, &model).unwrap();
            at_every_operation(fault, |begin| {
                let faults = Faults::below(folder.path());
                begin(&faults);
                let read = restore(&path).map(drop);
                let struck = faults.lift();
                assert_eq!(restore(&path).unwrap().feed(&next).unwrap(), expected_old);
                (read, struck)
            });
        }
    }
}

#[test]
fn a_prefix_is_right_or_an_error() {
    let model = open("llama");
    let fact = prompt(2, 50);
    let build =
        |folder: &Path| PersistentPrefix::open_or_build(folder, &model, &fact, PrefixOptions::default());
    let next =
        |prefix: &PersistentPrefix| model.session().unwrap().with_prefix(prefix).unwrap().feed(&[5]).unwrap();
    let whole = scratch();
    let expected = next(&build(whole.path()).unwrap());
    for fault in CHANGING.into_iter().chain(READING).chain([Fault::Torn]) {
        for there in [false, true] {
            let (mut failures, mut met) = (0, 0);
            for nth in 0..200 {
                let folder = scratch();
                if there {
                    build(folder.path()).unwrap();
                }
                let faults = Faults::below(folder.path());
                faults.once(nth, fault);
                let built = build(folder.path());
                let struck = faults.lift();
                met += struck;
                match built {
                    Ok(prefix) => assert_eq!(next(&prefix), expected),
                    Err(error) => {
                        check_error(fault, &error);
                        failures += 1;
                    }
                }
                let again = build(folder.path()).unwrap();
                assert_eq!(next(&again), expected);
                assert!(matches!(build(folder.path()).unwrap().origin(), Origin::Opened));
                if struck == 0 {
                    break;
                }
            }
            println!("a prefix, there {there}, {fault:?}: {met} faults, {failures} failures");
        }
    }
}

#[test]
fn a_paused_answer_goes_on_from_the_file_that_is_there() {
    let model = open("llama");
    let whole = alone(&model, &prompt(3, 20), 24);
    let paused_after = |pieces: usize| {
        let mut session = model.session().unwrap();
        let mut generation = Generation::begin(&mut session, None, &prompt(3, 20), tokens(24)).unwrap();
        (0..pieces).for_each(|_| assert!(generation.next_piece().unwrap().is_some()));
        let (paused, said) = generation.pause().unwrap();
        (paused, said, session)
    };
    let (first, first_said, first_session) = paused_after(5);
    let (second, second_said, second_session) = paused_after(13);
    let finished = |path: &Path| {
        let pool = model.session().unwrap().cache().pool().clone();
        let (paused, said, mut session) = PausedGeneration::read(path, &model, &pool)?;
        let mut generation = Generation::resume(&mut session, None, &paused, said)?;
        while generation.next_piece()?.is_some() {}
        generation.finish().map(|summary| summary.tokens)
    };
    for fault in CHANGING {
        at_every_operation(fault, |begin| {
            let folder = scratch();
            let path = folder.path().join("answer");
            first.write(&first_said, &first_session, &path, &model).unwrap();
            let faults = Faults::below(folder.path());
            begin(&faults);
            let done = second.write(&second_said, &second_session, &path, &model);
            let struck = faults.lift();
            assert_eq!(finished(&path).unwrap(), whole);
            second.write(&second_said, &second_session, &path, &model).unwrap();
            assert_eq!(finished(&path).unwrap(), whole);
            (done, struck)
        });
    }
    for fault in READING {
        let folder = scratch();
        let path = folder.path().join("answer");
        first.write(&first_said, &first_session, &path, &model).unwrap();
        at_every_operation(fault, |begin| {
            let faults = Faults::below(folder.path());
            begin(&faults);
            let read = finished(&path).map(drop);
            let struck = faults.lift();
            assert_eq!(finished(&path).unwrap(), whole);
            (read, struck)
        });
    }
}

/// Returns a copy of a fixture; only the disk of the copy fails.
fn copied(name: &str, folder: &Path) -> PathBuf {
    let copy = folder.join(name);
    std::fs::create_dir(&copy).unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
        }
    }
    copy
}

#[test]
fn a_disk_that_fails_under_one_model_is_nothing_to_the_others() {
    let folder = scratch();
    let path = copied("llama", folder.path());
    let config = StreamedConfig { method: Some(ReadMethod::Buffered), ..StreamedConfig::default() };
    let streamed = |path: &Path| {
        Model::streamed(Checkpoint::open(path).unwrap(), &device("cpu").unwrap(), &config).unwrap()
    };
    let engine = Engine::start(EngineConfig::default()).unwrap();
    engine.add("failing", streamed(&path)).unwrap();
    engine.add("streamed", streamed(&fixture("llama"))).unwrap();
    engine.add("whole", open("qwen3")).unwrap();
    let expected: Vec<_> =
        ["llama", "llama", "qwen3"].map(|name| alone(&open(name), &prompt(4, 30), 12)).into();
    let faults = Faults::below(&path);
    for fault in [Fault::Broken, Fault::Short, Fault::Few] {
        faults.from(0, fault);
        let mut failed = 0;
        for _ in 0..3 {
            let asked = ["failing", "streamed", "whole"]
                .map(|name| engine.generate(Request::new(name, prompt(4, 30)).with_config(tokens(12))));
            for (at, (asked, expected)) in asked.into_iter().zip(&expected).enumerate() {
                match asked.wait() {
                    Ok(outcome) => assert_eq!(outcome.summary.tokens, *expected),
                    Err(error) => {
                        assert_eq!(at, 0, "{error}");
                        check_error(fault, runtime_error(&error));
                        failed += 1;
                    }
                }
            }
        }
        assert_eq!(failed > 0, fault != Fault::Few, "{fault:?}: {failed}");
        faults.lift();
        // A read-ahead that failed is reported to the first request that needs it.
        let again = || engine.generate(Request::new("failing", prompt(4, 30)).with_config(tokens(12))).wait();
        let outcome = (0..9).find_map(|_| again().ok()).expect("the disk works again");
        assert_eq!(outcome.summary.tokens, expected[0]);
    }
}

/// The built-in network, which panics after a number of calls.
#[derive(Debug)]
struct Panicking {
    there: FeedForward,
    calls: Arc<AtomicUsize>,
}

impl OwnFeedForward for Panicking {
    fn id(&self) -> &str {
        "panicking"
    }

    fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, ComponentError> {
        let left = self.calls.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        assert!(left.is_ok(), "the device is gone");
        Ok(self.there.forward(x)?)
    }
}

/// A lost device behaves like this: operations panic.
#[test]
fn a_pass_that_panics_fails_its_requests_and_nothing_else() {
    let calls = Arc::new(AtomicUsize::new(usize::MAX));
    for name in ["llama", "qwen3_5_text"] {
        let engine = Engine::start(EngineConfig::default()).unwrap();
        let own = |there| Panicking { there, calls: calls.clone() };
        engine.add("panicking", open(name).with_feed_forward(2, own).unwrap()).unwrap();
        engine.add("other", open("qwen3")).unwrap();
        let expected = alone(&open(name), &prompt(4, 30), 12);
        let beside = alone(&open("qwen3"), &prompt(7, 20), 40);
        let ask = |model: &str, from: u32, most: usize| {
            let count = if model == "other" { 20 } else { 30 };
            engine.generate(Request::new(model, prompt(from, count)).with_config(tokens(most)))
        };
        // During prefill, during the first tokens, and later.
        for after in [0, 1, 2, 5, 9] {
            calls.store(after, Ordering::SeqCst);
            let others = [ask("other", 7, 40), ask("other", 7, 40)];
            let asked = [ask("panicking", 4, 12), ask("panicking", 4, 12), ask("panicking", 8, 12)];
            let failures = asked.map(|asked| {
                let Some(Event::Failed(failure)) = asked.last() else { panic!("it did not fail") };
                failure
            });
            calls.store(usize::MAX, Ordering::SeqCst);
            for failure in failures {
                let EngineError::Together { source } = &failure.error else { panic!("{}", failure.error) };
                let EngineError::Panicked { reason } = &**source else { panic!("{source}") };
                assert_eq!(reason, "the device is gone");
                // It is as before the pass, and continues with the same logits.
                let mut session = failure.session.expect("the session is returned");
                let whole = [session.tokens(), &[9]].concat();
                let mut plain = open(name).session().unwrap();
                assert_eq!(session.feed(&[9]).unwrap(), plain.feed(&whole).unwrap(), "{name}, {after}");
            }
            for other in others {
                assert_eq!(other.wait().unwrap().summary.tokens, beside);
            }
            assert_eq!(ask("panicking", 4, 12).wait().unwrap().summary.tokens, expected, "{name}, {after}");
        }
    }
}

fn options() -> ShareOptions {
    ShareOptions { context: Some(128), rows: 32, ..ShareOptions::default() }
}

/// Waits until all memory of a dropped model is released, once its threads have ended.
fn given_back(budget: &Budget) {
    for _ in 0..6000 {
        if budget.left() == budget.total() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let held = Account::ALL.map(|account| (account, budget.held(account)));
    panic!("{} of {} are left: {held:?}", budget.left(), budget.total());
}

/// Returns which account an error about refused memory names.
fn refused(error: &RuntimeError) -> String {
    match error {
        RuntimeError::Memory(MemoryError::OverBudget { account, .. }) => format!("{account}"),
        RuntimeError::TooLittleShared { .. } | RuntimeError::Memory(MemoryError::TooLittleMemory { .. }) => {
            "the plan".into()
        }
        RuntimeError::Cache(CacheError::PoolExhausted { .. })
        | RuntimeError::Model(ModelError::Cache(CacheError::PoolExhausted { .. })) => "pages".into(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_that_is_refused_anywhere_is_given_back_everywhere() {
    let path = fixture("llama");
    let tokens = prompt(6, 200);
    let expected = open("llama").session().unwrap().feed(&tokens).unwrap();
    let run = |budget: &Budget| -> Result<Vec<f32>, RuntimeError> {
        let shared = SharedBudget::beside(budget)?;
        let model = shared.open(&path, &device("cpu")?, &options())?;
        let mut session = model.session()?;
        session.feed(&tokens)
    };
    let mut refusals = BTreeSet::new();
    // The plan fits, but only `left` bytes are left.
    let mut attempt = |left: u64| {
        let budget = Budget::new(64 << 20);
        let taken = budget.charge(Account::Scratch, budget.total() - left).unwrap();
        let done = run(&budget);
        assert!(budget.most_held() <= budget.total());
        drop(taken);
        given_back(&budget);
        match done {
            Ok(logits) => {
                assert_eq!(logits, expected);
                true
            }
            Err(error) => {
                refusals.insert(refused(&error));
                false
            }
        }
    };
    let (mut too_little, mut enough) = (0u64, 64u64 << 20);
    assert!(attempt(enough) && !attempt(too_little));
    while enough - too_little > 1 {
        let middle = too_little.midpoint(enough);
        *if attempt(middle) { &mut enough } else { &mut too_little } = middle;
    }
    for part in 0..96 {
        attempt(enough * part / 96);
    }
    println!("{enough} bytes suffice; with fewer, these were refused: {refusals:?}");
    assert!(refusals.len() >= 2, "{refusals:?}");
}

#[test]
fn a_shortage_of_memory_fails_only_requests_that_need_more() {
    let budget = Budget::new(64 << 20);
    let shared = SharedBudget::beside(&budget).unwrap();
    let open_shared = |name: &str| shared.open(fixture(name), &device("cpu").unwrap(), &options());
    let model = open_shared("llama").unwrap();
    let mut session = model.session().unwrap();
    let mut expected = open("llama").session().unwrap();
    for round in 0..3u32 {
        let fed = prompt(round, 40);
        assert_eq!(session.feed(&fed).unwrap(), expected.feed(&fed).unwrap());
        // Without memory left, every new charge is refused; pages are granted as long as weights can be evicted.
        let taken = budget.charge(Account::Scratch, budget.left()).unwrap();
        assert_eq!(refused(&budget.charge(Account::Weights, 1).map(drop).unwrap_err().into()), "weights");
        let mut others = Vec::new();
        let error = loop {
            assert!(others.len() < 2000, "memory does not come to an end");
            let mut other = model.session().unwrap();
            match other.feed(&prompt(round + 50, 120)) {
                Ok(_) => others.push(other),
                Err(error) => break error,
            }
        };
        assert_eq!(refused(&error), "pages");
        let another = open_shared("qwen3").map(drop);
        assert!(another.is_err_and(|error| !refused(&error).is_empty()));
        // A session that has its pages continues, and so do all once there is room again.
        let next = prompt(round + 9, 10);
        assert_eq!(session.feed(&next).unwrap(), expected.feed(&next).unwrap());
        println!("{} others had their pages", others.len());
        drop((others, taken));
        assert!(model.session().unwrap().feed(&fed).is_ok());
        assert!(open_shared("qwen3").unwrap().session().unwrap().feed(&fed).is_ok());
    }
    drop((session, model, shared));
    given_back(&budget);
}
