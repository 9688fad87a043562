use std::time::Duration;

use super::stage::{Stage, ms};
use super::*;
use firebox_memory::thermal::Heat;

fn interactive() -> Task {
    Task::new(Priority::Interactive)
}

/// More tokens than any test waits for.
const ENDLESS: usize = usize::MAX;

/// The share of the tokens in so much time that came in time for a steady pace.
fn kept_pace(came: &[Duration], from: Duration, until: Duration, period: Duration) -> f64 {
    let gaps: Vec<Duration> = came
        .windows(2)
        .filter(|pair| pair[0] >= from && pair[1] < until)
        .map(|pair| pair[1] - pair[0])
        .collect();
    // A reader who has a quarter of a second in hand reads on.
    let mut ahead = ms(250);
    let mut met = 0;
    for gap in &gaps {
        ahead = (ahead + period).saturating_sub(*gap).min(ms(250));
        met += usize::from(!ahead.is_zero());
    }
    met as f64 / gaps.len().max(1) as f64
}

fn came(stage: &Stage, model: usize) -> Vec<Duration> {
    stage.models[model].requests[0].came.clone()
}

#[test]
fn the_earlier_deadline_comes_first_and_the_higher_priority_before() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let [late, early, pinned] = ["late", "early", "pinned"].map(|name| scheduler.lane(name));
    let by = |priority, by| Task { first_by: Some(ms(by)), ..Task::new(priority) };
    scheduler.add(ms(0), late, by(Priority::Interactive, 300));
    scheduler.add(ms(0), early, by(Priority::Interactive, 200));
    let task = scheduler.add(ms(0), pinned, by(Priority::Pinned, 900));
    assert_eq!(scheduler.prefetch(ms(0)).collect::<Vec<_>>(), [pinned, early, late]);
    let chosen = |scheduler: &mut Scheduler, now| match scheduler.choose(ms(now), |_| Readiness::Ready) {
        Choice::Run { lane, .. } => lane,
        Choice::Wait { .. } => panic!("waits"),
    };
    assert_eq!(chosen(&mut scheduler, 0), pinned);
    scheduler.remove(task);
    assert_eq!(chosen(&mut scheduler, 60), early);
}

#[test]
fn between_tokens_the_earlier_deadline_comes_first_too() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let lanes = ["slow", "fast"].map(|name| scheduler.lane(name));
    for (lane, pace) in lanes.into_iter().zip([10.0, 20.0]) {
        let task = scheduler.add(ms(0), lane, Task { pace: Some(pace), ..interactive() });
        scheduler.ran(ms(0), lane, ms(1), 1);
        scheduler.token(ms(0), task);
        assert_eq!(scheduler.due(task), Some(ms(1000 / pace as u64)));
    }
    assert_eq!(scheduler.prefetch(ms(0)).collect::<Vec<_>>(), [lanes[1], lanes[0]]);
    assert_eq!(scheduler.choose(ms(0), |_| Readiness::Ready), Choice::Run { lane: lanes[1], until: ms(50) });
}

/// Its own work is a hundredth of the machine; that it is late is the disk's doing, and to demote it would help nobody.
#[test]
fn who_is_late_because_of_the_disk_is_no_laggard() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let [streamed, other] = ["streamed", "other"].map(|name| scheduler.lane(name));
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
fn a_lane_keeps_its_quantum_but_for_who_is_more_urgent() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let [one, other, urgent] = ["one", "other", "urgent"].map(|name| scheduler.lane(name));
    let ready = |_| Readiness::Ready;
    scheduler.add(ms(0), one, Task::new(Priority::Normal));
    assert_eq!(scheduler.choose(ms(0), ready), Choice::Run { lane: one, until: ms(50) });
    scheduler.add(ms(1), other, Task::new(Priority::Normal));
    scheduler.ran(ms(10), one, ms(10), 1);
    assert!(!scheduler.preempts(ms(10), one, ready));
    assert_eq!(scheduler.choose(ms(10), ready), Choice::Run { lane: one, until: ms(50) });
    scheduler.ran(ms(51), one, ms(41), 1);
    assert!(scheduler.preempts(ms(51), one, ready));
    assert!(!scheduler.preempts(ms(51), one, |_| Readiness::Waiting));
    assert_eq!(scheduler.choose(ms(51), ready), Choice::Run { lane: other, until: ms(101) });
    scheduler.add(ms(52), urgent, interactive());
    assert!(scheduler.preempts(ms(60), other, ready));
    assert_eq!(scheduler.choose(ms(60), ready), Choice::Run { lane: urgent, until: ms(110) });
    assert_eq!((scheduler.counters().preemptions, scheduler.counters().quanta), (1, 3));
}

