//! Tests of the scheduler.

use std::time::Duration;

use super::harness::{Harness, ms};
use super::*;
use firebox_memory::thermal::Heat;

fn interactive() -> Task {
    Task::new(Priority::Interactive)
}

/// More tokens than any test waits for.
const ENDLESS: usize = usize::MAX;

/// Returns the share of tokens that were on time for a steady pace.
fn kept_pace(came: &[Duration], from: Duration, until: Duration, period: Duration) -> f64 {
    let gaps: Vec<Duration> = came
        .windows(2)
        .filter(|pair| pair[0] >= from && pair[1] < until)
        .map(|pair| pair[1] - pair[0])
        .collect();
    // A reader with a quarter of a second in hand does not notice.
    let mut ahead = ms(250);
    let mut met = 0;
    for gap in &gaps {
        ahead = (ahead + period).saturating_sub(*gap).min(ms(250));
        met += usize::from(!ahead.is_zero());
    }
    met as f64 / gaps.len().max(1) as f64
}

fn came(harness: &Harness, model: usize) -> Vec<Duration> {
    harness.models[model].requests[0].came.clone()
}

#[test]
fn higher_priorities_come_first_and_earlier_deadlines_among_equals() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let [late, early, pinned] = ["late", "early", "pinned"].map(|name| scheduler.add_model(name));
    let by = |priority, by| Task { first_by: Some(ms(by)), ..Task::new(priority) };
    scheduler.add(ms(0), late, by(Priority::Interactive, 300));
    scheduler.add(ms(0), early, by(Priority::Interactive, 200));
    let task = scheduler.add(ms(0), pinned, by(Priority::Pinned, 900));
    assert_eq!(scheduler.prefetch(ms(0)).collect::<Vec<_>>(), [pinned, early, late]);
    let chosen = |scheduler: &mut Scheduler, now| match scheduler.choose(ms(now), |_| Readiness::Ready) {
        Choice::Run { model, .. } => model,
        Choice::Wait { .. } => panic!("waits"),
    };
    assert_eq!(chosen(&mut scheduler, 0), pinned);
    scheduler.remove(task);
    assert_eq!(chosen(&mut scheduler, 60), early);
}

#[test]
fn earlier_deadlines_come_first_between_tokens_too() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let models = ["slow", "fast"].map(|name| scheduler.add_model(name));
    for (model, pace) in models.into_iter().zip([10.0, 20.0]) {
        let task = scheduler.add(ms(0), model, Task { pace: Some(pace), ..interactive() });
        scheduler.ran(ms(0), model, ms(1), 1);
        scheduler.token(ms(0), task);
        assert_eq!(scheduler.due(task), Some(ms(1000 / pace as u64)));
    }
    assert_eq!(scheduler.prefetch(ms(0)).collect::<Vec<_>>(), [models[1], models[0]]);
    assert_eq!(
        scheduler.choose(ms(0), |_| Readiness::Ready),
        Choice::Run { model: models[1], until: ms(50) }
    );
}

/// Its own work is a hundredth of the machine. It is late because of the disk, and demoting it would help no other task.
#[test]
fn a_task_that_is_late_because_of_the_disk_is_not_demoted() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let [streamed, other] = ["streamed", "other"].map(|name| scheduler.add_model(name));
    let task = scheduler.add(ms(0), streamed, interactive());
    scheduler.add(ms(0), other, Task::new(Priority::Background));
    for token in 1..100 {
        scheduler.ran(ms(token * 100), streamed, ms(1), 1);
        scheduler.token(ms(token * 100), task);
    }
    let counters = scheduler.counters();
    assert_eq!((counters.demotions, counters.class(Priority::Interactive).slips), (0, 98));
}

#[test]
fn a_model_keeps_its_quantum_unless_a_more_urgent_one_is_ready() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let [one, other, urgent] = ["one", "other", "urgent"].map(|name| scheduler.add_model(name));
    let ready = |_| Readiness::Ready;
    scheduler.add(ms(0), one, Task::new(Priority::Normal));
    assert_eq!(scheduler.choose(ms(0), ready), Choice::Run { model: one, until: ms(50) });
    scheduler.add(ms(1), other, Task::new(Priority::Normal));
    scheduler.ran(ms(10), one, ms(10), 1);
    assert_eq!(scheduler.choose(ms(10), ready), Choice::Run { model: one, until: ms(50) });
    scheduler.ran(ms(51), one, ms(41), 1);
    assert_eq!(scheduler.choose(ms(51), ready), Choice::Run { model: other, until: ms(101) });
    scheduler.add(ms(52), urgent, interactive());
    assert_eq!(scheduler.choose(ms(60), ready), Choice::Run { model: urgent, until: ms(110) });
    assert_eq!((scheduler.counters().preemptions, scheduler.counters().quanta), (1, 3));
}

