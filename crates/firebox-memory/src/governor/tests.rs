//! Tests of the governor on a simulated machine.

use proptest::prelude::*;

use super::simulation::{LAYER_BYTES, Run, Says};
use super::step_times::FEW_STEPS;
use super::*;
use crate::pressure::Warning;

fn this(level: Level) -> Says {
    Says::This(Pressure { level, available: None })
}

fn shed(run: &Run) -> Vec<Vec<usize>> {
    let layers = |event: &Event| match event {
        Event::Shed { layers } => Some(layers.clone()),
        _ => None,
    };
    run.events.iter().filter_map(layers).collect()
}

#[test]
fn without_pressure_nothing_happens() {
    let mut run = Run::new(24, 20, 200);
    run.steps(2000, Says::Truth);
    run.steps(2000, Says::Nothing);
    assert_eq!((run.machine.changes, run.events), (0, vec![]));
}

#[test]
fn a_quarter_is_evicted_from_the_end_when_memory_is_short() {
    let mut run = Run::new(24, 20, 200);
    run.steps(32, this(Level::Some));
    assert_eq!(shed(&run), [[19, 18, 17, 16, 15]]);
    run.steps(64, this(Level::Some));
    assert_eq!(shed(&run)[1], [14, 13, 12, 11]);
    run.steps(64 * 20, this(Level::Some));
    assert_eq!(run.kept(), 0);
}

#[test]
fn an_intermittent_level_is_one_event() {
    let mut run = Run::new(24, 20, 200);
    run.steps(64, Says::Truth);
    for step in 0..60 {
        run.steps(1, this(if step / 16 % 2 == 0 { Level::Some } else { Level::None }));
    }
    assert!(shed(&run).len() <= 1);
}

#[test]
fn critical_pressure_evicts_all_layers_at_the_next_reading() {
    let mut run = Run::new(24, 20, 200);
    run.steps(100, Says::Truth);
    run.steps(16, this(Level::Critical));
    assert_eq!(run.kept(), 0);
    assert_eq!(run.events[0], Event::Emergency { available: None });
    run.steps(500, this(Level::Critical));
    let news = run.events[2..].iter().filter(|event| !matches!(event, Event::Learned { .. }));
    assert_eq!(news.count(), 0, "nothing more to let go of is nothing to report");
}

#[test]
fn a_warning_takes_effect_after_the_next_step() {
    let mut run = Run::new(24, 20, 200);
    let (warning, warned) = Warning::channel();
    let (plan, config) = (run.governor.plan().clone(), GovernorConfig::default());
    run.governor = Governor::new(plan, vec![Box::new(warned)], config);
    run.steps(3, Says::Nothing);
    warning.raise(Level::Critical);
    run.steps(1, Says::Nothing);
    assert_eq!(run.kept(), 0);
}

#[test]
fn an_alarm_takes_effect_within_a_step() {
    let mut run = Run::new(24, 20, 200);
    run.steps(100, Says::Truth);
    let short = |level| Pressure { level, available: Some(0) };
    assert_eq!(run.governor.alarmed(short(Level::None), &mut run.machine), []);
    let events = run.governor.alarmed(short(Level::Some), &mut run.machine);
    assert_eq!(events[1], Event::Shed { layers: vec![19, 18, 17, 16, 15] });
    let events = run.governor.alarmed(short(Level::Critical), &mut run.machine);
    assert_eq!(events[0], Event::Emergency { available: Some(0) });
    assert_eq!(run.kept(), 0);
    assert_eq!(run.governor.alarmed(short(Level::Critical), &mut run.machine), []);
    run.steps(64 * 100, Says::Truth);
    assert!(run.kept() > 0, "it is kept again when that is over");
}

#[test]
fn the_plan_is_restored_after_pressure_ends() {
    for (level, says) in [
        (Level::Some, Says::Truth),
        (Level::Critical, Says::Truth),
        (Level::Some, Says::Nothing),
        (Level::Critical, Says::Nothing),
    ] {
        let mut run = Run::new(24, 20, 200);
        run.machine.capacity = 30;
        run.steps(200, this(level));
        assert!(run.kept() < 20);
        run.steps(150, says);
        let first = run.kept();
        run.steps(64 * 40, says);
        assert_eq!((run.kept(), run.machine.most_kept), (20, 20), "{level:?}, {says:?}");
        assert!(first < 10 || level == Level::Some, "it waits before it keeps anything");
        assert_eq!(run.machine.kept(), (0..20).collect::<Vec<_>>());
    }
}

/// Memory that was short for a long time is taken back as soon as memory that was short for a moment.
#[test]
fn long_pressure_does_not_lengthen_the_wait() {
    let mut run = Run::new(24, 20, 200);
    run.machine.capacity = 30;
    run.steps(64 * 50, this(Level::Some));
    assert_eq!(run.kept(), 0);
    run.steps(64 * 16, Says::Truth);
    assert_eq!(run.kept(), 20);
}