#[test]
fn quanta_are_shorter_while_it_is_hot() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let lane = scheduler.lane("one");
    scheduler.add(ms(0), lane, interactive());
    scheduler.set_heat(Heat::Serious);
    assert_eq!(scheduler.choose(ms(0), |_| Readiness::Ready), Choice::Run { lane, until: ms(30) });
}

#[test]
fn what_is_not_in_memory_is_not_waited_for_while_others_are_ready() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let [urgent, other] = ["urgent", "other"].map(|name| scheduler.lane(name));
    let by = Task { first_by: Some(ms(70)), ..Task::new(Priority::Pinned) };
    scheduler.add(ms(0), urgent, by);
    scheduler.add(ms(0), other, Task::new(Priority::Background));
    let reading = |lane| if lane == urgent { Readiness::Waiting } else { Readiness::Ready };
    assert_eq!(scheduler.choose(ms(0), reading), Choice::Run { lane: other, until: ms(50) });
    assert!(!scheduler.preempts(ms(5), other, reading));
    assert!(scheduler.preempts(ms(10), other, |_| Readiness::Ready));
    let nothing = |lane| if lane == urgent { Readiness::Waiting } else { Readiness::Idle };
    assert_eq!(scheduler.choose(ms(10), nothing), Choice::Wait { until: Some(ms(70)) });
}

/// A disk that only read for the most urgent would let others starve that are never ready.
#[test]
fn the_disk_reads_for_who_has_waited_long() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let [urgent, other] = ["urgent", "other"].map(|name| scheduler.lane(name));
    scheduler.add(ms(0), urgent, interactive());
    scheduler.add(ms(0), other, Task::new(Priority::Background));
    let order = |scheduler: &Scheduler, now| scheduler.prefetch(ms(now)).collect::<Vec<_>>();
    assert_eq!(order(&scheduler, 400), [urgent, other]);
    scheduler.ran(ms(590), urgent, ms(10), 1);
    assert_eq!(order(&scheduler, 600), [other, urgent]);
    scheduler.ran(ms(610), other, ms(10), 1);
    assert_eq!(order(&scheduler, 620), [urgent, other]);
}

/// Three models that fit, until one of them takes four times as long.
#[test]
fn a_laggard_is_demoted_and_comes_back_and_others_keep_their_deadlines() {
    let mut stage = Stage::new();
    let models = [ms(12), ms(12), ms(15)].map(|token| stage.model(token, 6));
    let [_, _, laggard] = models.map(|model| stage.request(model, interactive(), 2, ENDLESS));
    stage.run_until(ms(10_000));
    assert_eq!(stage.scheduler.counters().demotions, 0);
    let before: u64 = stage.scheduler.counters().classes.iter().map(|class| class.slips).sum();
    assert_eq!(before, 0);

    stage.models[2].layer *= 4;
    stage.run_until(ms(13_000));
    assert!(stage.scheduler.is_demoted(laggard));
    let demoted = stage.scheduler.counters().events.clone();
    assert_eq!(demoted.len(), 1, "{demoted:?}");
    assert!(matches!(&demoted[0], ScheduleEvent::Demoted { task, slippage, demand, .. }
        if *task == laggard && *slippage > 0.3 && *demand > 1.0));
    let (slips, tokens) = (stage.scheduler.counters().classes[2].slips, stage.tokens(laggard));
    stage.run_until(ms(30_000));
    // Only the laggard is late from now on.
    let late = stage.scheduler.counters().classes[2].slips - slips;
    let of_laggard = (stage.tokens(laggard) - tokens) as u64;
    assert!(of_laggard > 100, "{of_laggard} tokens in 17 s of about a half of the machine");
    assert!(late <= of_laggard, "{late} late of {of_laggard}");
    for model in &models[..2] {
        let kept = kept_pace(&came(&stage, *model), ms(13_000), ms(30_000), ms(50));
        assert!(kept == 1.0, "{kept}");
    }

    stage.models[2].layer /= 4;
    stage.run_until(ms(33_000));
    assert!(!stage.scheduler.is_demoted(laggard));
    let last = stage.scheduler.counters().events.back().unwrap();
    assert!(matches!(last, ScheduleEvent::Restored { task, .. } if *task == laggard));
    assert!(last.to_string().contains("interactive again"), "{last}");
    assert_eq!(stage.scheduler.counters().demotions, 1);
}