#[test]
fn quanta_are_shorter_on_a_hot_machine() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let model = scheduler.add_model("one");
    scheduler.add(ms(0), model, interactive());
    scheduler.set_heat(Heat::Serious);
    assert_eq!(scheduler.choose(ms(0), |_| Readiness::Ready), Choice::Run { model, until: ms(30) });
}

#[test]
fn other_models_run_while_a_layer_is_read() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let [urgent, other] = ["urgent", "other"].map(|name| scheduler.add_model(name));
    let by = Task { first_by: Some(ms(70)), ..Task::new(Priority::Pinned) };
    scheduler.add(ms(0), urgent, by);
    scheduler.add(ms(0), other, Task::new(Priority::Background));
    let reading = |model| if model == urgent { Readiness::Waiting } else { Readiness::Ready };
    assert_eq!(scheduler.choose(ms(0), reading), Choice::Run { model: other, until: ms(50) });
    assert_eq!(scheduler.choose(ms(5), reading), Choice::Run { model: other, until: ms(50) });
    let all = |_| Readiness::Ready;
    assert_eq!(scheduler.choose(ms(10), all), Choice::Run { model: urgent, until: ms(60) });
    let nothing = |model| if model == urgent { Readiness::Waiting } else { Readiness::Idle };
    assert_eq!(scheduler.choose(ms(10), nothing), Choice::Wait { until: Some(ms(70)) });
}

/// A disk that read for the most urgent only would starve models that are never ready.
#[test]
fn the_disk_reads_for_models_that_have_waited_long() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let [urgent, other] = ["urgent", "other"].map(|name| scheduler.add_model(name));
    scheduler.add(ms(0), urgent, interactive());
    scheduler.add(ms(0), other, Task::new(Priority::Background));
    let order = |scheduler: &Scheduler, now| scheduler.prefetch(ms(now)).collect::<Vec<_>>();
    assert_eq!(order(&scheduler, 400), [urgent, other]);
    scheduler.ran(ms(590), urgent, ms(10), 1);
    assert_eq!(order(&scheduler, 600), [other, urgent]);
    scheduler.ran(ms(610), other, ms(10), 1);
    assert_eq!(order(&scheduler, 620), [urgent, other]);
}

/// Three models fit, until one of them takes four times as long.
#[test]
fn a_laggard_is_demoted_and_restored_and_others_keep_their_deadlines() {
    let mut harness = Harness::new();
    let models = [ms(12), ms(12), ms(15)].map(|token| harness.model(token, 6));
    let [_, _, laggard] = models.map(|model| harness.request(model, interactive(), 2, ENDLESS));
    harness.run_until(ms(10_000));
    assert_eq!(harness.scheduler.counters().demotions, 0);
    let before: u64 = harness.scheduler.counters().classes.iter().map(|class| class.slips).sum();
    assert_eq!(before, 0);

    harness.models[2].layer *= 4;
    harness.run_until(ms(13_000));
    assert!(harness.scheduler.is_demoted(laggard));
    let demoted = harness.scheduler.counters().events.clone();
    assert_eq!(demoted.len(), 1, "{demoted:?}");
    assert!(matches!(&demoted[0], ScheduleEvent::Demoted { task, slippage, demand, .. }
        if *task == laggard && *slippage > 0.3 && *demand > 1.0));
    let (slips, tokens) = (harness.scheduler.counters().classes[2].slips, harness.tokens(laggard));
    harness.run_until(ms(30_000));
    // Only the laggard is late from now on.
    let late = harness.scheduler.counters().classes[2].slips - slips;
    let of_laggard = (harness.tokens(laggard) - tokens) as u64;
    assert!(of_laggard > 100, "{of_laggard} tokens in 17 s of about a half of the machine");
    assert!(late <= of_laggard, "{late} late of {of_laggard}");
    for model in &models[..2] {
        let kept = kept_pace(&came(&harness, *model), ms(13_000), ms(30_000), ms(50));
        assert!(kept == 1.0, "{kept}");
    }

    harness.models[2].layer /= 4;
    harness.run_until(ms(33_000));
    assert!(!harness.scheduler.is_demoted(laggard));
    let last = harness.scheduler.counters().events.back().unwrap();
    assert!(matches!(last, ScheduleEvent::Restored { task, .. } if *task == laggard));
    assert!(last.to_string().contains("interactive again"), "{last}");
    assert_eq!(harness.scheduler.counters().demotions, 1);
}

