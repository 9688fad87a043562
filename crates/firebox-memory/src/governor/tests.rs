use proptest::prelude::*;

use super::pace::FEW;
use super::simulation::{LAYER_BYTES, Run, Says};
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
fn nothing_happens_while_all_is_well() {
    let mut run = Run::new(24, 20, 200);
    run.steps(2000, Says::Truth);
    run.steps(2000, Says::Nothing);
    assert_eq!((run.machine.changes, run.events), (0, vec![]));
}

#[test]
fn a_quarter_goes_from_the_end_when_memory_gets_short() {
    let mut run = Run::new(24, 20, 200);
    run.steps(32, this(Level::Some));
    assert_eq!(shed(&run), [[19, 18, 17, 16, 15]]);
    run.steps(64, this(Level::Some));
    assert_eq!(shed(&run)[1], [14, 13, 12, 11]);
    run.steps(64 * 20, this(Level::Some));
    assert_eq!(run.kept(), 0);
}

#[test]
fn a_level_that_comes_and_goes_is_one_event() {
    let mut run = Run::new(24, 20, 200);
    run.steps(64, Says::Truth);
    for step in 0..60 {
        run.steps(1, this(if step / 16 % 2 == 0 { Level::Some } else { Level::None }));
    }
    assert!(shed(&run).len() <= 1);
}

#[test]
fn in_an_emergency_everything_goes_at_the_next_look() {
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
fn a_warning_is_heard_after_the_very_next_step() {
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
fn an_alarm_does_not_wait_for_the_end_of_a_step() {
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
fn the_plan_is_kept_again_when_it_is_over() {
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

/// What others took for long is taken back as soon as what they took for a moment.
#[test]
fn long_pressure_is_no_lesson() {
    let mut run = Run::new(24, 20, 200);
    run.machine.capacity = 30;
    run.steps(64 * 50, this(Level::Some));
    assert_eq!(run.kept(), 0);
    run.steps(64 * 16, Says::Truth);
    assert_eq!(run.kept(), 20);
}

#[test]
fn keeping_begins_when_it_is_known_what_streaming_costs() {
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
fn no_more_is_kept_than_there_is_memory_for() {
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
fn outliers_cost_nothing_but_their_time() {
    let mut run = Run::new(24, 20, 200);
    for step in 0..1000 {
        let slow = step % 5 < 2;
        run.step(Duration::from_millis(if slow { 300 } else { 8 }), 1000, Says::Nothing);
    }
    assert_eq!(run.machine.changes, 0);
}

#[test]
fn steps_dearer_than_streaming_end_within_a_few() {
    let mut run = Run::new(24, 20, 200);
    run.steps(100, Says::Nothing);
    run.machine.capacity = 4;
    run.steps(5, Says::Nothing);
    assert_eq!(run.kept(), 0);
    assert!(matches!(run.events[0], Event::Thrash { major_faults: 1.., .. }));
    run.steps(200, Says::Nothing);
    assert!(run.events.iter().any(|event| matches!(event, Event::Learned { .. })));
}

/// Without faults it may be the plan that was wrong; with them it is the memory.
#[test]
fn steps_dearer_than_planned_count_when_pages_were_missing() {
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

/// Even where neither faults nor anybody else says why.
#[test]
fn nothing_stays_slower_than_streaming() {
    let mut run = Run::new(24, 20, 200);
    (0..40).for_each(|_| run.step(Duration::from_millis(26), 0, Says::Nothing));
    assert_eq!(run.kept(), 0);
}

/// Nobody but streaming itself says what it costs; where it was expected to cost less than it does, that is a matter of a few
/// steps.
#[test]
fn what_was_no_dearer_than_streaming_is_kept_again_at_once() {
    for (planned, percent) in [(4, 80), (10, 60), (20, 30)] {
        let mut run = Run::on(Duration::from_millis(1), 28, planned, 200, percent);
        run.machine.capacity = 30;
        run.steps(32, Says::Truth);
        assert_eq!(run.kept(), 0, "{planned} layers were dearer than expected");
        run.steps(FEW, Says::Truth);
        assert_eq!(run.machine.kept(), (0..planned).collect::<Vec<_>>());
        assert_eq!(run.machine.changes, 2 * planned);
        run.steps(64 * 100, Says::Truth);
        assert_eq!(run.machine.changes, 2 * planned, "it is known now");
        // And it is known what is dearer.
        (0..40).for_each(|_| run.step(Duration::from_millis(31), 0, Says::Truth));
        assert_eq!(run.kept(), 0);
    }
}

#[test]
fn it_is_not_where_memory_is_short_by_then() {
    let mut run = Run::on(Duration::from_millis(1), 28, 4, 200, 80);
    run.steps(32, Says::Truth);
    let none = Pressure { level: Level::None, available: Some(LAYER_BYTES * 5 / 2) };
    run.steps(FEW, Says::This(none));
    assert_eq!(run.kept(), 2);
    let mut run = Run::on(Duration::from_millis(1), 28, 4, 200, 80);
    run.steps(32, Says::Truth);
    run.steps(60, this(Level::Some));
    assert_eq!(run.kept(), 0);
}

#[test]
fn what_cannot_be_kept_is_seldom_tried() {
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
fn odd_settings_are_survived() {
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
fn events_can_be_read() {
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

/// Steps of seconds are checked on every few tokens, and what is kept saves next to nothing.
#[test]
fn what_failed_is_earned_back_where_steps_are_slow_too() {
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

/// Some time on a machine, and what the system says meanwhile.
fn phase() -> impl Strategy<Value = (usize, Says, usize)> {
    let says = prop_oneof![
        3 => Just(Says::Truth),
        3 => Just(Says::Nothing),
        1 => Just(this(Level::Some)),
        1 => Just(this(Level::Critical)),
        // It says that there is plenty, whatever there is.
        2 => Just(Says::This(Pressure { level: Level::None, available: Some(u64::MAX) })),
    ];
    (0usize..32, says, 200usize..2000)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Whatever the weather, a run costs hardly more than streaming all the time.
    #[test]
    fn storms_are_weathered(
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

    /// Under constant conditions changes become rare, whether the system tells the truth or nothing, and what is kept
    /// is about what there is room for.
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
        // Up and down for each, and up again after one before.
        let changes = run.machine.changes - before;
        prop_assert!(changes <= (2 * attempts + 1) * layers, "{} changes", changes);
        prop_assert!(run.kept() <= capacity.min(layers) + 1);
        prop_assert!(run.cost() < 1.02, "{} times what streaming costs", run.cost());
    }
}
