//! When a head that failed is tried again.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

/// After the first failure.
const FIRST: Duration = Duration::from_secs(30);
/// However often it failed.
const LONGEST: Duration = Duration::from_secs(60 * 60);
/// The share of a wait that is random, so that heads that failed together are not retried together.
const JITTER: f64 = 0.25;

/// When to retry a head that failed to load: later after every failure.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Retry {
    failures: u32,
    at: Option<Instant>,
}

impl Retry {
    /// Returns whether a retry is due.
    pub fn is_due(&self, now: Instant) -> bool {
        self.at.is_none_or(|at| now >= at)
    }

    /// Returns the time until a retry is due.
    pub fn wait(&self, now: Instant) -> Duration {
        self.at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now))
    }

    pub fn failed(&mut self, now: Instant) {
        let doubled = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        let chance = RandomState::new().hash_one(self.failures) as f64 / u64::MAX as f64;
        self.failures += 1;
        self.at = Some(now + doubled.mul_f64(1.0 + JITTER * chance));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_makes_the_wait_longer_up_to_an_end() {
        let now = Instant::now();
        let mut retry = Retry::default();
        assert!(retry.is_due(now));
        let mut before = Duration::ZERO;
        for failure in 0..20 {
            retry.failed(now);
            let wait = retry.wait(now);
            assert!(!retry.is_due(now + wait / 2) && retry.is_due(now + wait));
            assert!(wait >= FIRST && wait <= LONGEST.mul_f64(1.0 + JITTER), "{failure}: {wait:?}");
            if wait < LONGEST {
                // The least of one wait is more than the most of the one before.
                assert!(wait > before, "{failure}: {wait:?} after {before:?}");
            }
            before = wait;
        }
    }
}
