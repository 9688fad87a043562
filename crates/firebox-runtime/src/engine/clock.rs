//! The clock of an engine: the machine's own, or one made for a test.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// What time it is for an engine: the machine's, or one that a test makes up.
pub trait Clock: Debug + Send + Sync {
    /// The time since some moment that stays the same.
    fn now(&self) -> Duration;
}

/// The machine's own clock, from when it was made.
#[derive(Debug, Clone)]
pub struct WallClock(Instant);

impl Default for WallClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for WallClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}