#[test]
fn loading_begins_after_a_streamed_step_was_measured() {
    let mut run = Run::new(24, 20, 200);
    run.steps(16, this(Level::Critical));
    let slow = Duration::from_secs(4);
    (0..31).for_each(|_| run.step(slow, 0, Says::Truth));
    assert_eq!(run.kept(), 0);
    (0..4).for_each(|_| run.step(slow, 0, Says::Truth));
    assert_ne!(run.kept(), 0);
    assert_eq!(run.governor.streaming_step_time(), slow);
}

#[test]
fn no_more_is_loaded_than_memory_holds() {
    let mut run = Run::new(24, 20, 200);
    run.steps(100, this(Level::Critical));
    run.machine.capacity = 11;
    run.steps(6400, Says::Truth);
    assert_eq!((run.kept(), shed(&run).len()), (10, 1), "one layer less than fits, for the margin");
    let little = Pressure { level: Level::None, available: Some(LAYER_BYTES) };
    run.machine.capacity = 24;
    run.steps(6400, Says::This(little));
    assert_eq!(run.kept(), 10);
}

#[test]
fn outliers_do_not_evict() {
    let mut run = Run::new(24, 20, 200);
    for step in 0..1000 {
        let slow = step % 5 < 2;
        run.step(Duration::from_millis(if slow { 300 } else { 8 }), 1000, Says::Nothing);
    }
    assert_eq!(run.machine.changes, 0);
}

#[test]
fn steps_slower_than_streaming_end_within_a_few() {
    let mut run = Run::new(24, 20, 200);
    run.steps(100, Says::Nothing);
    run.machine.capacity = 4;
    run.steps(5, Says::Nothing);
    assert_eq!(run.kept(), 0);
    assert!(matches!(run.events[0], Event::Thrash { major_faults: 1.., .. }));
    run.steps(200, Says::Nothing);
    assert!(run.events.iter().any(|event| matches!(event, Event::Learned { .. })));
}

/// Without page faults the plan may be wrong; with them memory is short.
#[test]
fn steps_slower_than_planned_count_only_with_page_faults() {
    let slow = Duration::from_millis(15);
    let mut run = Run::new(24, 24, 200);
    run.machine.capacity = 30;
    (0..500).for_each(|_| run.step(slow, 0, Says::Nothing));
    assert_eq!(run.kept(), 24);
    (0..32).for_each(|_| run.step(slow, 50, Says::Nothing));
    assert_eq!(run.kept(), 0, "streaming has to be measured first");
    run.steps(64 * 25, Says::Truth);
    assert_eq!(run.kept(), 24);
    (0..32).for_each(|_| run.step(slow, 50, Says::Nothing));
    assert_eq!(run.kept(), 12);
}

/// Holds without page faults and without any report of the system.
#[test]
fn nothing_stays_slower_than_streaming() {
    let mut run = Run::new(24, 20, 200);
    (0..40).for_each(|_| run.step(Duration::from_millis(26), 0, Says::Nothing));
    assert_eq!(run.kept(), 0);
}

/// The time of a streamed step is found only by streaming. If it was underestimated, that takes a few steps.
#[test]
fn layers_that_were_no_slower_than_streaming_are_loaded_again_at_once() {
    for (planned, percent) in [(4, 80), (10, 60), (20, 30)] {
        let mut run = Run::on(Duration::from_millis(1), 28, planned, 200, percent);
        run.machine.capacity = 30;
        run.steps(32, Says::Truth);
        assert_eq!(run.kept(), 0, "{planned} layers were dearer than expected");
        run.steps(FEW_STEPS, Says::Truth);
        assert_eq!(run.machine.kept(), (0..planned).collect::<Vec<_>>());
        assert_eq!(run.machine.changes, 2 * planned);
        run.steps(64 * 100, Says::Truth);
        assert_eq!(run.machine.changes, 2 * planned, "it is known now");
        // The time of a slower step is known, too.
        (0..40).for_each(|_| run.step(Duration::from_millis(31), 0, Says::Truth));
        assert_eq!(run.kept(), 0);
    }
}

#[test]
fn layers_of_a_trial_stay_evicted_if_memory_is_short() {
    let mut run = Run::on(Duration::from_millis(1), 28, 4, 200, 80);
    run.steps(32, Says::Truth);
    let none = Pressure { level: Level::None, available: Some(LAYER_BYTES * 5 / 2) };
    run.steps(FEW_STEPS, Says::This(none));
    assert_eq!(run.kept(), 2);
    let mut run = Run::on(Duration::from_millis(1), 28, 4, 200, 80);
    run.steps(32, Says::Truth);
    run.steps(60, this(Level::Some));
    assert_eq!(run.kept(), 0);
}

#[test]
fn layers_that_cannot_be_loaded_are_rarely_tried() {
    let mut run = Run::new(24, 20, 200);
    run.steps(100, this(Level::Critical));
    run.machine.capacity = 30;
    run.machine.refuses = true;
    run.steps(64 * 200, Says::Truth);
    let refused = run.events.iter().filter(|event| matches!(event, Event::Refused { .. })).count();
    assert!((10..20).contains(&refused), "{refused} times");
    run.machine.refuses = false;
    run.steps(64 * 40, Says::Truth);
    assert_eq!(run.kept(), 20);
}

