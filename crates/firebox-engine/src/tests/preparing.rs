//! Tests of request preparation.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use firebox_model::Head;
use firebox_runtime::heads::{FALLBACK, HeadPool, HeadPoolConfig, HeadSource, ReadyHead};
use firebox_runtime::{GenerationConfig, Grammar, RuntimeError, Session};
use firebox_testing::heads::TestHeads;

use super::{MadeUp, answer_of, small};
use crate::clock::Clock;
use crate::engine_core::{EngineConfig, EngineCore, StepOutcome};
use crate::event::{Event, Failure};
use crate::request::Request;
use crate::sequence::RequestId;

/// A source whose head fails to load once `after` requests have ended, or after half of [`PATIENCE`].
#[derive(Debug)]
struct Slow {
    after: usize,
    ended: Arc<AtomicUsize>,
}

const PATIENCE: Duration = Duration::from_secs(60);

impl HeadSource for Slow {
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
fn others_run_while_a_request_is_prepared() {
    let (mut host, clock) = small(2);
    let count = Arc::new(AtomicUsize::new(0));
    let slow = Slow { after: 4, ended: count.clone() };
    let rack = HeadPool::new(Arc::new(slow), HeadPoolConfig::patient()).unwrap();
    let session = || {
        let (_, model) = host.models().next().unwrap();
        model.session().unwrap().with_heads(rack.clone())
    };
    let [slow, late, cancelled] = [(); 3].map(|()| answer_of(3).in_session(session()).with_head("slow"));
    let slow = host.submit(slow, clock.now()).unwrap();
    let late = host.submit(late.with_first_by(Duration::ZERO).or_not_at_all(), clock.now()).unwrap();
    let cancelled = host.submit(cancelled, clock.now()).unwrap();
    let grammar = Some(Grammar::Regex("a(b".into()));
    let wrong = answer_of(3).with_config(GenerationConfig { grammar, ..GenerationConfig::default() });
    let wrong = host.submit(wrong, clock.now()).unwrap();
    let other = host.submit(answer_of(6), clock.now()).unwrap();
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
    host.cancel(cancelled, clock.now(), &mut sink);
    while host.work(&clock, &mut sink) != StepOutcome::Idle {
        sleep(Duration::from_micros(100));
    }
    let place = |id: RequestId| ended.iter().position(|other| *other == id).unwrap();
    assert_eq!(ended.len(), 5);
    assert!(place(other) < place(slow) && place(late) < place(slow) && place(wrong) < place(slow));
    assert!(matches!(failed[&slow], RuntimeError::HeadUnavailable { .. }), "{:?}", failed[&slow]);
    assert!(matches!(failed[&late], RuntimeError::Late { .. }));
    assert!(!failed.contains_key(&other) && failed.contains_key(&wrong) && failed.contains_key(&cancelled));
    assert_eq!(host.under_way(), 0);
}

/// A source with a head that panics when it is built.
#[derive(Debug)]
struct Touchy(Arc<TestHeads>);

impl HeadSource for Touchy {
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
        assert!(!head.id().starts_with("touchy"), "as if a kernel had been given an impossible shape");
        Ok(())
    }
}

/// Returns the failure of a request.
fn failure(host: &mut EngineCore, clock: &MadeUp, request: Request) -> Failure {
    let mut failed = None;
    let mut sink = |_: RequestId, event: Event| match event {
        Event::Failed(failure) => failed = Some(*failure),
        Event::Waiting { .. } => {}
        other => panic!("{other:?}"),
    };
    if let Err(failure) = host.submit(request, clock.now()) {
        return *failure;
    }
    while host.work(clock, &mut sink) != StepOutcome::Idle {
        sleep(Duration::from_micros(100));
    }
    failed.unwrap()
}

/// A request for `head` in a session that uses another one.
fn lent(host: &EngineCore, rack: &HeadPool, head: &str) -> Request {
    let mut session = host.session("model").unwrap().with_heads(rack.clone());
    session.feed(&[4, 9]).unwrap();
    assert!(session.use_head("current").fallback_reason.is_none());
    answer_of(3).in_session(session).with_head(head)
}

#[track_caller]
fn is_as_it_was_lent(session: Option<Box<Session>>) {
    let session = session.expect("the session is returned");
    let head = session.head().map(|head| head.id().to_string());
    assert_eq!((head.as_deref(), session.requested_head()), (Some("current 1"), Some("current")));
    assert_eq!((session.tokens(), session.cache().len()), (&[4, 9][..], 2));
}

#[test]
fn a_session_comes_back_as_it_was_lent_whatever_fails_while_a_request_is_prepared() {
    let names = [FALLBACK, "current", "other", "broken", "touchy", "judge", "late"];
    let heads = TestHeads::new(&names.map(|name| (name, 1)));
    heads.change("broken", |head| head.fails = true);
    heads.change("judge", |head| head.is_classifier = true);
    heads.change("late", |head| head.is_held_back = true);
    let rack = HeadPool::new(Arc::new(Touchy(heads.clone())), HeadPoolConfig::patient()).unwrap();
    let mut host = EngineCore::new(EngineConfig::default()).unwrap();
    host.add("model", heads.model.clone()).unwrap();
    let clock = MadeUp::default();

    for head in ["broken", "absent"] {
        let asked = lent(&host, &rack, head);
        let Failure { error, session } = failure(&mut host, &clock, asked);
        assert!(matches!(error, RuntimeError::HeadUnavailable { .. }), "{error}");
        is_as_it_was_lent(session);
    }
    // The second time the head is resident, and the request is not prepared on a thread of its own.
    for _ in 0..2 {
        let asked = lent(&host, &rack, "touchy");
        let Failure { error, session } = failure(&mut host, &clock, asked);
        assert!(matches!(error, RuntimeError::Panicked { .. }), "{error}");
        is_as_it_was_lent(session);
    }
    // The session has switched to the head before the check of its kind fails.
    let asked = lent(&host, &rack, "judge");
    let Failure { error, session } = failure(&mut host, &clock, asked);
    assert!(matches!(error, RuntimeError::Kind { found: "a classifier head", .. }), "{error}");
    is_as_it_was_lent(session);

    let grammar = Some(Grammar::Regex("a(b".into()));
    let wrong = GenerationConfig { grammar, ..GenerationConfig::default() };
    let asked = lent(&host, &rack, "other").with_config(wrong);
    is_as_it_was_lent(failure(&mut host, &clock, asked).session);

    let asked = lent(&host, &rack, "late").with_first_by(Duration::ZERO).or_not_at_all();
    let Failure { error, session } = failure(&mut host, &clock, asked);
    assert!(matches!(error, RuntimeError::Late { .. }), "{error}");
    is_as_it_was_lent(session);

    host.submit(lent(&host, &rack, "late"), clock.now()).unwrap();
    let mut failed = None;
    let mut sink = |_: RequestId, event: Event| match event {
        Event::Failed(failure) => failed = Some(*failure),
        other => panic!("{other:?}"),
    };
    host.remove("model", &mut sink).unwrap();
    let Failure { error, session } = failed.unwrap();
    assert!(matches!(error, RuntimeError::NoModel { .. }), "{error}");
    is_as_it_was_lent(session);
    assert_eq!(host.under_way(), 0);
    heads.change("late", |head| head.is_held_back = false);
}
