//! Tests of the public interface of an engine: many requests, several models, threads and executors.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use firebox::engine::{
    Engine, EngineConfig, EngineError, Event, Pipeline, PipelineEvent, Priority, Request, Stage,
};
use firebox::internals::runtime::ScheduleError;
use firebox::internals::runtime::schedule::{AdmissionConfig, ScheduleCounters};
use firebox::internals::runtime::thermal::Thermometer;
use firebox::residency::ResidencyOptions;
use firebox::{Finish, Generation, GenerationConfig, Model, RuntimeError, SamplerConfig, device};
use futures_core::Stream;

fn model(name: &str) -> Model {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference");
    Model::open(root.join(name), &device("cpu").unwrap()).unwrap()
}

fn prompt(from: u32, count: u32) -> Vec<u32> {
    (0..count).map(|index| 3 + (from + index * 31) % 150).collect()
}

fn tokens(most: usize) -> GenerationConfig {
    GenerationConfig::new().with_max_tokens(most).with_ignore_end(true)
}

fn alone(model: &Model, prompt: &[u32], config: GenerationConfig) -> Vec<u32> {
    let mut session = model.session().unwrap();
    let mut generation = Generation::begin(&mut session, None, prompt, config).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    generation.finish().unwrap().tokens
}

fn engine(models: &[(&str, &Model)]) -> Engine {
    let engine = Engine::start(EngineConfig::default()).unwrap();
    for (name, model) in models {
        engine.add(name, (*model).clone()).unwrap();
    }
    engine
}

/// Waits for a condition that another thread fulfils.
fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Under critical heat, one of four requests runs and the others are sent their place in the queue. All answers are the
/// same as alone.
#[test]
fn fewer_requests_run_together_on_a_hot_machine() {
    let model = model("llama");
    let admission = AdmissionConfig { most_running: 4, ..AdmissionConfig::default() };
    let engine = Engine::start(EngineConfig { admission, ..EngineConfig::default() }).unwrap();
    engine.add("llama", model.clone()).unwrap();
    let waited = |celsius: f32| {
        let mut thermometer = Thermometer::new(move || Some(celsius));
        thermometer.read();
        engine.set_thermometer(thermometer).unwrap();
        let asked: Vec<_> = (0..4).map(|index| prompt(index, 7)).collect();
        let ask = |prompt: &Vec<u32>| {
            engine.generate(Request::new("llama", prompt.clone()).with_config(tokens(40)))
        };
        let answering: Vec<_> = asked.iter().map(ask).collect();
        let mut waited = 0;
        for (answering, prompt) in answering.into_iter().zip(&asked) {
            let mut has_waited = false;
            for event in answering {
                match event {
                    Event::Waiting { .. } => has_waited = true,
                    Event::Finished(outcome) => {
                        assert_eq!(outcome.summary.tokens, alone(&model, prompt, tokens(40)));
                    }
                    Event::Failed(failure) => panic!("{}", failure.error),
                    _ => {}
                }
            }
            waited += usize::from(has_waited);
        }
        waited
    };
    assert_eq!(waited(40.0), 0);
    assert_eq!(waited(99.0), 3);
    assert_eq!(waited(40.0), 0);
}

#[test]
fn two_models_answer_at_once() {
    let models = [("llama", model("llama")), ("qwen", model("qwen3_5_text"))];
    let engine = engine(&[("llama", &models[0].1), ("qwen", &models[1].1)]);
    let asked: Vec<_> = (0..8u32)
        .map(|index| {
            let (name, model) = &models[index as usize % 2];
            let prompt = prompt(index, 5 + index * 3);
            let config = tokens(12 + index as usize)
                .with_sampler(SamplerConfig::default().with_temperature((index % 3) as f32).with_seed(7));
            let answering = engine.generate(Request::new(*name, prompt.clone()).with_config(config.clone()));
            (answering, alone(model, &prompt, config))
        })
        .collect();
    for (answering, expected) in asked {
        let outcome = answering.wait().unwrap();
        assert_eq!(outcome.summary.tokens, expected);
        assert_eq!(outcome.summary.finish, Finish::Length);
        assert!(outcome.session.tokens().ends_with(&expected));
    }
}

