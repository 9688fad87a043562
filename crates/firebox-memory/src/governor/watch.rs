//! Periodic readings of memory pressure.

use std::time::Duration;

use super::interval::Interval;
use crate::pressure::{Level, Pressure, PressureSource, read_all};

/// Reads memory pressure at intervals.
pub(super) struct Watch {
    sources: Vec<Box<dyn PressureSource>>,
    poll: Interval,
    pressure: Pressure,
    /// The worst reading since the last check: a level that comes and goes between readings is one event.
    worst: Level,
}

impl Watch {
    pub fn new(sources: Vec<Box<dyn PressureSource>>, poll: Interval) -> Self {
        Self { sources, poll, pressure: Pressure::default(), worst: Level::None }
    }

    /// Reads if the interval has ended, if `due`, or if a source is urgent. Returns whether the level is worse than any since
    /// the last check.
    pub fn look(&mut self, tokens: usize, time: Duration, due: bool) -> bool {
        let over = self.poll.passes(tokens, time);
        if !over && !due && !self.sources.iter().any(|source| source.is_urgent()) {
            return false;
        }
        self.pressure = read_all(&mut self.sources).unwrap_or_default();
        let rose = self.pressure.level > self.worst;
        self.worst = if due { self.pressure.level } else { self.worst.max(self.pressure.level) };
        rose
    }

    /// Takes in a reading of another source.
    pub fn see(&mut self, pressure: Pressure) {
        self.pressure = pressure;
        self.worst = self.worst.max(pressure.level);
    }

    pub fn pressure(&self) -> Pressure {
        self.pressure
    }
}