/// All of them are late together, and only who takes the most of the machine is demoted for it.
#[test]
fn who_is_late_because_of_a_laggard_is_no_laggard() {
    for (small, large) in [(15, 40), (18, 38), (12, 60), (20, 45)] {
        let mut stage = Stage::new();
        let models = [ms(small), ms(small), ms(large)].map(|token| stage.model(token, 5));
        let [one, other, laggard] = models.map(|model| stage.request(model, interactive(), 1, ENDLESS));
        stage.run_until(ms(20_000));
        assert_eq!(stage.scheduler.counters().demotions, 1, "{:?}", stage.scheduler.counters().events);
        let demoted = [one, other, laggard].map(|task| stage.scheduler.is_demoted(task));
        assert_eq!(demoted, [false, false, true], "{small} and {large} ms");
    }
}

/// A laggard that mattered more than another does not hold it up.
#[test]
fn a_demoted_laggard_holds_up_nobody_that_mattered_less() {
    let mut stage = Stage::new();
    let (large, small) = (stage.model(ms(90), 9), stage.model(ms(20), 4));
    stage.request(large, interactive(), 0, ENDLESS);
    let normal = Task { pace: Some(20.0), ..Task::new(Priority::Normal) };
    stage.request(small, normal, 0, ENDLESS);
    stage.run_until(ms(2_000));
    let before = *stage.scheduler.counters().class(Priority::Normal);
    stage.run_until(ms(20_000));
    let after = *stage.scheduler.counters().class(Priority::Normal);
    assert_eq!(after.slips, before.slips);
    assert!(after.met - before.met >= 18 * 20, "{after:?}");
}

#[test]
fn a_pinned_model_always_answers_and_is_not_demoted() {
    let mut stage = Stage::new();
    let (slow, others) = (stage.model(ms(120), 6), stage.model(ms(45), 5));
    let pinned = stage.request(slow, Task::new(Priority::Pinned), 0, ENDLESS);
    stage.request(others, interactive(), 0, ENDLESS);
    stage.request(others, Task::new(Priority::Background), 0, ENDLESS);
    stage.run_until(ms(20_000));
    assert!(!stage.scheduler.is_demoted(pinned));
    // All of the machine but the share of those that wait.
    assert!(stage.tokens(pinned) as f64 > 0.85 * 20_000.0 / 120.0, "{}", stage.tokens(pinned));
    assert!(stage.models[others].requests[0].came.len() > 20);
}

