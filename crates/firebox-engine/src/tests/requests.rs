//! Tests of requests that wait, pause, are cancelled or fail, and of models that come and go.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use firebox_memory::thermal::Heat;
use firebox_runtime::residency::{ShareOptions, SharedBudget};
use firebox_runtime::{Finish, device};
use firebox_schedule::{AdmissionConfig, Priority, ScheduleError};
use firebox_telemetry::Telemetry;

use super::{SimulatedClock, answer_of, models, one_model};
use crate::clock::Clock;
use crate::engine_core::{EngineConfig, EngineCore, StepOutcome};
use crate::error::EngineError;
use crate::event::Event;
use crate::sequence::RequestId;

#[test]
fn a_paused_request_that_is_cancelled_ends() {
    let (mut core, clock) = one_model(2);
    let mut ended = Vec::new();
    let mut sink = |id: RequestId, event: Event| match event {
        Event::Finished(outcome) => ended.push((id, outcome.summary.finish)),
        Event::Failed(failure) => panic!("{}", failure.error),
        Event::Piece(_) | Event::Waiting { .. } | Event::Vectors(_) | Event::Embedded(_) => {}
    };
    let id = core.submit(answer_of(1000), clock.now()).unwrap();
    // First in the middle of a pass, then between two.
    for _ in 0..7 {
        core.work(&clock, &mut sink);
    }
    core.hold(id, true, clock.now());
    core.cancel(id, clock.now(), &mut sink);
    for _ in 0..20 {
        core.work(&clock, &mut sink);
    }
    assert_eq!(ended, [(id, Finish::Cancelled)]);
    assert_eq!(core.under_way(), 0);
}

#[test]
fn removing_a_model_returns_its_sessions() {
    let layers = models()[0].decoder().unwrap().layers();
    // Covers positions between passes and within one, in prefill and in decoding.
    for steps in 0..=3 * layers {
        let (mut core, clock) = one_model(2);
        let request = answer_of(1000).in_session(core.session("model").unwrap());
        let id = core.submit(request, clock.now()).unwrap();
        for _ in 0..steps {
            core.work(&clock, &mut |_, _| {});
        }
        let mut returned = None;
        let mut sink = |of: RequestId, event: Event| match event {
            Event::Failed(failure) => returned = Some((of, failure.session)),
            other => panic!("{other:?}"),
        };
        let model = core.remove("model", &mut sink).unwrap().unwrap();
        let (of, mut session) = returned.unwrap();
        assert_eq!(of, id);
        let session = session.as_mut().unwrap_or_else(|| panic!("after {steps}"));
        let mut again = model.session().unwrap();
        let tokens = session.tokens().to_vec();
        let expected = again.feed(&[&tokens[..], &[7]].concat()).unwrap();
        assert_eq!(session.feed(&[7]).unwrap(), expected, "after {steps}");
    }
}

#[test]
fn others_run_in_place_of_a_paused_request() {
    let (mut core, clock) = one_model(1);
    let mut ended = Vec::new();
    let mut sink = |id: RequestId, event: Event| {
        if event.is_last() {
            ended.push(id);
        }
    };
    let slow = core.submit(answer_of(1000), clock.now()).unwrap();
    let other = core.submit(answer_of(4), clock.now()).unwrap();
    for _ in 0..5 {
        core.work(&clock, &mut sink);
    }
    core.hold(slow, true, clock.now());
    while core.work(&clock, &mut sink) != StepOutcome::Idle {}
    core.hold(slow, false, clock.now());
    core.cancel(slow, clock.now(), &mut sink);
    while core.work(&clock, &mut sink) != StepOutcome::Idle {}
    assert_eq!(ended, [other, slow]);
}