#[test]
fn a_session_continues_after_its_answer() {
    let model = model("llama");
    let engine = engine(&[("llama", &model)]);
    let first = engine.generate(Request::new("llama", prompt(1, 9)).with_config(tokens(5))).wait().unwrap();
    let before = first.session.tokens().to_vec();
    let next = Request::new("llama", prompt(2, 4)).with_config(tokens(6)).in_session(first.session);
    let second = engine.generate(next).wait().unwrap();
    let whole = [&before[..], &prompt(2, 4)].concat();
    assert_eq!(second.summary.tokens, alone(&model, &whole, tokens(6)));
}

#[test]
fn a_dropped_stream_cancels_its_request() {
    let model = model("llama");
    let engine = engine(&[("llama", &model)]);
    let mut answering = engine.generate(Request::new("llama", prompt(1, 4)).with_config(tokens(100_000)));
    assert!(matches!(answering.next(), Some(Event::Waiting { .. } | Event::Piece(_))));
    drop(answering);
    soon("a request without a listener ends", || engine.with_core(|core| core.under_way()).unwrap() == 0);
}

#[test]
fn a_cancelled_request_returns_its_answer_so_far() {
    let model = model("llama");
    let engine = engine(&[("llama", &model)]);
    let mut answering = engine.generate(Request::new("llama", prompt(1, 4)).with_config(tokens(100_000)));
    answering.next();
    answering.cancel();
    let outcome = answering.wait().unwrap();
    assert_eq!(outcome.summary.finish, Finish::Cancelled);
    assert!(!outcome.summary.tokens.is_empty());
}

#[test]
fn a_slow_reader_holds_up_no_other_request() {
    let model = model("llama");
    let engine = engine(&[("llama", &model)]);
    let slow = engine.generate(Request::new("llama", prompt(1, 4)).with_config(tokens(300)));
    let fast = engine.generate(Request::new("llama", prompt(2, 4)).with_config(tokens(200)));
    assert_eq!(fast.wait().unwrap().summary.tokens.len(), 200);
    assert_eq!(engine.with_core(|core| core.under_way()).unwrap(), 1, "it has not ended");
    // Its event buffer is full, so it is paused.
    let layers = || engine.with_core(|core| core.counters().layers).unwrap();
    let mut before = layers();
    soon("it waits", || {
        thread::sleep(Duration::from_millis(20));
        std::mem::replace(&mut before, layers()) == before
    });
    assert_eq!(slow.wait().unwrap().summary.tokens, alone(&model, &prompt(1, 4), tokens(300)));
}

#[test]
fn invalid_requests_are_refused_at_once() {
    let model = model("llama");
    let engine = engine(&[("llama", &model)]);
    let failed = |request: Request| engine.generate(request).wait().unwrap_err();
    assert!(matches!(failed(Request::new("other", vec![3])), EngineError::NoModel { .. }));
    assert!(matches!(failed(Request::new("llama", vec![])), EngineError::Runtime(RuntimeError::Model(_))));
    assert!(matches!(
        failed(Request::new("llama", vec![1 << 30])),
        EngineError::Runtime(RuntimeError::Model(_))
    ));
    let foreign = self::model("llama").session().unwrap();
    let foreign = Request::new("llama", vec![3]).in_session(foreign);
    assert!(matches!(failed(foreign), EngineError::ForeignSession { .. }));
    assert!(matches!(engine.add("llama", model.clone()), Err(EngineError::ModelNamed { .. })));
    let answering = engine.generate(Request::new("llama", prompt(1, 4)).with_config(tokens(100_000)));
    engine.remove("llama").unwrap();
    assert!(matches!(answering.wait(), Err(EngineError::NoModel { .. })));
}

#[test]
fn a_panic_of_a_core_command_is_returned() {
    let model = model("llama");
    let engine = engine(&[("llama", &model)]);
    let answering = engine.generate(Request::new("llama", prompt(1, 4)).with_config(tokens(20)));
    let acted = engine.with_core(|_| -> usize { panic!("on purpose") });
    assert!(matches!(acted, Err(EngineError::Panicked { reason }) if reason == "on purpose"));
    assert_eq!(answering.wait().unwrap().summary.tokens.len(), 20);
}

#[test]
fn a_response_stream_keeps_the_engine() {
    let model = model("llama");
    let answering = {
        let engine = engine(&[("llama", &model)]);
        engine.generate(Request::new("llama", prompt(1, 4)).with_config(tokens(20)))
    };
    assert_eq!(answering.wait().unwrap().summary.tokens.len(), 20);
}

