//! Random actions on a scheduler, and the invariants that hold after any of them.

#![cfg_attr(not(test), allow(dead_code, clippy::unwrap_used))] // Tests use the rest.

use super::harness::{Harness, ms};
use super::*;
use firebox_memory::thermal::Heat;

/// An action on the simulated models.
#[derive(Debug, Clone, Copy)]
pub enum Action {
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
    /// A layer takes this many microseconds from now on.
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

impl Action {
    /// Decodes actions from bytes, four for each.
    pub fn decode(bytes: &[u8]) -> Vec<Self> {
        bytes.as_chunks().0.iter().take(MAX_ACTIONS).map(Self::of).collect()
    }

    fn of(&[kind, model, a, b]: &[u8; 4]) -> Self {
        let (model, wide) = (usize::from(model % 4), u64::from(u16::from_le_bytes([a, b])));
        match kind % 17 {
            0..=3 => {
                let pace = (kind >= 128).then(|| f64::from(a % 200 + 1));
                let first_by = (b >= 64).then(|| ms(u64::from(b - 64) * 12));
                let task = Task { priority: Priority::ALL[usize::from(kind % 4)], pace, first_by };
                Self::Request { model, task, prompt: usize::from(a % 3), tokens: usize::from(b % 19) + 1 }
            }
            4 => Self::Cancel { model },
            5 | 6 => Self::Evicted { model, milliseconds: wide % 300 },
            7 => Self::Idle { model, is_idle: a % 2 == 0 },
            8 => Self::Speed { model, microseconds: 100 + wide % 59_900 },
            9 => Self::Heat([Heat::Nominal, Heat::Fair, Heat::Serious, Heat::Critical][usize::from(a % 4)]),
            10 => Self::Add { layers: usize::from(a % 5) + 1 },
            11 => Self::Drop { model },
            _ => Self::Steps(usize::from(a % 29) + 1),
        }
    }
}

/// The most actions of an input: more find nothing new.
const MAX_ACTIONS: usize = 256;

fn apply(harness: &mut Harness, action: Action) {
    let count = harness.models.len();
    match action {
        Action::Request { model, task, prompt, tokens } if model < count => {
            harness.request(model, task, prompt, tokens);
        }
        Action::Cancel { model } if model < count && !harness.models[model].requests.is_empty() => {
            harness.cancel(model, 0);
        }
        Action::Evicted { model, milliseconds } if model < count => {
            harness.models[model].loading = ms(milliseconds);
        }
        Action::Idle { model, is_idle } if model < count => harness.models[model].is_idle = is_idle,
        Action::Speed { model, microseconds } if model < count => {
            harness.models[model].layer = std::time::Duration::from_micros(microseconds);
        }
        Action::Heat(heat) => harness.set_heat(heat),
        Action::Add { layers } if count < 4 => {
            harness.model(ms(10), layers);
        }
        Action::Drop { model } if count > 1 && model < count => harness.drop_model(model),
        Action::Steps(steps) => {
            for _ in 0..steps {
                harness.step();
            }
        }
        _ => {}
    }
}

/// Runs the actions and checks the invariants: the machine is not idle while a model is ready, no model starves, a late task
/// is not blocked by less urgent ones for longer than a quantum, and every request ends. Returns the number of finished
/// requests.
pub fn check_invariants(actions: Vec<Action>) -> usize {
    let mut harness = Harness::new();
    harness.model(ms(12), 4);
    harness.model(ms(30), 3);
    for action in actions {
        apply(&mut harness, action);
    }
    for model in &mut harness.models {
        model.is_idle = false;
    }
    let left: usize = harness.models.iter().flat_map(|model| &model.requests).count();
    let done = harness.done.len();
    let mut steps = 0;
    while harness.step() {
        steps += 1;
        assert!(steps < 100_000, "goes on for ever");
    }
    assert_eq!(harness.done.len(), done + left);
    assert!(harness.done.iter().all(|request| request.came.len() == request.tokens));
    assert_eq!(harness.scheduler.choose(harness.now, |_| Readiness::Ready), Choice::Wait { until: None });
    harness.done.len()
}
