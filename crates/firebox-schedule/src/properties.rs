//! Property tests of the scheduler.

use std::path::Path;

use proptest::prelude::*;

use super::actions::{Action, check_invariants};
use super::harness::ms;
use super::*;
use firebox_memory::thermal::Heat;

fn task() -> impl Strategy<Value = Task> {
    let pace = prop_oneof![Just(None), (1u32..200).prop_map(|pace| Some(f64::from(pace)))];
    let first_by = prop_oneof![Just(None), (0u64..2000).prop_map(|by| Some(ms(by)))];
    (0usize..4, pace, first_by).prop_map(|(priority, pace, first_by)| Task {
        priority: Priority::ALL[priority],
        pace,
        first_by,
    })
}

fn action() -> impl Strategy<Value = Action> {
    let model = 0usize..4;
    prop_oneof![
        4 => (model.clone(), task(), 0usize..3, 1usize..20).prop_map(|(model, task, prompt, tokens)| {
            Action::Request { model, task, prompt, tokens }
        }),
        1 => model.clone().prop_map(|model| Action::Cancel { model }),
        2 => (model.clone(), 0u64..300)
            .prop_map(|(model, milliseconds)| Action::Evicted { model, milliseconds }),
        1 => (model.clone(), any::<bool>()).prop_map(|(model, is_idle)| Action::Idle { model, is_idle }),
        1 => (model.clone(), 100u64..60_000)
            .prop_map(|(model, microseconds)| Action::Speed { model, microseconds }),
        1 => prop::sample::select(vec![Heat::Nominal, Heat::Fair, Heat::Serious, Heat::Critical])
            .prop_map(Action::Heat),
        1 => (1usize..6).prop_map(|layers| Action::Add { layers }),
        1 => model.prop_map(|model| Action::Drop { model }),
        6 => (1usize..30).prop_map(Action::Steps),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::with_cases(10_000) })]

    #[test]
    fn invariants_hold_for_any_actions(actions in prop::collection::vec(action(), 1..40)) {
        check_invariants(actions);
    }
}

#[test]
fn the_fuzzing_corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/scheduler");
    let stories = std::fs::read_dir(folder).unwrap();
    let answered: usize = stories
        .map(|story| check_invariants(Action::decode(&std::fs::read(story.unwrap().path()).unwrap())))
        .sum();
    assert!(answered > 0);
}
