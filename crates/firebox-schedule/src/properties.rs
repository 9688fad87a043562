use std::path::Path;

use proptest::prelude::*;

use super::happenings::{Happening, wrong_nobody};
use super::stage::ms;
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

fn happening() -> impl Strategy<Value = Happening> {
    let model = 0usize..4;
    prop_oneof![
        4 => (model.clone(), task(), 0usize..3, 1usize..20).prop_map(|(model, task, prompt, tokens)| {
            Happening::Request { model, task, prompt, tokens }
        }),
        1 => model.clone().prop_map(|model| Happening::Cancel { model }),
        2 => (model.clone(), 0u64..300)
            .prop_map(|(model, milliseconds)| Happening::Evicted { model, milliseconds }),
        1 => (model.clone(), any::<bool>()).prop_map(|(model, is_idle)| Happening::Idle { model, is_idle }),
        1 => (model.clone(), 100u64..60_000)
            .prop_map(|(model, microseconds)| Happening::Speed { model, microseconds }),
        1 => prop::sample::select(vec![Heat::Nominal, Heat::Fair, Heat::Serious, Heat::Critical])
            .prop_map(Happening::Heat),
        1 => (1usize..6).prop_map(|layers| Happening::Add { layers }),
        1 => model.prop_map(|model| Happening::Drop { model }),
        6 => (1usize..30).prop_map(Happening::Steps),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::with_cases(10_000) })]

    #[test]
    fn no_schedule_wrongs_anybody(happenings in prop::collection::vec(happening(), 1..40)) {
        wrong_nobody(happenings);
    }
}

#[test]
fn the_fuzzing_corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/scheduler");
    let stories = std::fs::read_dir(folder).unwrap();
    let answered: usize = stories
        .map(|story| wrong_nobody(Happening::of_bytes(&std::fs::read(story.unwrap().path()).unwrap())))
        .sum();
    assert!(answered > 0);
}
