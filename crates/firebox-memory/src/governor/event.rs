use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::bytes::human_bytes;

/// What a governor found or did, for a log or a console.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Memory is getting short.
    Short {
        /// Bytes that can be taken before it is.
        available: Option<u64>,
    },
    /// Memory is so short that everything is let go of.
    Emergency {
        /// Bytes that can be taken before it is short.
        available: Option<u64>,
    },
    /// Steps take longer than they should.
    Thrash {
        /// What they take.
        step_time: Duration,
        /// What they may take at most, with what is kept.
        expected: Duration,
        /// Pages that a step had to wait for.
        major_faults: u64,
    },
    /// Layers were let go of.
    Shed {
        /// Which.
        layers: Vec<usize>,
    },
    /// A layer is kept.
    Grew {
        /// Which.
        layer: usize,
    },
    /// A layer was to be kept and could not be.
    Refused {
        /// Which.
        layer: usize,
        /// Why.
        reason: String,
    },
    /// With nothing kept it was measured what a step takes then.
    Learned {
        /// What it takes.
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
