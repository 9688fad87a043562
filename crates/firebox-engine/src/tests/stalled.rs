//! Tests of answers that are not read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use async_channel::Receiver;
use firebox_schedule::AdmissionConfig;
use firebox_telemetry::{Counter, Telemetry};

use super::{answer_of, models};
use crate::clock::Clock;
use crate::engine_core::{EngineConfig, EngineCore, StepOutcome};
use crate::engine_thread::{Command, EngineThread};
use crate::error::EngineError;
use crate::event::Event;
use crate::heartbeat::Heartbeat;

/// A clock that a test sets, in seconds.
#[derive(Debug, Clone, Default)]
struct SetClock(Arc<AtomicU64>);

impl Clock for SetClock {
    fn now(&self) -> Duration {
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }
}

const TIMEOUT: Duration = Duration::from_secs(30);

/// An engine of one request at a time, and its telemetry.
fn engine(clock: &SetClock) -> (EngineThread, Telemetry, Sender<Command>) {
    let admission = AdmissionConfig { most_running: 1, ..AdmissionConfig::default() };
    let clock = Arc::new(clock.clone());
    let config = EngineConfig { admission, stall_timeout: Some(TIMEOUT), clock, ..EngineConfig::default() };
    let mut core = EngineCore::new(config).unwrap();
    let telemetry = Telemetry::default();
    core.add("model", models().remove(0).with_telemetry(&telemetry, "model")).unwrap();
    let (commands, received) = channel();
    (EngineThread::new(core, received, Arc::new(Heartbeat::new())), telemetry, commands)
}

fn ask(engine: &mut EngineThread, ticket: u64, tokens: usize) -> Receiver<Event> {
    let (events, received) = async_channel::bounded(4);
    let request = Box::new(answer_of(tokens));
    engine.execute(Command::Submit { request, choices: vec![(ticket, events)] });
    received
}

fn run(engine: &mut EngineThread) {
    while engine.work() != StepOutcome::Idle {}
}

fn stalled(telemetry: &Telemetry) -> u64 {
    telemetry.snapshot().models.iter().map(|model| model.count(Counter::StalledRequests)).sum()
}

#[test]
fn an_answer_that_is_not_read_gives_its_place_away_and_fails_after_a_time() {
    let clock = SetClock::default();
    let (mut engine, telemetry, _commands) = engine(&clock);
    let unread = ask(&mut engine, 0, 100);
    run(&mut engine);
    assert!(unread.is_full());
    let other = ask(&mut engine, 1, 2);
    run(&mut engine);
    let has_finished = |events: &Receiver<Event>| {
        std::iter::from_fn(|| events.try_recv().ok()).any(|event| matches!(event, Event::Finished(_)))
    };
    assert!(has_finished(&other), "another answer has its place");
    // A reader that takes a single event is not stalled.
    clock.0.store(29, Ordering::Relaxed);
    unread.try_recv().unwrap();
    run(&mut engine);
    clock.0.store(58, Ordering::Relaxed);
    run(&mut engine);
    assert_eq!(stalled(&telemetry), 0);
    clock.0.store(60, Ordering::Relaxed);
    run(&mut engine);
    assert_eq!(stalled(&telemetry), 1);
    // A client that reads on finds what there was, and then the reason.
    let mut last = None;
    while let Ok(event) = unread.try_recv() {
        last = Some(event);
        run(&mut engine);
    }
    let Some(Event::Failed(failure)) = last else { panic!("{last:?}") };
    assert!(matches!(failure.error, EngineError::Stalled { after } if after == TIMEOUT), "{}", failure.error);
    let session = failure.session.unwrap();
    assert!(session.cache().is_empty() && session.tokens().len() > 3, "its tokens are left, and no pages");
}
