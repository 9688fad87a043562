//! Tests that jumps of the wall clock, by hours and before 1970, change no deadline, retry, turn or file.
//!
//! The system's clock stays as it is. This program replaces the C library's `clock_gettime`, which the standard library
//! reads, by a function that adds an offset to the system's time.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use firebox::engine::{Engine, EngineConfig, EngineError, Request};
use firebox::heads::{HeadEvent, HeadPoolConfig};
use firebox::internals::store::files::{Fault, Faults};
use firebox::{
    AfterEviction, Generation, GenerationConfig, KvType, Model, Role, Session, WholeTurns, device,
};

/// Offset of the wall clock in seconds.
static WALL: AtomicI64 = AtomicI64::new(0);
/// Offset of the monotonic clock in seconds.
static MEASURED: AtomicI64 = AtomicI64::new(0);

const HOUR: i64 = 3600;

/// # Safety
/// As for the C library's function: `time` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    // SAFETY: the arguments are those of the caller, who guarantees what the C library requires.
    let said = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    let ahead = match clock {
        libc::CLOCK_REALTIME => &WALL,
        libc::CLOCK_MONOTONIC => &MEASURED,
        _ => return said as c_int,
    };
    if said == 0 {
        // SAFETY: the system has just written to `time`.
        unsafe { (*time).tv_sec += ahead.load(Ordering::SeqCst) };
    }
    said as c_int
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/llama")
}

fn open() -> Model {
    Model::open(fixture(), &device("cpu").unwrap()).unwrap()
}

fn tokens(from: u32, count: u32) -> Vec<u32> {
    (0..count).map(|at| 3 + (from + at * 31) % 150).collect()
}

fn config(most: usize) -> GenerationConfig {
    GenerationConfig::new().with_max_tokens(most).with_ignore_end(true)
}

/// One test for all, because the offsets apply to the whole process.
#[test]
fn jumps_of_the_wall_clock_change_nothing() {
    the_clock_is_in_our_hands();
    turns_are_in_the_order_in_which_they_came();
    deadlines_are_measured();
    retries_come_when_their_time_is_over();
}

fn the_clock_is_in_our_hands() {
    let (wall, measured) = (SystemTime::now(), Instant::now());
    WALL.store(5 * HOUR, Ordering::SeqCst);
    assert!(SystemTime::now().duration_since(wall).unwrap() >= Duration::from_secs(5 * 3600));
    WALL.store(-5 * HOUR, Ordering::SeqCst);
    assert!(wall.duration_since(SystemTime::now()).unwrap() > Duration::from_secs(4 * 3600));
    assert!(measured.elapsed() < Duration::from_secs(600));
    WALL.store(0, Ordering::SeqCst);
}

/// Returns the logits of a conversation that forgets turns, is saved and continues, while the clock jumps before every
/// step.
fn conversation(path: &Path, model: &Model, jumps: &[i64]) -> Vec<Vec<f32>> {
    let policy = || WholeTurns { after: AfterEviction::CompactPositions };
    let mut session = model.session().unwrap().with_turn_capacity(100, policy());
    let mut jumps = jumps.iter().cycle();
    let mut jump = || WALL.store(*jumps.next().unwrap(), Ordering::SeqCst);
    let mut said = Vec::new();
    for turn in 0..8 {
        jump();
        session.begin_turn(&[Role::User, Role::Assistant]).unwrap();
        said.push(session.feed(&tokens(turn * 7, 25)).unwrap());
        jump();
        if turn == 2 {
            session.add_fact(&tokens(60, 9)).unwrap();
        }
        session.save(path, model).unwrap();
        jump();
        let restored = Session::restore(path, model, KvType::default()).unwrap();
        let ids = |session: &Session| session.turns().map(|turn| turn.id).collect::<Vec<_>>();
        assert_eq!((restored.tokens(), ids(&restored)), (session.tokens(), ids(&session)));
        for (restored, kept) in restored.turns().zip(session.turns()) {
            // A file stores the time as seconds since 1970; an earlier time is clamped.
            assert_eq!(restored.began, kept.began.max(UNIX_EPOCH));
        }
        session = restored.with_turn_capacity(100, policy());
    }
    WALL.store(0, Ordering::SeqCst);
    said
}

