//! Seeded random numbers.

use std::ops::RangeInclusive;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

/// Random numbers from a seed.
#[derive(Debug)]
pub(super) struct Random(ChaCha8Rng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Returns a number from 0 to below 1.
    pub fn share(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn within(&mut self, range: &RangeInclusive<usize>) -> usize {
        let (least, most) = (*range.start(), *range.end());
        least + (self.share() * (most - least + 1) as f64) as usize
    }

    /// Returns a random time until the next event of a Poisson process.
    pub fn wait(&mut self, mean_seconds: f64) -> Duration {
        // A share of 0 would mean an infinite wait.
        let seconds = -mean_seconds * (1.0 - self.share()).ln();
        Duration::from_secs_f64(seconds.clamp(0.0, 1e9))
    }
}
