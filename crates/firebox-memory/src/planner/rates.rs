//! Speeds of a machine with one model.

use serde::{Deserialize, Serialize};

use super::Shape;
use crate::MemoryError;

/// How fast a machine runs one model. Times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Bytes per second read from disk.
    pub read_bytes_per_second: f64,
    /// The time from the start of a read to its first byte.
    #[serde(default)]
    pub read_latency: f64,
    /// The computing time of each part when one token is decoded.
    pub compute: Vec<f64>,
    /// The time of a token in addition to its parts: lookup, sampling, detokenization.
    #[serde(default)]
    pub overhead: f64,
    /// The factor by which computing slows down during a read.
    #[serde(default = "undisturbed")]
    pub contention: f64,
    /// The factor by which reading slows down during computing: both need memory bandwidth, and the same cores copy reads out
    /// of the page cache.
    #[serde(default = "undisturbed")]
    pub hindrance: f64,
}

/// Returns the contention or hindrance of a machine on which reading and computing do not interfere.
pub(super) fn undisturbed() -> f64 {
    1.0
}

impl Rates {
    /// Returns the time of a read of `bytes`.
    pub fn read_seconds(&self, bytes: u64) -> f64 {
        self.read_latency + bytes as f64 / self.read_bytes_per_second
    }

    /// Checks that these are rates of a machine for a model of that shape.
    pub fn check(&self, shape: &Shape) -> Result<(), MemoryError> {
        positive("read_bytes_per_second", self.read_bytes_per_second)?;
        at_least("read_latency", self.read_latency, 0.0)?;
        at_least("overhead", self.overhead, 0.0)?;
        at_least("contention", self.contention, 1.0)?;
        at_least("hindrance", self.hindrance, 1.0)?;
        self.compute.iter().try_for_each(|&seconds| at_least("compute", seconds, 0.0))?;
        if self.compute.len() == shape.parts.len() {
            return Ok(());
        }
        Err(MemoryError::Setting {
            setting: "compute",
            value: format!("{} times for {} parts", self.compute.len(), shape.parts.len()),
            reason: "give one for every part of the model, or measure the rates again with this model",
        })
    }
}

/// Checks that a rate is finite and above 0.
pub(super) fn positive(setting: &'static str, value: f64) -> Result<(), MemoryError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(MemoryError::Setting { setting, value: value.to_string(), reason: "should be above 0" })
}

/// Checks that a number is finite and at least `least`.
pub(super) fn at_least(setting: &'static str, value: f64, least: f64) -> Result<(), MemoryError> {
    if value.is_finite() && value >= least {
        return Ok(());
    }
    let reason = if least == 0.0 { "should be 0 or more" } else { "should be 1 or more" };
    Err(MemoryError::Setting { setting, value: value.to_string(), reason })
}
