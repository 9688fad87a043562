//! Pressure stall information of Linux.

use std::fs;
use std::path::PathBuf;

use super::Level;

/// Percent of the time in which a task waits for memory, from which on it counts. Android's low-memory killer, which acts
/// sooner, begins at 7.
const SOME_PERCENT: f64 = 5.0;
/// Percent of the time in which all tasks wait. systemd kills at 60; that is too late to react.
const FULL_PERCENT: f64 = 20.0;
/// Intervals shorter than this are not averaged, because a single wait would fill them.
const MIN_INTERVAL_SECONDS: f64 = 0.1;

/// The share of time that tasks wait for memory, from a pressure stall file of Linux.
#[derive(Debug)]
pub(super) struct Stall {
    file: PathBuf,
    uptime: PathBuf,
    last: Option<Totals>,
}

/// Totals in seconds since boot.
#[derive(Debug, Clone, Copy)]
struct Totals {
    uptime: f64,
    some: f64,
    full: f64,
}

impl Stall {
    pub fn new(file: PathBuf, uptime: PathBuf) -> Self {
        Self { file, uptime, last: None }
    }

    /// Returns the strain; [`Level::None`] if there is no such file.
    pub fn read(&mut self) -> Level {
        let text = fs::read_to_string(&self.file).unwrap_or_default();
        let (some, full) = (Line::find(&text, "some"), Line::find(&text, "full"));
        let lately = self.lately(some.total, full.total);
        // The average lasts for seconds after a stall, and the totals show at once when one begins.
        if full.average.max(lately.1) >= FULL_PERCENT {
            Level::Critical
        } else if some.average.max(lately.0) >= SOME_PERCENT {
            Level::Some
        } else {
            Level::None
        }
    }

    /// Returns the percentages since the last call.
    fn lately(&mut self, some: f64, full: f64) -> (f64, f64) {
        let Some(uptime) = fs::read_to_string(&self.uptime).ok().and_then(|text| first_number(&text)) else {
            return (0.0, 0.0);
        };
        let now = Totals { uptime, some, full };
        let last = *self.last.get_or_insert(now);
        let seconds = now.uptime - last.uptime;
        if seconds < MIN_INTERVAL_SECONDS {
            return (0.0, 0.0);
        }
        self.last = Some(now);
        ((now.some - last.some) / seconds * 100.0, (now.full - last.full) / seconds * 100.0)
    }
}

fn first_number(text: &str) -> Option<f64> {
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// `some avg10=0.00 avg60=0.00 avg300=0.00 total=1837489`
#[derive(Debug, Default)]
struct Line {
    /// Percent over ten seconds.
    average: f64,
    /// Seconds.
    total: f64,
}

impl Line {
    fn find(text: &str, kind: &str) -> Self {
        let Some(line) = text.lines().find_map(|line| line.strip_prefix(kind)) else {
            return Self::default();
        };
        let field = |name: &str| {
            let value = line.split_ascii_whitespace().find_map(|field| field.strip_prefix(name));
            value.and_then(|value| value.parse::<f64>().ok()).unwrap_or(0.0)
        };
        Self { average: field("avg10="), total: field("total=") / 1e6 }
    }
}
