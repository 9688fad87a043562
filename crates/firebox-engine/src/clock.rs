//! The clock that an engine reads: the system's, or a simulated one in tests.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// A source of time for an engine.
pub trait Clock: Debug + Send + Sync {
    /// Returns the time since a fixed moment.
    fn now(&self) -> Duration;
}

/// The system's monotonic clock, counted from its creation.
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