/// A thread of the pool that waits within a layer steals other work. A session's own computation must not run on top of
/// a layer that holds what it waits for.
#[test]
fn a_session_goes_on_beside_an_engine_that_streams() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/qwen3");
    let options = ResidencyOptions { layers: Some(0), buffers: Some(2), ..ResidencyOptions::new(8 << 30) };
    let model = Model::open_within(root, &device("cpu").unwrap(), &options).unwrap();
    let engine = engine(&[("model", &model)]);
    let (done, is_done) = std::sync::mpsc::channel();
    let beside = thread::spawn({
        let engine = engine.clone();
        move || {
            for round in 0..150u32 {
                let mut session = engine.with_core(|core| core.session("model")).unwrap().unwrap();
                session.feed(&prompt(round, 40)).unwrap();
            }
            done.send(()).unwrap();
        }
    });
    let mut asked = 0;
    while is_done.try_recv().is_err() {
        asked += 1;
        let answering = (0..3).map(|index| {
            engine.generate(Request::new("model", prompt(asked + index, 150)).with_config(tokens(20)))
        });
        let answering: Vec<_> = answering.collect();
        for answering in answering {
            let (said, answer) = std::sync::mpsc::channel();
            thread::spawn(move || drop(said.send(answering.wait())));
            let outcome = answer.recv_timeout(Duration::from_secs(120)).expect("no timeout").unwrap();
            assert_eq!(outcome.summary.tokens.len(), 20);
        }
    }
    beside.join().unwrap();
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn streams_run_on_any_executor() {
    let model = model("llama");
    let engine = engine(&[("llama", &model)]);
    let mut answering = engine.generate(Request::new("llama", prompt(3, 6)).with_config(tokens(30)));
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut said = Vec::new();
    loop {
        match Pin::new(&mut answering).poll_next(&mut context) {
            Poll::Ready(Some(Event::Piece(piece))) => said.extend(piece.token),
            Poll::Ready(Some(_)) => {}
            Poll::Ready(None) => break,
            Poll::Pending => thread::park(),
        }
    }
    assert_eq!(said, alone(&model, &prompt(3, 6), tokens(30)));
}

#[test]
fn a_pipeline_answers_whatever_stage_fails() {
    let (llama, qwen) = (model("llama"), model("qwen3"));
    let engine = engine(&[("specialist", &llama), ("fallback", &qwen)]);
    let stage =
        |name: &str| Stage::new(name, |text: &str| Ok(prompt(text.len() as u32, 6))).with_config(tokens(8));
    let pipeline = Pipeline::new(&engine, stage("fallback"))
        .with_stage(stage("specialist").with_least_confidence(0.5))
        .with_stage(stage("nowhere"))
        .with_stage(stage("specialist").named("late").with_first_by(Duration::ZERO))
        .with_router(|text: &str| match text {
            "broken" => Err(RuntimeError::Cancelled),
            "unsure" => Ok(vec![("specialist".into(), 0.4)]),
            name => Ok(vec![(name.into(), 0.9), ("fallback".into(), 0.1)]),
        });
    for (text, by, model, replaced) in [
        ("specialist", "specialist", &llama, false),
        ("unsure", "fallback", &qwen, false),
        ("broken", "fallback", &qwen, true),
        ("nowhere", "fallback", &qwen, true),
        ("late", "fallback", &qwen, true),
    ] {
        let mut asked = pipeline.ask(text);
        let (mut was_replaced, mut said) = (false, None);
        for event in asked.by_ref() {
            match event {
                PipelineEvent::Replaced { .. } => was_replaced = true,
                PipelineEvent::Answer(Event::Finished(outcome)) => said = Some(outcome.summary.tokens),
                PipelineEvent::Answer(Event::Failed(failure)) => panic!("{text}: {}", failure.error),
                _ => {}
            }
        }
        assert_eq!((asked.stage(), was_replaced), (by, replaced), "{text}");
        assert_eq!(said.unwrap(), alone(model, &prompt(text.len() as u32, 6), tokens(8)), "{text}");
    }
}

/// The requests of a class that may wait for a model in the tests of overload.
const MOST_WAITING: usize = 32;

/// Starts an engine of two models with short queues.
fn engine_with_short_queues() -> Engine {
    let admission = AdmissionConfig { most_waiting: MOST_WAITING, ..AdmissionConfig::default() };
    let engine = Engine::start(EngineConfig { admission, ..EngineConfig::default() }).unwrap();
    engine.add("llama", model("llama")).unwrap();
    engine.add("qwen", model("qwen3")).unwrap();
    engine
}

