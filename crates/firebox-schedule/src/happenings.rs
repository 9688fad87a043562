//! What happens to a scheduler, in any order, and what has to come of it.

#![cfg_attr(not(test), allow(dead_code, clippy::unwrap_used))] // Tests use the rest.

use super::stage::{Stage, ms};
use super::*;
use firebox_memory::thermal::Heat;

/// Something that happens while models run.
#[derive(Debug, Clone, Copy)]
pub enum Happening {
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

impl Happening {
    /// What some bytes say, four for each happening.
    pub fn of_bytes(bytes: &[u8]) -> Vec<Self> {
        bytes.as_chunks().0.iter().take(MOST).map(Self::of).collect()
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

/// Longer stories are told by shorter ones.
const MOST: usize = 256;

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

/// Whatever comes, goes, slows down and is not in memory: the machine is not idle while something is ready, nobody starves,
/// whoever is late is not held up by who matters less for longer than a quantum, and all of it ends. How many requests were
/// answered.
pub fn wrong_nobody(happenings: Vec<Happening>) -> usize {
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
        assert!(steps < 100_000, "goes on for ever");
    }
    assert_eq!(stage.done.len(), done + left);
    assert!(stage.done.iter().all(|request| request.came.len() == request.tokens));
    assert_eq!(stage.scheduler.choose(stage.now, |_| Readiness::Ready), Choice::Wait { until: None });
    stage.done.len()
}
