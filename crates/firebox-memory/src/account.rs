//! The purposes that memory is charged for.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The purpose of a charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Account {
    /// The program itself: what the process takes before it opens a model.
    Program,
    /// Resident weights.
    Weights,
    /// Keys, values and recurrent states of sequences.
    Streams,
    /// Intermediate results of a pass.
    Activations,
    /// Read buffers and other working memory.
    Scratch,
}

impl Account {
    /// All accounts.
    pub const ALL: [Self; 5] =
        [Self::Program, Self::Weights, Self::Streams, Self::Activations, Self::Scratch];

    /// Returns the name in tables and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Program => "program",
            Self::Weights => "weights",
            Self::Streams => "streams",
            Self::Activations => "activations",
            Self::Scratch => "scratch",
        }
    }

    /// Returns a remedy for a charge that was refused.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Program | Self::Scratch => "raise --memory",
            Self::Weights => "raise --memory, keep fewer layers, or use a smaller quantization",
            Self::Streams => "raise --memory, or shorten the context",
            Self::Activations => "raise --memory, or feed the text in smaller pieces",
        }
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Program => "the program",
            other => other.name(),
        })
    }
}