/// Returns a request to one of the two models.
fn request(index: u32, priority: Priority) -> Request {
    let name = if index.is_multiple_of(2) { "llama" } else { "qwen" };
    Request::new(name, prompt(index * 97, 8)).with_config(tokens(40)).with_priority(priority)
}

/// Returns the class of a request. Few are pinned, because all of those must be answered in time.
fn class(index: u32) -> Priority {
    match index % 16 {
        0 => Priority::Pinned,
        1..=4 => Priority::Interactive,
        5..=10 => Priority::Normal,
        _ => Priority::Background,
    }
}

/// Submits four times as many requests as two models can answer, for `time`. Returns the scheduler's counters and the
/// number of refused requests.
fn overloaded(time: Duration) -> (ScheduleCounters, usize) {
    let engine = engine_with_short_queues();
    // Measures the time per request.
    let began = Instant::now();
    let asked: Vec<_> = (0..32).map(|index| engine.generate(request(index, Priority::Normal))).collect();
    for answering in asked {
        answering.wait().unwrap();
    }
    let each = began.elapsed() / 32;
    let (began, mut refused, mut listening) = (Instant::now(), 0, Vec::new());
    for index in 0u32.. {
        let due = began + each * index / 4;
        if due - began > time {
            break;
        }
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let answering = engine.generate(request(index, class(index)));
        listening.push(thread::spawn(move || answering.wait().map(|outcome| outcome.summary.tokens.len())));
        // Joins finished threads meanwhile, so that there are not thousands of them.
        let (done, going): (Vec<_>, Vec<_>) =
            listening.into_iter().partition(thread::JoinHandle::is_finished);
        listening = going;
        refused += done.into_iter().map(|done| usize::from(is_refused(done.join().unwrap()))).sum::<usize>();
    }
    let counters = engine.with_core(|core| core.counters().clone()).unwrap();
    refused += listening.into_iter().map(|done| usize::from(is_refused(done.join().unwrap()))).sum::<usize>();
    (counters, refused)
}

/// Returns whether a request was refused. Otherwise it got all of its tokens.
fn is_refused(answered: Result<usize, EngineError>) -> bool {
    match answered {
        Ok(tokens) => {
            assert_eq!(tokens, 40);
            false
        }
        Err(EngineError::Schedule(ScheduleError::QueueFull { .. })) => true,
        Err(error) => panic!("{error}"),
    }
}

/// All requests come at once: more than can wait, and before any can run. What is refused and what is admitted is then certain.
#[test]
fn overload_is_refused_and_admitted_requests_progress() {
    let engine = engine_with_short_queues();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let held = thread::spawn({
        let engine = engine.clone();
        move || engine.with_core(move |_| released.recv())
    });
    let count = 16 * MOST_WAITING as u32;
    let asked: Vec<_> = (0..count).map(|index| engine.generate(request(index, class(index)))).collect();
    release.send(()).unwrap();
    held.join().unwrap().unwrap().unwrap();
    let (mut refused, mut answered) = ([0; Priority::ALL.len()], [0; Priority::ALL.len()]);
    for (index, answering) in (0..).zip(asked) {
        let tokens = answering.wait().map(|outcome| outcome.summary.tokens.len());
        let counts = if is_refused(tokens) { &mut refused } else { &mut answered };
        counts[class(index) as usize] += 1;
    }
    for (priority, (refused, answered)) in Priority::ALL.into_iter().zip(refused.into_iter().zip(answered)) {
        assert!(answered > 0, "{priority} starves");
        // The queues of both models take as many of a class as may wait, besides those that run.
        let is_full = refused + answered > 3 * MOST_WAITING;
        assert_eq!(refused > 0, is_full, "{priority}: {refused} refused, {answered} answered");
    }
}

#[test]
#[ignore = "soak: two minutes, on a machine that does nothing else: cargo test --release --test engine -- --ignored"]
fn the_top_class_keeps_its_deadlines() {
    let (counters, refused) = overloaded(Duration::from_secs(120));
    let top = &counters.classes[Priority::Pinned as usize];
    let met = top.met_share();
    assert!(met >= 0.99, "{met} of {} deadlines, {refused} refused", top.met + top.slips);
    for (class, priority) in counters.classes.iter().zip(Priority::ALL) {
        assert!(class.tokens > 0, "{priority} starves");
    }
    eprintln!("{met} of {} deadlines met, {refused} refused, {counters:?}", top.met + top.slips);
}
