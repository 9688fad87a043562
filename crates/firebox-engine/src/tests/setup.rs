//! Tests of request setup.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use firebox_model::Head;
use firebox_runtime::heads::{FALLBACK, HeadPool, HeadPoolConfig, HeadSource, ReadyHead};
use firebox_runtime::{GenerationConfig, Grammar, RuntimeError, Session};
use firebox_testing::test_heads::TestHeads;

use super::{SimulatedClock, answer_of, one_model};
use crate::clock::Clock;
use crate::engine_core::{EngineConfig, EngineCore, StepOutcome};
use crate::error::EngineError;
use crate::event::{Event, Failure};
use crate::request::Request;
use crate::sequence::RequestId;

/// A source whose head fails to load once `after` requests have ended, or after half of [`PATIENCE`].
#[derive(Debug)]
struct SlowHeads {
    after: usize,
    ended: Arc<AtomicUsize>,
}

const PATIENCE: Duration = Duration::from_secs(60);

impl HeadSource for SlowHeads {
    fn names(&self) -> Result<Vec<String>, RuntimeError> {
        Ok(vec!["slow".into()])
    }

    fn generation(&self, name: &str) -> Result<Option<u64>, RuntimeError> {
        Ok((name == "slow").then_some(1))
    }

    fn bytes(&self, _: &str) -> Result<u64, RuntimeError> {
        Ok(1)
    }

    fn load(&self, name: &str) -> Result<ReadyHead, RuntimeError> {
        let began = Instant::now();
        while self.ended.load(Ordering::Relaxed) < self.after && began.elapsed() < PATIENCE / 2 {
            sleep(Duration::from_millis(1));
        }
        Err(RuntimeError::NoHead { name: name.into() })
    }
}

#[test]
fn other_requests_run_during_a_setup() {
    let (mut core, clock) = one_model(2);
    let count = Arc::new(AtomicUsize::new(0));
    let slow = SlowHeads { after: 4, ended: count.clone() };
    let pool = HeadPool::new(Arc::new(slow), HeadPoolConfig::patient()).unwrap();
    let session = || {
        let (_, model) = core.models().next().unwrap();
        model.session().unwrap().with_heads(pool.clone())
    };
    let [slow, late, cancelled] = [(); 3].map(|()| answer_of(3).in_session(session()).with_head("slow"));
    let slow = core.submit(slow, clock.now()).unwrap();
    let late = core.submit(late.with_first_by(Duration::ZERO).or_not_at_all(), clock.now()).unwrap();
    let cancelled = core.submit(cancelled, clock.now()).unwrap();
    let grammar = Grammar::Regex("a(b".into());
    let wrong = answer_of(3).with_config(GenerationConfig::new().with_grammar(grammar));
    let wrong = core.submit(wrong, clock.now()).unwrap();
    let other = core.submit(answer_of(6), clock.now()).unwrap();
    let (mut ended, mut failed) = (Vec::new(), HashMap::new());
    let mut sink = |id: RequestId, event: Event| {
        if event.is_last() {
            ended.push(id);
            count.fetch_add(1, Ordering::Relaxed);
        }
        if let Event::Failed(failure) = event {
            failed.insert(id, failure.error);
        }
    };
    core.cancel(cancelled, clock.now(), &mut sink);
    while core.work(&clock, &mut sink) != StepOutcome::Idle {
        sleep(Duration::from_micros(100));
    }
    let place = |id: RequestId| ended.iter().position(|other| *other == id).unwrap();
    assert_eq!(ended.len(), 5);
    assert!(place(other) < place(slow) && place(late) < place(slow) && place(wrong) < place(slow));
    assert!(matches!(failed[&slow], EngineError::HeadUnavailable { .. }), "{:?}", failed[&slow]);
    assert!(matches!(failed[&late], EngineError::Late { .. }));
    assert!(!failed.contains_key(&other) && failed.contains_key(&wrong) && failed.contains_key(&cancelled));
    assert_eq!(core.under_way(), 0);
}

/// A source with a head that panics when it is built.
#[derive(Debug)]
struct PanickingHeads(Arc<TestHeads>);

impl HeadSource for PanickingHeads {
    fn names(&self) -> Result<Vec<String>, RuntimeError> {
        self.0.names()
    }

    fn generation(&self, name: &str) -> Result<Option<u64>, RuntimeError> {
        self.0.generation(name)
    }

    fn bytes(&self, name: &str) -> Result<u64, RuntimeError> {
        self.0.bytes(name)
    }

