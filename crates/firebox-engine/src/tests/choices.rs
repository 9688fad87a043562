//! Tests of requests for several choices, which share their prompt.

use std::collections::BTreeMap;

use firebox_runtime::{Finish, Generation, GenerationConfig, Grammar, Model, SamplerConfig};
use firebox_schedule::{AdmissionConfig, ScheduleError};
use firebox_telemetry::{Counter, Telemetry};

use super::{SimulatedClock, answer_of, models};
use crate::clock::Clock;
use crate::engine_core::{EngineConfig, EngineCore, StepOutcome};
use crate::error::EngineError;
use crate::event::Event;
use crate::request::Request;
use crate::sequence::RequestId;

const CHOICES: usize = 5;

fn prompt() -> Vec<u32> {
    (0..70).map(|at| 3 + at % 90).collect()
}

fn config(seed: u64) -> GenerationConfig {
    let sampler = SamplerConfig::default().with_temperature(1.0).with_seed(seed);
    GenerationConfig::new().with_max_tokens(6).with_ignore_end(true).with_sampler(sampler)
}

fn core_of(model: &Model, admission: AdmissionConfig) -> EngineCore {
    let mut core = EngineCore::new(EngineConfig { admission, ..EngineConfig::default() }).unwrap();
    core.add("model", model.clone().with_telemetry(&Telemetry::default(), "model")).unwrap();
    core
}

fn count(core: &EngineCore, counter: Counter) -> u64 {
    core.models().next().unwrap().1.meters().count(counter)
}

/// Runs until nothing is left, and returns the tokens and the end of every choice.
fn outcomes(core: &mut EngineCore, clock: &SimulatedClock) -> BTreeMap<RequestId, (Vec<u32>, Finish)> {
    let mut ended = BTreeMap::new();
    let mut sink = |id: RequestId, event: Event| match event {
        Event::Finished(outcome) => {
            assert!(ended.insert(id, (outcome.summary.tokens, outcome.summary.finish)).is_none());
        }
        Event::Failed(failure) => panic!("{}", failure.error),
        Event::Piece(_) | Event::Waiting { .. } | Event::Vectors(_) | Event::Embedded(_) => {}
    };
    while core.work(clock, &mut sink) != StepOutcome::Idle {}
    assert_eq!(core.under_way(), 0);
    ended
}

fn alone(model: &Model, seed: u64) -> Vec<u32> {
    let mut session = model.session().unwrap();
    let mut generation = Generation::begin(&mut session, None, &prompt(), config(seed)).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    generation.finish().unwrap().tokens
}

#[test]
fn choices_are_those_of_single_requests_and_compute_their_prompt_once() {
    for model in models() {
        for most_running in [1, 3, 8] {
            let mut core = core_of(&model, AdmissionConfig { most_running, ..AdmissionConfig::default() });
            let clock = SimulatedClock::default();
            let request = Request::new("model", prompt()).with_config(config(7));
            let ids = core.submit_choices(request, CHOICES, clock.now()).unwrap();
            let ended = outcomes(&mut core, &clock);
            assert_eq!(count(&core, Counter::PromptTokens), prompt().len() as u64);
            // A pass for every token but the last, and one choice's prompt.
            let rows = (prompt().len() + CHOICES * 5) as u64;
            assert_eq!(
                count(&core, Counter::Rows),
                rows,
                "{most_running} at once, {:?}",
                model.checkpoint().path()
            );
            for (nth, id) in ids.iter().enumerate() {
                assert_eq!(ended[id], (alone(&model, 7 + nth as u64), Finish::Length), "choice {nth}");
            }
        }
    }
}

#[test]
fn a_choice_that_is_cancelled_leaves_the_prompt_to_the_next() {
    let model = models().remove(0);
    // Before the prompt has begun, within it, and after it.
    for steps in [0, 1, 2, 9, 30] {
        let mut core = core_of(&model, AdmissionConfig { most_running: 2, ..AdmissionConfig::default() });
        let clock = SimulatedClock::default();
        let request = Request::new("model", prompt()).with_config(config(7));
        let ids = core.submit_choices(request, CHOICES, clock.now()).unwrap();
        let mut ended = BTreeMap::new();
        let mut sink = |id: RequestId, event: Event| match event {
            Event::Finished(outcome) => {
                ended.insert(id, (outcome.summary.tokens, outcome.summary.finish));
            }
            Event::Failed(failure) => panic!("{}", failure.error),
            Event::Piece(_) | Event::Waiting { .. } | Event::Vectors(_) | Event::Embedded(_) => {}
        };
        for _ in 0..steps {
            core.work(&clock, &mut sink);
        }
        core.cancel(ids[0], clock.now(), &mut sink);
        core.cancel(ids[3], clock.now(), &mut sink);
        ended.extend(outcomes(&mut core, &clock));
        for nth in [1, 2, 4] {
            assert_eq!(
                ended[&ids[nth]].0,
                alone(&model, 7 + nth as u64),
                "choice {nth} after {steps} layers"
            );
        }
        assert_eq!(ended.len(), CHOICES);
    }
}

#[test]
fn all_choices_are_admitted_or_none() {
    let model = models().remove(0);
    let admission = AdmissionConfig { most_running: 2, most_waiting: 4, ..AdmissionConfig::default() };
    let mut core = core_of(&model, admission);
    let clock = SimulatedClock::default();
    core.submit_choices(answer_of(3), 4, clock.now()).unwrap();
    let refused = core.submit_choices(answer_of(3), 3, clock.now()).unwrap_err();
    assert!(matches!(refused.error, EngineError::Schedule(ScheduleError::QueueFull { limit: 4, .. })));
    assert_eq!(count(&core, Counter::RefusedRequests), 3);
    core.submit_choices(answer_of(1), 2, clock.now()).unwrap();
    assert_eq!(outcomes(&mut core, &clock).len(), 6);
}

#[test]
fn a_grammar_that_waits_for_others_is_cancelled_without_being_compiled() {
    let model = models().remove(0);
    let mut core = core_of(&model, AdmissionConfig::default());
    let clock = SimulatedClock::default();
    let grammars = core.grammars().clone();
    let permits: Vec<_> = std::iter::from_fn(|| grammars.try_permit()).collect();
    let config = GenerationConfig::new().with_grammar(Grammar::Regex("a+".into()));
    let ids = core.submit_choices(answer_of(3).with_config(config), 2, clock.now()).unwrap();
    assert_eq!(core.work(&clock, &mut |_, _| {}), StepOutcome::Waiting);
    ids.iter().for_each(|id| core.cancel(*id, clock.now(), &mut |_, _| {}));
    let ended = outcomes(&mut core, &clock);
    assert!(ended.values().all(|(_, finish)| *finish == Finish::Cancelled), "{ended:?}");
    assert_eq!((ended.len(), count(&core, Counter::CompiledGrammars)), (2, 0));
    drop(permits);
}