fn turns_are_in_the_order_in_which_they_came() {
    let (model, folder) = (open(), tempfile::tempdir().unwrap());
    let path = folder.path().join("session");
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
    let expected = conversation(&path, &model, &[0]);
    for jumps in [
        &[2 * HOUR, -3 * HOUR, 0][..],
        &[0, -since_1970 - 9 * HOUR],
        &[30 * 365 * 24 * HOUR, -HOUR, 5 * HOUR, -2 * HOUR],
    ] {
        assert_eq!(conversation(&path, &model, jumps), expected, "{jumps:?}");
    }
}

fn deadlines_are_measured() {
    let model = open();
    let mut session = model.session().unwrap();
    let mut generation = Generation::begin(&mut session, None, &tokens(1, 20), config(60)).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    let expected = generation.finish().unwrap().tokens;

    let engine = Engine::start(EngineConfig::default()).unwrap();
    engine.add("llama", model).unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for hours in [5, -5, 48, -300].into_iter().cycle() {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                WALL.store(hours * HOUR, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(1));
            }
        });
        for _ in 0..20 {
            // A request is late neither sooner nor later than the monotonic clock says, whatever the wall clock says.
            let ask = |first_by| {
                let request = Request::new("llama", tokens(1, 20)).with_config(config(60));
                engine.generate(request.with_first_by(first_by).or_not_at_all())
            };
            let (early, late) = (ask(Duration::from_secs(60)), ask(Duration::from_nanos(1)));
            let outcome = early.wait().unwrap();
            assert_eq!(outcome.summary.tokens, expected);
            assert!(outcome.waited < Duration::from_secs(60), "{:?}", outcome.waited);
            assert!(matches!(late.wait(), Err(EngineError::Late { .. })));
        }
        over.store(true, Ordering::SeqCst);
    });
    WALL.store(0, Ordering::SeqCst);
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to)
        } else {
            std::fs::copy(entry.path(), to).map(drop).unwrap()
        }
    }
}

/// A head that fails to load is replaced by the fallback, and retried after about half a minute, not before.
fn retries_come_when_their_time_is_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pocket");
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/pocket"), &path);
    let model = Model::open(&path, &device("cpu").unwrap()).unwrap();
    let model = model.with_heads(HeadPoolConfig::patient()).unwrap();
    let pool = model.heads().unwrap();
    pool.wait_until_idle();
    assert!(pool.acquire("chat").fallback_reason.is_none());
    let faults = Faults::below(&path.join("heads/code"));
    faults.from(0, Fault::Broken);
    let refused = pool.acquire("code").fallback_reason.expect("the disk fails");
    assert!(refused.to_string().contains("the disk fails"), "{refused}");
    let failed = faults.lift();
    assert!(failed > 0);
    let retry_in = pool.events().into_iter().find_map(|event| match event {
        HeadEvent::Failed { name, retry_in, .. } if name == "code" => Some(retry_in),
        _ => None,
    });
    let retry_in = retry_in.unwrap();
    assert!(retry_in > Duration::from_secs(25) && retry_in < Duration::from_secs(45), "{retry_in:?}");
    // The disk works again, but there is no retry before the delay is over, even if the wall clock jumps.
    for hours in [0, 2, -2, 700] {
        WALL.store(hours * HOUR, Ordering::SeqCst);
        assert!(pool.acquire("code").fallback_reason.is_some(), "{hours}");
        // Other heads are available throughout.
        assert!(pool.acquire("chat").fallback_reason.is_none());
    }
    MEASURED.store(retry_in.as_secs() as i64 + 1, Ordering::SeqCst);
    assert!(pool.acquire("code").fallback_reason.is_none(), "the head is retried after the delay");
}