/// All of them are late together, and only the one that takes most of the machine is demoted.
#[test]
fn tasks_that_are_late_because_of_a_laggard_are_not_demoted() {
    for (small, large) in [(15, 40), (18, 38), (12, 60), (20, 45)] {
        let mut harness = Harness::new();
        let models = [ms(small), ms(small), ms(large)].map(|token| harness.model(token, 5));
        let [one, other, laggard] = models.map(|model| harness.request(model, interactive(), 1, ENDLESS));
        harness.run_until(ms(20_000));
        assert_eq!(harness.scheduler.counters().demotions, 1, "{:?}", harness.scheduler.counters().events);
        let demoted = [one, other, laggard].map(|task| harness.scheduler.is_demoted(task));
        assert_eq!(demoted, [false, false, true], "{small} and {large} ms");
    }
}

/// A laggard of a higher priority does not block others.
#[test]
fn a_demoted_laggard_does_not_block_less_urgent_tasks() {
    let mut harness = Harness::new();
    let (large, small) = (harness.model(ms(90), 9), harness.model(ms(20), 4));
    harness.request(large, interactive(), 0, ENDLESS);
    let normal = Task { pace: Some(20.0), ..Task::new(Priority::Normal) };
    harness.request(small, normal, 0, ENDLESS);
    harness.run_until(ms(2_000));
    let before = *harness.scheduler.counters().class(Priority::Normal);
    harness.run_until(ms(20_000));
    let after = *harness.scheduler.counters().class(Priority::Normal);
    assert_eq!(after.slips, before.slips);
    assert!(after.met - before.met >= 18 * 20, "{after:?}");
}

#[test]
fn a_pinned_model_meets_its_deadlines_and_is_not_demoted() {
    let mut harness = Harness::new();
    let (slow, others) = (harness.model(ms(120), 6), harness.model(ms(45), 5));
    let pinned = harness.request(slow, Task::new(Priority::Pinned), 0, ENDLESS);
    harness.request(others, interactive(), 0, ENDLESS);
    harness.request(others, Task::new(Priority::Background), 0, ENDLESS);
    harness.run_until(ms(20_000));
    assert!(!harness.scheduler.is_demoted(pinned));
    // The whole machine but the share of the waiting models.
    assert!(harness.tokens(pinned) as f64 > 0.85 * 20_000.0 / 120.0, "{}", harness.tokens(pinned));
    assert!(harness.models[others].requests[0].came.len() > 20);
}

/// Two minutes of four times what the machine can do.
#[test]
fn overload_keeps_the_deadlines_of_the_most_urgent_and_starves_no_model() {
    let mut harness = Harness::new();
    let top = harness.model(ms(10), 5);
    let middle = harness.model(ms(20), 10);
    let low = harness.model(ms(40), 20);
    // Every request takes this much of the machine: 0.2 and 0.3, 1.0 and 0.5, 2.0.
    let paced = |priority, pace| Task { pace: Some(pace), ..Task::new(priority) };
    harness.request(top, Task::new(Priority::Pinned), 3, ENDLESS);
    let other_top = harness.model(ms(15), 5);
    harness.request(other_top, Task::new(Priority::Pinned), 3, ENDLESS);
    harness.request(middle, paced(Priority::Interactive, 50.0), 5, ENDLESS);
    let other_middle = harness.model(ms(25), 10);
    harness.request(other_middle, Task::new(Priority::Normal), 5, ENDLESS);
    harness.request(low, paced(Priority::Background, 50.0), 5, ENDLESS);
    for second in 1..=12 {
        let before: Vec<usize> = harness.models.iter().map(|model| model.requests[0].came.len()).collect();
        harness.run_until(ms(10_000 * second));
        for (model, before) in harness.models.iter().zip(before) {
            let got = model.requests[0].came.len() - before;
            assert!(got >= 4, "{got} tokens in ten seconds for {:?}", model.requests[0].task.priority);
        }
    }
    let counters = harness.scheduler.counters();
    let met = counters.class(Priority::Pinned).met_share();
    assert!(met >= 0.99, "{met}");
    assert!(counters.class(Priority::Pinned).met > 4700);
    assert_eq!(harness.idle, Duration::ZERO);
}

