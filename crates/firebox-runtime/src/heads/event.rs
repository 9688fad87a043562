//! Events and states of heads.

use std::fmt::{self, Debug, Display};
use std::sync::Arc;
use std::time::Duration;

use super::source::Requantized;
use crate::RuntimeError;

/// The state of a head.
#[derive(Debug, Clone)]
pub enum HeadState {
    /// In memory, and used by a sequence.
    Active,
    /// In memory.
    Warm,
    /// Being loaded into memory.
    Loading,
    /// On disk.
    OnDisk,
    /// On disk, and could not be used.
    Failed {
        /// Why it could not be used.
        reason: Arc<RuntimeError>,
    },
}

/// An event of a head.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum HeadEvent {
    /// It was loaded into memory.
    Loaded {
        /// Its name.
        name: String,
        /// How long loading took.
        took: Duration,
        /// Whether it was loaded before it was requested.
        prefetched: bool,
    },
    /// A newer generation of it replaced the one in memory.
    Updated {
        /// Its name.
        name: String,
    },
    /// It is quantized otherwise than the trunk, so activations are quantized again between the two.
    Requantizing {
        /// Its name.
        name: String,
        /// The schemes of trunk and head.
        schemes: Requantized,
    },
    /// It was removed from memory to make room.
    Evicted {
        /// Its name.
        name: String,
    },
    /// It could not be used.
    Failed {
        /// Its name.
        name: String,
        /// Why it could not be used.
        reason: Arc<RuntimeError>,
        /// The time until the next attempt.
        retry_in: Duration,
    },
    /// It was not loaded in time.
    TimedOut {
        /// Its name.
        name: String,
    },
}

impl Display for HeadEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loaded { name, took, prefetched } => {
                let why = if *prefetched { " ahead of need" } else { "" };
                write!(f, "head {name} loaded{why} in {:.1} ms", took.as_secs_f64() * 1e3)
            }
            Self::Updated { name } => write!(f, "head {name} is used in its newer generation"),
            Self::Requantizing { name, schemes: Requantized { trunk, head } } => {
                let named = |scheme: &Option<firebox_store::Quantization>| match scheme {
                    Some(scheme) => scheme.to_string(),
                    None => "floats".into(),
                };
                write!(f, "head {name} is in {}, its trunk in {}", named(head), named(trunk))
            }
            Self::Evicted { name } => write!(f, "head {name} was evicted from memory"),
            Self::Failed { name, reason, retry_in } => {
                write!(f, "head {name}: {reason}; tried again in {:.0} s", retry_in.as_secs_f64())
            }
            Self::TimedOut { name } => write!(f, "head {name} was not loaded in time"),
        }
    }
}