/// The queue of a model that is being opened is no longer than that of an open one.
#[test]
fn the_queue_of_an_opening_model_is_limited() {
    let admission = AdmissionConfig { most_running: 1, most_waiting: 2, ..AdmissionConfig::default() };
    let mut core = EngineCore::new(EngineConfig { admission, ..EngineConfig::default() }).unwrap();
    let (open, opens) = std::sync::mpsc::channel::<()>();
    let opens = std::sync::Mutex::new(opens);
    let opened = move || {
        opens.lock().unwrap().recv().unwrap();
        Ok(models().remove(0))
    };
    core.add_later("model", opened).unwrap();
    let clock = SimulatedClock(AtomicU64::new(0));
    for _ in 0..3 {
        core.submit(answer_of(2), clock.now()).unwrap();
    }
    let refused = core.submit(answer_of(2), clock.now()).unwrap_err();
    assert!(
        matches!(refused.error, EngineError::Schedule(ScheduleError::QueueFull { limit: 2, .. })),
        "{}",
        refused.error
    );
    core.submit(answer_of(2).with_priority(Priority::Interactive), clock.now()).unwrap();
    open.send(()).unwrap();
    let mut finished = 0;
    let mut sink = |_: RequestId, event: Event| finished += usize::from(matches!(event, Event::Finished(_)));
    while core.work(&clock, &mut sink) != StepOutcome::Idle {
        std::thread::sleep(Duration::from_micros(100));
    }
    assert_eq!(finished, 4);
}

#[test]
fn a_model_added_to_a_hot_machine_runs_as_few_requests_as_others() {
    let mut core = EngineCore::new(EngineConfig::default()).unwrap();
    core.set_heat(Heat::Critical);
    core.add("model", models().remove(0)).unwrap();
    let clock = SimulatedClock(AtomicU64::new(0));
    let count = AdmissionConfig::default().most_running;
    for _ in 0..count {
        core.submit(answer_of(2), clock.now()).unwrap();
    }
    let mut waited = HashSet::new();
    let mut sink = |id: RequestId, event: Event| {
        if matches!(event, Event::Waiting { .. }) {
            waited.insert(id.0);
        }
    };
    while core.work(&clock, &mut sink) != StepOutcome::Idle {}
    assert_eq!(waited.len(), count - Heat::Critical.batch(count));
}

#[test]
fn a_removed_model_is_dropped() {
    let (telemetry, shared) = (Telemetry::default(), SharedBudget::new(1 << 30).unwrap());
    let path = models()[0].checkpoint().path().to_owned();
    let model = shared.open(path, &device("cpu").unwrap(), &ShareOptions::default()).unwrap();
    let model = model.with_telemetry(&telemetry, "model");
    let decoder = Arc::downgrade(&model.decoder().unwrap());
    let mut core = EngineCore::new(EngineConfig::default()).unwrap();
    core.add("model", model).unwrap();
    drop(core.remove("model", &mut |_, _| {}).unwrap());
    // The pressure monitor may still hold a reference for a moment.
    let began = Instant::now();
    while decoder.upgrade().is_some() && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(decoder.upgrade().is_none());
}

#[test]
fn a_late_request_fails_and_returns_its_session() {
    let (mut core, clock) = one_model(1);
    let (mut late, mut finished) = (Vec::new(), Vec::new());
    let mut sink = |id: RequestId, event: Event| match event {
        Event::Failed(failure) => {
            assert!(matches!(failure.error, EngineError::Late { .. }), "{}", failure.error);
            assert!(failure.session.is_some());
            late.push(id);
        }
        Event::Finished(_) => finished.push(id),
        Event::Piece(_) | Event::Waiting { .. } | Event::Vectors(_) | Event::Embedded(_) => {}
    };
    let first = core.submit(answer_of(60), clock.now()).unwrap();
    let soon = Duration::from_millis(50);
    let second = core.submit(answer_of(4).with_first_by(soon).or_not_at_all(), clock.now()).unwrap();
    let third = core.submit(answer_of(4).with_first_by(soon), clock.now()).unwrap();
    while core.work(&clock, &mut sink) != StepOutcome::Idle {}
    assert_eq!((late, finished), (vec![second], vec![first, third]));
}