    fn load(&self, name: &str) -> Result<ReadyHead, RuntimeError> {
        self.0.load(name)
    }

    fn build(&self, head: &Head) -> Result<(), RuntimeError> {
        assert!(!head.id().starts_with("panicking"), "as if a kernel had been given an impossible shape");
        Ok(())
    }
}

/// Returns the failure of a request.
fn failure(core: &mut EngineCore, clock: &SimulatedClock, request: Request) -> Failure {
    let mut failed = None;
    let mut sink = |_: RequestId, event: Event| match event {
        Event::Failed(failure) => failed = Some(*failure),
        Event::Waiting { .. } => {}
        other => panic!("{other:?}"),
    };
    if let Err(failure) = core.submit(request, clock.now()) {
        return *failure;
    }
    while core.work(clock, &mut sink) != StepOutcome::Idle {
        sleep(Duration::from_micros(100));
    }
    failed.unwrap()
}

/// A request for `head` in a session that uses another one.
fn request_for(core: &EngineCore, pool: &HeadPool, head: &str) -> Request {
    let mut session = core.session("model").unwrap().with_heads(pool.clone());
    session.feed(&[4, 9]).unwrap();
    assert!(session.use_head("current").fallback_reason.is_none());
    answer_of(3).in_session(session).with_head(head)
}

#[track_caller]
fn assert_unchanged(session: Option<Box<Session>>) {
    let session = session.expect("the session is returned");
    let head = session.head().map(|head| head.id().to_string());
    assert_eq!((head.as_deref(), session.requested_head()), (Some("current 1"), Some("current")));
    assert_eq!((session.tokens(), session.cache().len()), (&[4, 9][..], 2));
}

#[test]
fn a_failed_setup_returns_the_session_unchanged() {
    let names = [FALLBACK, "current", "other", "broken", "panicking", "judge", "late"];
    let heads = TestHeads::new(&names.map(|name| (name, 1)));
    heads.change("broken", |head| head.fails = true);
    heads.change("judge", |head| head.is_classifier = true);
    heads.change("late", |head| head.is_held_back = true);
    let pool = HeadPool::new(Arc::new(PanickingHeads(heads.clone())), HeadPoolConfig::patient()).unwrap();
    let mut core = EngineCore::new(EngineConfig::default()).unwrap();
    core.add("model", heads.model.clone()).unwrap();
    let clock = SimulatedClock::default();

    for head in ["broken", "absent"] {
        let request = request_for(&core, &pool, head);
        let Failure { error, session } = failure(&mut core, &clock, request);
        assert!(matches!(error, EngineError::HeadUnavailable { .. }), "{error}");
        assert_unchanged(session);
    }
    // The second time the head is resident, and the request is not prepared on a thread of its own.
    for _ in 0..2 {
        let request = request_for(&core, &pool, "panicking");
        let Failure { error, session } = failure(&mut core, &clock, request);
        assert!(matches!(error, EngineError::Panicked { .. }), "{error}");
        assert_unchanged(session);
    }
    // The session has switched to the head before the check of its kind fails.
    let request = request_for(&core, &pool, "judge");
    let Failure { error, session } = failure(&mut core, &clock, request);
    assert!(
        matches!(error, EngineError::Runtime(RuntimeError::Kind { found: "a classifier head", .. })),
        "{error}"
    );
    assert_unchanged(session);

    let grammar = Grammar::Regex("a(b".into());
    let wrong = GenerationConfig::new().with_grammar(grammar);
    let request = request_for(&core, &pool, "other").with_config(wrong);
    assert_unchanged(failure(&mut core, &clock, request).session);

    let request = request_for(&core, &pool, "late").with_first_by(Duration::ZERO).or_not_at_all();
    let Failure { error, session } = failure(&mut core, &clock, request);
    assert!(matches!(error, EngineError::Late { .. }), "{error}");
    assert_unchanged(session);

    core.submit(request_for(&core, &pool, "late"), clock.now()).unwrap();
    let mut failed = None;
    let mut sink = |_: RequestId, event: Event| match event {
        Event::Failed(failure) => failed = Some(*failure),
        other => panic!("{other:?}"),
    };
    core.remove("model", &mut sink).unwrap();
    let Failure { error, session } = failed.unwrap();
    assert!(matches!(error, EngineError::NoModel { .. }), "{error}");
    assert_unchanged(session);
    assert_eq!(core.under_way(), 0);
    heads.change("late", |head| head.is_held_back = false);
}