/// A prompt that takes ten seconds, with a deadline of two.
#[test]
fn a_long_prompt_does_not_stall_answers_of_its_priority() {
    let mut harness = Harness::new();
    let (answering, reading) = (harness.model(ms(20), 5), harness.model(ms(100), 10));
    harness.request(answering, interactive(), 0, ENDLESS);
    harness.run_until(ms(1_000));
    harness.request(reading, interactive(), 100, 20);
    harness.run_until(ms(30_000));
    let counters = harness.scheduler.counters().class(Priority::Interactive);
    assert_eq!(harness.done.len(), 1);
    assert_eq!(kept_pace(&came(&harness, answering), ms(0), ms(30_000), ms(50)), 1.0);
    assert!(counters.slips <= 20, "{counters:?}");
}

#[test]
fn a_task_that_arrives_late_is_no_laggard() {
    let mut harness = Harness::new();
    let (model, other) = (harness.model(ms(20), 4), harness.model(ms(20), 4));
    let late = Task { first_by: Some(Duration::ZERO), ..interactive() };
    harness.request(model, late, 10, 100);
    harness.request(other, late, 30, 100);
    harness.run_until(ms(5_000));
    let counters = harness.scheduler.counters();
    assert_eq!((counters.demotions, counters.classes[2].late_firsts), (0, 2), "{:?}", counters.events);
}

#[test]
fn invalid_settings_are_refused() {
    let default = ScheduleConfig::default();
    assert!(default.check().is_ok());
    for config in [
        ScheduleConfig { quantum: Duration::ZERO, ..default.clone() },
        ScheduleConfig { quantum_hot: Duration::MAX, ..default.clone() },
        ScheduleConfig { slippage: f64::NAN, ..default.clone() },
        ScheduleConfig { slippage: 1e300, ..default.clone() },
        ScheduleConfig { target: 0.0, ..default.clone() },
        ScheduleConfig { share: 1.0, ..default.clone() },
    ] {
        assert!(config.check().is_err(), "{config:?}");
    }
    let json = serde_json::to_string(&default).unwrap();
    assert_eq!(serde_json::from_str::<ScheduleConfig>(&json).unwrap(), default);
}

#[test]
fn a_new_model_has_a_new_id() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let (_stays, gone) = (scheduler.add_model("stays"), scheduler.add_model("gone"));
    scheduler.remove_model(gone);
    let new = scheduler.add_model("new");
    assert_ne!(new, gone);
    let lost = scheduler.add(ms(0), gone, interactive());
    assert_eq!(scheduler.due(lost), None);
    scheduler.add(ms(0), new, interactive());
    scheduler.remove_model(gone);
    assert_eq!(scheduler.choose(ms(0), |_| Readiness::Ready), Choice::Run { model: new, until: ms(50) });
}

#[test]
fn extreme_inputs_do_not_panic() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let model = scheduler.add_model("gone");
    scheduler.remove_model(model);
    let task = scheduler.add(ms(1), model, interactive());
    scheduler.token(ms(2), task);
    scheduler.ran(ms(2), model, Duration::MAX, usize::MAX);
    scheduler.remove(task);
    let model = scheduler.add_model("there");
    for pace in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 1e-300] {
        scheduler.add(ms(3), model, Task { pace: Some(pace), ..interactive() });
    }
    assert_eq!(scheduler.choose(ms(3), |_| Readiness::Ready), Choice::Run { model, until: ms(53) });
    let earlier = scheduler.choose(ms(1), |_| Readiness::Ready);
    assert_eq!(earlier, Choice::Run { model, until: ms(53) }, "time that goes back");
}
