use serde::{Deserialize, Serialize};

use super::Shape;
use crate::MemoryError;

/// How fast a machine runs one model; times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// How fast parts are read from disk.
    pub read_bytes_per_second: f64,
    /// What every read takes before its first byte is there.
    #[serde(default)]
    pub read_latency: f64,
    /// How long each part computes when one token is decoded.
    pub compute: Vec<f64>,
    /// What a token takes beside its parts: looking up, sampling, turning into text.
    #[serde(default)]
    pub overhead: f64,
    /// How many times longer computing takes while something is read.
    #[serde(default = "undisturbed")]
    pub contention: f64,
    /// How many times longer reading takes while something computes: both want the memory, and reads through the page
    /// cache are copied by the same cores.
    #[serde(default = "undisturbed")]
    pub hindrance: f64,
}

/// The contention of a machine on which reading does not disturb computing, and its hindrance where it is the same the other
/// way round.
pub(super) fn undisturbed() -> f64 {
    1.0
}

impl Rates {
    /// How long a read of so many bytes takes.
    pub fn read_seconds(&self, bytes: u64) -> f64 {
        self.read_latency + bytes as f64 / self.read_bytes_per_second
    }

    /// Whether these can be rates of a machine that runs a model of this shape.
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

/// Whether a rate is something to divide by.
pub(super) fn positive(setting: &'static str, value: f64) -> Result<(), MemoryError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(MemoryError::Setting { setting, value: value.to_string(), reason: "should be above 0" })
}

/// Whether a number is not below another.
pub(super) fn at_least(setting: &'static str, value: f64, least: f64) -> Result<(), MemoryError> {
    if value.is_finite() && value >= least {
        return Ok(());
    }
    let reason = if least == 0.0 { "should be 0 or more" } else { "should be 1 or more" };
    Err(MemoryError::Setting { setting, value: value.to_string(), reason })
}