/// Two minutes of four times what the machine can do.
#[test]
fn overload_keeps_the_deadlines_of_the_most_urgent_and_starves_nobody() {
    let mut stage = Stage::new();
    let top = stage.model(ms(10), 5);
    let middle = stage.model(ms(20), 10);
    let low = stage.model(ms(40), 20);
    // Every request takes this much of the machine: 0.2 and 0.3, 1.0 and 0.5, 2.0.
    let paced = |priority, pace| Task { pace: Some(pace), ..Task::new(priority) };
    stage.request(top, Task::new(Priority::Pinned), 3, ENDLESS);
    let other_top = stage.model(ms(15), 5);
    stage.request(other_top, Task::new(Priority::Pinned), 3, ENDLESS);
    stage.request(middle, paced(Priority::Interactive, 50.0), 5, ENDLESS);
    let other_middle = stage.model(ms(25), 10);
    stage.request(other_middle, Task::new(Priority::Normal), 5, ENDLESS);
    stage.request(low, paced(Priority::Background, 50.0), 5, ENDLESS);
    for second in 1..=12 {
        let before: Vec<usize> = stage.models.iter().map(|model| model.requests[0].came.len()).collect();
        stage.run_until(ms(10_000 * second));
        for (model, before) in stage.models.iter().zip(before) {
            let got = model.requests[0].came.len() - before;
            assert!(got >= 4, "{got} tokens in ten seconds for {:?}", model.requests[0].task.priority);
        }
    }
    let counters = stage.scheduler.counters();
    let met = counters.class(Priority::Pinned).met_share();
    assert!(met >= 0.99, "{met}");
    assert!(counters.class(Priority::Pinned).met > 4700);
    assert_eq!(stage.idle, Duration::ZERO);
}

/// A prompt that takes ten seconds, of which two were allowed.
#[test]
fn a_long_prompt_stalls_no_answer_of_its_priority() {
    let mut stage = Stage::new();
    let (answering, reading) = (stage.model(ms(20), 5), stage.model(ms(100), 10));
    stage.request(answering, interactive(), 0, ENDLESS);
    stage.run_until(ms(1_000));
    stage.request(reading, interactive(), 100, 20);
    stage.run_until(ms(30_000));
    let counters = stage.scheduler.counters().class(Priority::Interactive);
    assert_eq!(stage.done.len(), 1);
    assert_eq!(kept_pace(&came(&stage, answering), ms(0), ms(30_000), ms(50)), 1.0);
    assert!(counters.slips <= 20, "{counters:?}");
}

#[test]
fn who_comes_too_late_is_no_laggard() {
    let mut stage = Stage::new();
    let (model, other) = (stage.model(ms(20), 4), stage.model(ms(20), 4));
    let late = Task { first_by: Some(Duration::ZERO), ..interactive() };
    stage.request(model, late, 10, 100);
    stage.request(other, late, 30, 100);
    stage.run_until(ms(5_000));
    let counters = stage.scheduler.counters();
    assert_eq!((counters.demotions, counters.classes[2].late_firsts), (0, 2), "{:?}", counters.events);
}

#[test]
fn settings_that_make_no_sense_are_refused() {
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
fn a_new_lane_is_none_that_was_dropped() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let (_stays, gone) = (scheduler.lane("stays"), scheduler.lane("gone"));
    scheduler.drop_lane(gone);
    let new = scheduler.lane("new");
    assert_ne!(new, gone);
    let lost = scheduler.add(ms(0), gone, interactive());
    assert_eq!(scheduler.due(lost), None);
    scheduler.add(ms(0), new, interactive());
    scheduler.drop_lane(gone);
    assert_eq!(scheduler.choose(ms(0), |_| Readiness::Ready), Choice::Run { lane: new, until: ms(50) });
}

#[test]
fn nonsense_is_survived() {
    let mut scheduler = Scheduler::new(ScheduleConfig::default());
    let lane = scheduler.lane("gone");
    scheduler.drop_lane(lane);
    let task = scheduler.add(ms(1), lane, interactive());
    scheduler.token(ms(2), task);
    scheduler.ran(ms(2), lane, Duration::MAX, usize::MAX);
    scheduler.remove(task);
    let lane = scheduler.lane("there");
    for pace in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 1e-300] {
        scheduler.add(ms(3), lane, Task { pace: Some(pace), ..interactive() });
    }
    assert_eq!(scheduler.choose(ms(3), |_| Readiness::Ready), Choice::Run { lane, until: ms(53) });
    assert!(!scheduler.preempts(ms(1), lane, |_| Readiness::Ready), "time that goes back");
}
