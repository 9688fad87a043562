//! Tests of an engine whose thread panics.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use firebox_cache::{PageLedger, PagePool};
use firebox_runtime::GenerationConfig;

use super::models;
use crate::clock::{Clock, WallClock};
use crate::engine::Engine;
use crate::engine_core::EngineConfig;
use crate::error::EngineError;
use crate::event::Event;
use crate::heartbeat::EngineHealth;
use crate::on_failure::OnFailure;
use crate::request::Request;

/// A countdown to a panic; at rest it is far below zero.
#[derive(Debug, Default, Clone)]
struct Countdown(Arc<AtomicI64>);

impl Countdown {
    fn set(&self, calls: i64) {
        self.0.store(calls, Ordering::SeqCst);
    }

    /// Panics, without a message on stderr, if the countdown comes to zero.
    fn call(&self) {
        if self.0.fetch_sub(1, Ordering::SeqCst) == 1 {
            resume_unwind(Box::new("the countdown came to zero"));
        }
    }
}

/// A clock that panics after as many readings as its countdown says. The engine reads it between layers, when tokens are
/// chosen, and when commands and events are handled.
#[derive(Debug)]
struct PanickingClock(WallClock, Countdown);

impl Clock for PanickingClock {
    fn now(&self) -> Duration {
        self.1.call();
        self.0.now()
    }
}

/// A ledger that panics, with the pool's lock held.
#[derive(Debug)]
struct PanickingLedger(Countdown);

impl PageLedger for PanickingLedger {
    fn may_allocate(&self, _: usize) -> bool {
        self.0.call();
        true
    }

    fn has_headroom(&self, _: usize) -> bool {
        true
    }

    fn freed(&self, _: usize) {}
}

fn request(tokens: usize, seed: u32) -> Request {
    let config = GenerationConfig::new().with_max_tokens(tokens).with_ignore_end(true);
    Request::new("model", vec![3, 5, 8 + seed]).with_config(config)
}

#[test]
fn an_engine_goes_on_after_panics_and_answers_every_request() {
    let (readings, pages) = (Countdown::default(), Countdown::default());
    let clock = Arc::new(PanickingClock(WallClock::default(), readings.clone()));
    let engine = Engine::start(EngineConfig { clock, ..EngineConfig::default() }).unwrap();
    // One model with recurrent states, whose passes cannot be undone token by token.
    let model = models().remove(2);
    let layout = model.session().unwrap().cache().pool().layout().clone();
    let pool = PagePool::with_ledger(layout, Arc::new(PanickingLedger(pages.clone())));
    let of_engine = pool.clone();
    engine.with_core(move |core| core.add_in_pool("model", model, of_engine)).unwrap().unwrap();
    let tokens = |engine: &Engine, seed| engine.generate(request(12, seed)).wait().unwrap().summary.tokens;
    let expected: Vec<Vec<u32>> = (0..4).map(|seed| tokens(&engine, seed)).collect();
    let (mut failed, mut answered, mut returned) = (0, 0, 0);
    for round in 0..100i64 {
        let (countdown, after) =
            if round % 4 == 3 { (&pages, 1 + round % 3) } else { (&readings, 1 + round * 7 % 90) };
        countdown.set(after);
        let streams: Vec<_> = (0..4).map(|seed| engine.generate(request(12, seed))).collect();
        for (seed, stream) in streams.into_iter().enumerate() {
            let last = stream.filter(Event::is_last).last().expect("each request has a last event");
            match last {
                Event::Finished(outcome) => {
                    answered += 1;
                    assert_eq!(outcome.summary.tokens, expected[seed], "round {round}");
                }
                Event::Failed(failure) => {
                    failed += 1;
                    if let Some(mut session) = failure.session {
                        returned += 1;
                        // The session goes on, outside the engine.
                        session.feed(&[7]).unwrap();
                    }
                }
                other => unreachable!("{other:?}"),
            }
        }
        countdown.set(0);
        assert_eq!(tokens(&engine, 1), expected[1], "round {round}");
        assert_eq!(engine.health(), EngineHealth::Running);
        assert_eq!(engine.with_core(|core| core.under_way()).unwrap(), 0);
    }
    println!(
        "{} panics of the thread, {failed} requests failed, {returned} with session, {answered} answered",
        engine.failures()
    );
    assert!(engine.failures() >= 60, "{} failures", engine.failures());
    assert_eq!(engine.last_failure().as_deref(), Some("the countdown came to zero"));
    assert!(failed > 60 && answered > 60, "{failed} failed, {answered} were answered");
    drop(engine);
    assert_eq!(pool.free_pages(), pool.pages(), "all pages are free again");
}

#[test]
fn an_engine_ends_after_a_panic_if_told_to() {
    let readings = Countdown::default();
    let clock = Arc::new(PanickingClock(WallClock::default(), readings.clone()));
    let config = EngineConfig { clock, on_failure: OnFailure::End, ..EngineConfig::default() };
    let engine = Engine::start(config).unwrap();
    engine.add("model", models().remove(0)).unwrap();
    readings.set(40);
    let streams: Vec<_> = (0..3).map(|seed| engine.generate(request(30, seed))).collect();
    for stream in streams {
        let error = stream.wait().unwrap_err();
        assert!(matches!(error, EngineError::EngineFailed { .. } | EngineError::EngineOver), "{error}");
    }
    let began = Instant::now();
    while engine.health() != EngineHealth::Ended {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", engine.health());
        std::thread::yield_now();
    }
    assert!(matches!(engine.generate(request(3, 0)).wait(), Err(EngineError::EngineOver)));
}

#[test]
fn a_step_that_takes_too_long_is_a_stall() {
    let stall_after = Duration::from_millis(20);
    let engine = Engine::start(EngineConfig { stall_after, ..EngineConfig::default() }).unwrap();
    let (enter, entered) = channel();
    let (release, released) = channel::<()>();
    let ends = Arc::new(AtomicU64::new(0));
    let blocked = std::thread::spawn({
        let (engine, ends) = (engine.clone(), ends.clone());
        move || {
            engine
                .with_core(move |_| {
                    enter.send(()).unwrap();
                    let _ = released.recv();
                })
                .unwrap();
            ends.fetch_add(1, Ordering::SeqCst);
        }
    });
    entered.recv().unwrap();
    let began = Instant::now();
    while engine.health() == EngineHealth::Running {
        assert!(began.elapsed() < Duration::from_secs(60));
    }
    assert!(matches!(engine.health(), EngineHealth::Stalled { since } if since > stall_after));
    release.send(()).unwrap();
    blocked.join().unwrap();
    engine.with_core(|_| ()).unwrap();
    let began = Instant::now();
    while engine.health() != EngineHealth::Running {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", engine.health());
    }
    assert_eq!(ends.load(Ordering::SeqCst), 1);
}
