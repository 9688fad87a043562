//! Models and requests of a simulation.

use std::ops::RangeInclusive;

use crate::Priority;
use firebox_memory::planner::{Part, Shape};

const MIB: u64 = 1 << 20;
/// Four bits, and a half-precision scale for every 32 weights.
const BYTES_PER_PARAMETER: f64 = 4.5 / 8.0;
/// Tokens of context reserved for each model. The rest is shared.
pub(super) const RESERVED_TOKENS: u64 = 1024;
/// Rows of a chunk of a prompt.
const ROWS: u64 = 512;
/// The hours in which people are awake.
const AWAKE: std::ops::Range<usize> = 7..23;

/// A simulated model.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulatedModel {
    /// Its name.
    pub name: String,
    /// Bytes of all weights.
    pub bytes: u64,
    /// The number of its layers.
    pub layers: usize,
    /// Bytes of keys and values of one token.
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

    /// Returns the bytes of a fully resident model, with its reserved context and a chunk of a prompt.
    fn all_bytes(&self) -> u64 {
        let shape = self.shape();
        let ring = 2 * shape.parts[0].kept_bytes;
        let rows = ROWS * shape.activation_bytes_per_row + RESERVED_TOKENS * shape.kv_bytes_per_token;
        self.bytes + shape.fixed_bytes + ring + rows
    }

    /// Returns the multiplications and additions of one row in one layer.
    pub(super) fn operations_per_row(&self) -> f64 {
        2.0 * self.bytes as f64 / BYTES_PER_PARAMETER / self.layers as f64
    }
}

/// A kind of requests.
#[derive(Debug, Clone, PartialEq)]
pub struct Traffic {
    /// Its name.
    pub name: String,
    /// The index of its model.
    pub model: usize,
    /// Its priority.
    pub priority: Priority,
    /// Tokens per second, if not the default.
    pub pace: Option<f64>,
    /// Arrivals in each hour of the day.
    pub per_hour: [f64; 24],
    /// Tokens of the prompt.
    pub prompt: RangeInclusive<usize>,
    /// Tokens of the answer.
    pub answer: RangeInclusive<usize>,
    /// Kinds of requests that may follow, with their probabilities.
    pub then: Vec<(usize, f64)>,
}

/// The load of a device.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// Models that share the budget.
    pub models: Vec<SimulatedModel>,
    /// The requests.
    pub traffic: Vec<Traffic>,
}

impl Mix {
    /// Returns an everyday load: a router that answers every command, a specialist for some of them, and a fallback that also
    /// does background work.
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
                    // Twice the reading speed.
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

    /// Returns the memory of each model: pinned models get all that they need, others a share in proportion to their size.
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

    /// Multiplies the arrival rates.
    pub fn times(mut self, factor: f64) -> Self {
        for traffic in &mut self.traffic {
            traffic.per_hour.iter_mut().for_each(|count| *count *= factor);
        }
        self
    }
}
