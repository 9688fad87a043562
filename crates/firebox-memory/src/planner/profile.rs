//! Speeds of a machine, stored as JSON.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::rates::{at_least, positive, undisturbed};
use super::{Rates, Shape};
use crate::MemoryError;

/// The speed of a machine, independent of the model. Stored as JSON, so that a plan can be made for another machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// The machine's name.
    pub name: String,
    /// Bytes per second read from disk.
    pub read_bytes_per_second: f64,
    /// Seconds from the start of a read to its first byte.
    #[serde(default)]
    pub read_latency: f64,
    /// Bytes of weights per second when one token is decoded, which is bound by memory.
    pub weight_bytes_per_second: f64,
    /// Seconds of every part in addition to its weights.
    #[serde(default)]
    pub part_overhead: f64,
    /// Seconds of every token in addition to its parts.
    #[serde(default)]
    pub step_overhead: f64,
    /// The factor by which computing slows down during a read.
    #[serde(default = "undisturbed")]
    pub contention: f64,
    /// The factor by which reading slows down during computing.
    #[serde(default = "undisturbed")]
    pub hindrance: f64,
}

impl DeviceProfile {
    /// Returns the profile of a slow laptop: a lower bound where nothing was measured.
    pub fn conservative() -> Self {
        Self {
            name: "a slow laptop".into(),
            read_bytes_per_second: 1e9,
            read_latency: 2e-4,
            weight_bytes_per_second: 1e10,
            part_overhead: 1e-4,
            step_overhead: 1e-3,
            contention: 1.1,
            hindrance: 1.0,
        }
    }

    /// Reads a profile from a file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, MemoryError> {
        let path = path.as_ref();
        let unreadable = |reason: String| MemoryError::Profile { path: path.to_owned(), reason };
        let bytes = std::fs::read(path).map_err(|error| unreadable(error.to_string()))?;
        let profile: Self = serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        profile.check().map_err(|error| unreadable(error.to_string()))?;
        Ok(profile)
    }

    /// Returns the rates of this machine for a model of that shape.
    pub fn rates(&self, shape: &Shape) -> Result<Rates, MemoryError> {
        self.check()?;
        let seconds = |bytes: u64| self.part_overhead + bytes as f64 / self.weight_bytes_per_second;
        Ok(Rates {
            read_bytes_per_second: self.read_bytes_per_second,
            read_latency: self.read_latency,
            compute: shape.parts.iter().map(|part| seconds(part.kept_bytes)).collect(),
            overhead: self.step_overhead,
            contention: self.contention,
            hindrance: self.hindrance,
        })
    }

    fn check(&self) -> Result<(), MemoryError> {
        positive("read_bytes_per_second", self.read_bytes_per_second)?;
        positive("weight_bytes_per_second", self.weight_bytes_per_second)?;
        at_least("read_latency", self.read_latency, 0.0)?;
        at_least("part_overhead", self.part_overhead, 0.0)?;
        at_least("step_overhead", self.step_overhead, 0.0)?;
        at_least("contention", self.contention, 1.0)?;
        at_least("hindrance", self.hindrance, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(text: &str) -> Result<DeviceProfile, MemoryError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.json");
        std::fs::write(&path, text).unwrap();
        DeviceProfile::open(&path)
    }

    #[test]
    fn a_profile_survives_its_file() {
        let profile = DeviceProfile::conservative();
        assert_eq!(opened(&serde_json::to_string(&profile).unwrap()).unwrap(), profile);
        let short = r#"{"name": "x", "read_bytes_per_second": 1e9, "weight_bytes_per_second": 1e10}"#;
        let profile = opened(short).unwrap();
        assert_eq!((profile.read_latency, profile.contention), (0.0, 1.0));
    }

    #[test]
    fn an_invalid_file_is_refused_with_the_reason() {
        for (text, word) in [
            ("{", "EOF"),
            (r#"{"name": "x"}"#, "read_bytes_per_second"),
            (r#"{"name": "x", "read_bytes_per_second": 0, "weight_bytes_per_second": 1}"#, "above 0"),
            (
                r#"{"name": "x", "read_bytes_per_second": 1, "weight_bytes_per_second": 1, "contention": 0.5}"#,
                "contention",
            ),
            (
                r#"{"name": "x", "read_bytes_per_second": 1, "weight_bytes_per_second": 1, "speed": 2}"#,
                "speed",
            ),
        ] {
            let error = opened(text).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("profile.json"), "{error}");
        }
    }
}
