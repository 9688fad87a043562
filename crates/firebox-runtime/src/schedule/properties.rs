use proptest::prelude::*;

use super::stage::{Stage, ms};
use super::*;
use crate::thermal::Heat;

/// Something that happens while models run.
#[derive(Debug, Clone, Copy)]
enum Happening {
    Request {
        model: usize,
        task: Task,
        prompt: usize,
        tokens: usize,
    },
    Cancel {
        model: usize,
    },
    /// The next layer of a model is not in memory.
    Evicted {
        model: usize,
        milliseconds: u64,
    },
    Idle {
        model: usize,
        is_idle: bool,
    },
    /// A layer takes so many microseconds from now on.
    Speed {
        model: usize,
        microseconds: u64,
    },
    Heat(Heat),
    Add {
        layers: usize,
    },
    Drop {
        model: usize,
    },
    Steps(usize),
}

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

fn happen(stage: &mut Stage, happening: Happening) {
    let count = stage.models.len();
    match happening {
        Happening::Request { model, task, prompt, tokens } if model < count => {
            stage.request(model, task, prompt, tokens);
        }
        Happening::Cancel { model } if model < count && !stage.models[model].requests.is_empty() => {
            stage.cancel(model, 0);
        }
        Happening::Evicted { model, milliseconds } if model < count => {
            stage.models[model].loading = ms(milliseconds);
        }
        Happening::Idle { model, is_idle } if model < count => stage.models[model].is_idle = is_idle,
        Happening::Speed { model, microseconds } if model < count => {
            stage.models[model].layer = std::time::Duration::from_micros(microseconds);
        }
        Happening::Heat(heat) => stage.set_heat(heat),
        Happening::Add { layers } if count < 4 => {
            stage.model(ms(10), layers);
        }
        Happening::Drop { model } if count > 1 && model < count => stage.drop_model(model),
        Happening::Steps(steps) => {
            for _ in 0..steps {
                stage.step();
            }
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::with_cases(10_000) })]

    /// Whatever comes, goes, slows down and is not in memory: the machine is not idle while something is ready, nobody
    /// starves, whoever is late is not held up by who matters less for longer than a quantum, and all of it ends.
    #[test]
    fn no_schedule_wrongs_anybody(happenings in prop::collection::vec(happening(), 1..40)) {
        let mut stage = Stage::new();
        stage.model(ms(12), 4);
        stage.model(ms(30), 3);
        for happening in happenings {
            happen(&mut stage, happening);
        }
        for model in &mut stage.models {
            model.is_idle = false;
        }
        let left: usize = stage.models.iter().flat_map(|model| &model.requests).count();
        let done = stage.done.len();
        let mut steps = 0;
        while stage.step() {
            steps += 1;
            prop_assert!(steps < 100_000, "goes on for ever");
        }
        prop_assert_eq!(stage.done.len(), done + left);
        prop_assert!(stage.done.iter().all(|request| request.came.len() == request.tokens));
        prop_assert_eq!(stage.scheduler.choose(stage.now, |_| Readiness::Ready), Choice::Wait { until: None });
    }
}
