use std::time::Duration;

use super::interval::Interval;
use crate::pressure::{Level, Pressure, PressureSource, read_all};

/// Looks now and then how short memory is.
pub(super) struct Watch {
    sources: Vec<Box<dyn PressureSource>>,
    poll: Interval,
    pressure: Pressure,
    /// The worst since the last check: a level that comes and goes from one look to the next is one event.
    worst: Level,
}

impl Watch {
    pub fn new(sources: Vec<Box<dyn PressureSource>>, poll: Interval) -> Self {
        Self { sources, poll, pressure: Pressure::default(), worst: Level::None }
    }

    /// Looks if it is time to, or where `due`, or where something is urgent. Whether it got worse than it has been
    /// since the last check.
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

    /// Takes in what somebody else has seen.
    pub fn see(&mut self, pressure: Pressure) {
        self.pressure = pressure;
        self.worst = self.worst.max(pressure.level);
    }

    pub fn pressure(&self) -> Pressure {
        self.pressure
    }
}
