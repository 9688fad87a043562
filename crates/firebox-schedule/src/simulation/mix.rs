use std::ops::RangeInclusive;

use super::served::RESERVED_TOKENS;
use crate::Priority;
use firebox_memory::planner::{Part, Shape};

const MIB: u64 = 1 << 20;
/// Four bits, and a scale of half precision for every 32 of them.
const BYTES_PER_PARAMETER: f64 = 4.5 / 8.0;
/// A piece of a prompt.
const ROWS: u64 = 512;
/// The hours in which people are awake.
const AWAKE: std::ops::Range<usize> = 7..23;

/// A model that is not there.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulatedModel {
    /// Its name.
    pub name: String,
    /// All of its weights.
    pub bytes: u64,
    /// How many layers they are in.
    pub layers: usize,
    /// Keys and values of one token.
    pub kv_bytes_per_token: u64,
}

impl SimulatedModel {
    pub(super) fn shape(&self) -> Shape {
        let bytes = self.bytes / self.layers as u64;
        let part = Part { bytes, kept_bytes: bytes, is_layer: true };
        Shape {
            parts: vec![part; self.layers],
            kv_bytes_per_token: self.kv_bytes_per_token,
            activation_bytes_per_row: 64 << 10,
            fixed_bytes: 32 * MIB,
        }
    }

    /// What it takes to keep all of it, with its own room and a piece of a prompt.
    fn all_bytes(&self) -> u64 {
        let shape = self.shape();
        let ring = 2 * shape.parts[0].kept_bytes;
        let rows = ROWS * shape.activation_bytes_per_row + RESERVED_TOKENS * shape.kv_bytes_per_token;
        self.bytes + shape.fixed_bytes + ring + rows
    }

    /// Multiplications and additions of one row in one layer.
    pub(super) fn operations_per_row(&self) -> f64 {
        2.0 * self.bytes as f64 / BYTES_PER_PARAMETER / self.layers as f64
    }
}

/// Requests of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Traffic {
    /// What it is.
    pub name: String,
    /// Which of the models it is for.
    pub model: usize,
    /// How much it matters.
    pub priority: Priority,
    /// Tokens a second that it should come at, where that is not what is usual.
    pub pace: Option<f64>,
    /// How many come in each hour of the day.
    pub per_hour: [f64; 24],
    /// Tokens that are given.
    pub prompt: RangeInclusive<usize>,
    /// Tokens that are wanted.
    pub answer: RangeInclusive<usize>,
    /// What may follow when it is done: which kind of traffic, and how likely.
    pub then: Vec<(usize, f64)>,
}

/// What is asked of a device.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// Models that share the budget.
    pub models: Vec<SimulatedModel>,
    /// What is asked of them.
    pub traffic: Vec<Traffic>,
}

impl Mix {
    /// A day of somebody who talks to the device now and then: a router that always answers, a specialist that some of
    /// what it hears goes to, and a fallback that also does what nobody waits for.
    pub fn everyday() -> Self {
        let model = |name: &str, mib: u64, layers: usize, kv_bytes_per_token: u64| SimulatedModel {
            name: name.into(),
            bytes: mib * MIB,
            layers,
            kv_bytes_per_token,
        };
        let awake = |per_hour: f64, at_night: f64| {
            std::array::from_fn(|hour| if AWAKE.contains(&hour) { per_hour } else { at_night })
        };
        let traffic = |name: &str, model, priority, pace, per_hour| Traffic {
            name: name.into(),
            model,
            priority,
            pace,
            per_hour,
            prompt: 1..=1,
            answer: 1..=1,
            then: Vec::new(),
        };
        Self {
            models: vec![
                model("router", 120, 12, 12 << 10),
                model("specialist", 890, 28, 56 << 10),
                model("fallback", 340, 16, 24 << 10),
            ],
            traffic: vec![
                Traffic {
                    prompt: 24..=64,
                    answer: 4..=8,
                    then: vec![(1, 0.6), (2, 0.2)],
                    ..traffic("commands", 0, Priority::Pinned, None, awake(24.0, 0.5))
                },
                Traffic {
                    prompt: 50..=600,
                    answer: 60..=300,
                    // Twice as fast as people read.
                    ..traffic("answers", 1, Priority::Interactive, Some(10.0), awake(4.0, 0.2))
                },
                Traffic {
                    prompt: 100..=400,
                    answer: 40..=120,
                    ..traffic("replies", 2, Priority::Interactive, Some(10.0), awake(2.0, 0.1))
                },
                Traffic {
                    prompt: 500..=2000,
                    answer: 100..=200,
                    ..traffic("summaries", 2, Priority::Normal, None, awake(4.0, 1.0))
                },
                Traffic {
                    prompt: 200..=500,
                    answer: 16..=32,
                    ..traffic("indexing", 2, Priority::Background, None, awake(20.0, 60.0))
                },
            ],
        }
    }

    pub(super) fn is_pinned(&self, model: usize) -> bool {
        self.traffic.iter().any(|traffic| traffic.model == model && traffic.priority == Priority::Pinned)
    }

    /// What each model may take of a budget: pinned ones all that they need, others in proportion to their size.
    pub(super) fn shares(&self, budget: u64) -> Vec<u64> {
        let pinned = |model: usize| self.models[model].all_bytes();
        let (kept, others): (Vec<usize>, Vec<usize>) =
            (0..self.models.len()).partition(|&model| self.is_pinned(model));
        let left = budget.saturating_sub(kept.iter().map(|&model| pinned(model)).sum());
        let all: u64 = others.iter().map(|&model| self.models[model].bytes).sum();
        let part = |model: usize| (left as f64 * self.models[model].bytes as f64 / all as f64) as u64;
        let share = |model| if kept.contains(&model) { pinned(model) } else { part(model) };
        (0..self.models.len()).map(share).collect()
    }

    /// Everything so many times as often.
    pub fn times(mut self, factor: f64) -> Self {
        for traffic in &mut self.traffic {
            traffic.per_hour.iter_mut().for_each(|count| *count *= factor);
        }
        self
    }
}