#[test]
fn extreme_settings_do_not_panic() {
    let plan =
        ResidencyPlan { keep: vec![99, 0, 0], step_time: Duration::MAX, streaming_step_time: Duration::MAX };
    let mut run = Run::new(2, 2, 200);
    run.governor = Governor::new(plan, vec![], GovernorConfig::default());
    run.steps(300, Says::Nothing);
    run.step(Duration::MAX, u64::MAX, Says::Nothing);
    run.machine.capacity = 0;
    run.steps(300, Says::Nothing);
    let empty =
        ResidencyPlan { keep: vec![], step_time: Duration::ZERO, streaming_step_time: Duration::ZERO };
    run.governor = Governor::new(empty, vec![], GovernorConfig { check_tokens: 0, ..Default::default() });
    run.steps(300, Says::Nothing);
    assert_eq!(run.kept(), 0);
}

#[test]
fn events_are_readable() {
    let shown = |event: Event| event.to_string();
    assert_eq!(shown(Event::Shed { layers: vec![3, 2] }), "let go of layers 3, 2");
    assert_eq!(
        shown(Event::Short { available: Some(3 << 29) }),
        "memory is getting short, 1.50 GiB to spare"
    );
    let (step_time, expected) = (Duration::from_millis(120), Duration::from_millis(40));
    assert_eq!(
        shown(Event::Thrash { step_time, expected, major_faults: 7 }),
        "steps take 120.0ms instead of 40.0ms, with 7 page faults each"
    );
}

/// Steps of seconds are checked every few tokens, and resident layers save next to nothing.
#[test]
fn a_failure_is_earned_back_by_slow_steps_too() {
    let endless = Says::This(Pressure { level: Level::None, available: Some(u64::MAX) });
    let mut run = Run::on(Duration::from_millis(100), 30, 30, 997, 63);
    run.machine.blind = true;
    for (capacity, says, tokens) in [
        (21, this(Level::Some), 809),
        (17, Says::Truth, 485),
        (28, Says::Nothing, 2825),
        (23, Says::Nothing, 832),
        (13, endless, 868),
        (20, Says::Nothing, 739),
        (0, Says::Nothing, 461),
        (7, endless, 635),
        (18, Says::Nothing, 1646),
        (27, Says::Nothing, 367),
    ] {
        run.machine.capacity = capacity;
        run.steps(tokens, says);
    }
    assert!(run.cost() < 1.05, "{} times what streaming costs", run.cost());
}

/// A stretch of time on a machine, and the system's reports during it.
fn phase() -> impl Strategy<Value = (usize, Says, usize)> {
    let says = prop_oneof![
        3 => Just(Says::Truth),
        3 => Just(Says::Nothing),
        1 => Just(this(Level::Some)),
        1 => Just(this(Level::Critical)),
        // The system reports plenty, whatever is true.
        2 => Just(Says::This(Pressure { level: Level::None, available: Some(u64::MAX) })),
    ];
    (0usize..32, says, 200usize..2000)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Whatever the conditions, a run takes hardly longer than streaming all the time.
    #[test]
    fn changing_conditions_cost_little(
        layers in 1usize..32,
        resident in 50u32..1000,
        expected in 30u32..=100,
        streamed in prop_oneof![Just(Duration::from_millis(1)), Just(Duration::from_millis(100))],
        blind in any::<bool>(),
        phases in prop::collection::vec(phase(), 10..16),
    ) {
        let mut run = Run::on(streamed, layers, layers, resident, expected);
        run.machine.blind = blind;
        for &(capacity, says, tokens) in &phases {
            run.machine.capacity = capacity;
            run.steps(tokens, says);
        }
        prop_assert!(run.machine.most_kept <= layers);
        prop_assert!(run.cost() < 1.05, "{} times what streaming costs", run.cost());
        run.machine.capacity = layers + 2;
        run.steps(64 * 560, Says::Truth);
        prop_assert_eq!(run.kept(), layers);
    }

    /// Under constant conditions changes become rare, whether the system reports the truth or nothing, and the resident
    /// layers nearly fill memory.
    #[test]
    fn constant_conditions_settle(
        layers in 1usize..32,
        capacity in 0usize..32,
        resident in 50u32..900,
        truth in any::<bool>(),
    ) {
        let says = if truth { Says::Truth } else { Says::Nothing };
        let mut run = Run::new(layers, layers, resident);
        run.machine.capacity = capacity;
        run.steps(64 * 200, says);
        let (before, sheds) = (run.machine.changes, shed(&run).len());
        run.steps(64 * 500, says);
        let attempts = shed(&run).len() - sheds;
        prop_assert!(attempts <= 6, "{} attempts", attempts);
        // Each layer goes up and down once, and up again after one before it.
        let changes = run.machine.changes - before;
        prop_assert!(changes <= (2 * attempts + 1) * layers, "{} changes", changes);
        prop_assert!(run.kept() <= capacity.min(layers) + 1);
        prop_assert!(run.cost() < 1.02, "{} times what streaming costs", run.cost());
    }
}
