//! Events of a governor.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::bytes::human_bytes;

/// A finding or an action of a governor, for a log or a console.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Memory is short.
    Short {
        /// Bytes that are available before it is.
        available: Option<u64>,
    },
    /// Memory is so short that every layer is evicted.
    Emergency {
        /// Bytes that are available before it is short.
        available: Option<u64>,
    },
    /// Steps take longer than they should.
    Thrash {
        /// The median time of a step.
        step_time: Duration,
        /// The time that a step may take at most with the resident layers.
        expected: Duration,
        /// Major page faults of a step.
        major_faults: u64,
    },
    /// Layers were evicted.
    Shed {
        /// The layers.
        layers: Vec<usize>,
    },
    /// A layer was loaded.
    Grew {
        /// The layer.
        layer: usize,
    },
    /// A layer could not be loaded.
    Refused {
        /// The layer.
        layer: usize,
        /// The reason.
        reason: String,
    },
    /// The time of a step without resident layers was measured.
    Learned {
        /// The time.
        step_time: Duration,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = |available: &Option<u64>| match available {
            Some(bytes) => format!(", {} to spare", human_bytes(*bytes)),
            None => String::new(),
        };
        match self {
            Self::Short { available } => write!(f, "memory is getting short{}", left(available)),
            Self::Emergency { available } => write!(f, "memory is about to run out{}", left(available)),
            Self::Thrash { step_time, expected, major_faults } => write!(
                f,
                "steps take {step_time:.1?} instead of {expected:.1?}, with {major_faults} page faults each"
            ),
            Self::Shed { layers } => write!(f, "let go of {}", names(layers)),
            Self::Grew { layer } => write!(f, "keeping layer {layer}"),
            Self::Refused { layer, reason } => write!(f, "cannot keep layer {layer}: {reason}"),
            Self::Learned { step_time } => write!(f, "without kept layers steps take {step_time:.1?}"),
        }
    }
}

fn names(layers: &[usize]) -> String {
    match layers {
        [layer] => format!("layer {layer}"),
        _ => {
            let names: Vec<String> = layers.iter().map(usize::to_string).collect();
            format!("layers {}", names.join(", "))
        }
    }
}
