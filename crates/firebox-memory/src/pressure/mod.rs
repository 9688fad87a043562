//! Memory pressure as the system reports it.
//!
//! A [`PressureSource`] is read at intervals. [`system`] returns the sources of Linux; a phone's memory warning comes in
//! through a [`Warning`], and anything else as a closure.

mod cgroup;
mod headroom;
mod machine;
mod stall;
mod warning;

use std::path::Path;

pub use cgroup::Cgroup;
pub use headroom::Headroom;
pub use machine::Machine;
use serde::Serialize;
pub use warning::{Warning, WarningSource};

/// The severity of memory pressure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// There is enough memory.
    #[default]
    None,
    /// Memory is short.
    Some,
    /// The system is about to kill processes.
    Critical,
}

/// A reading of memory pressure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Pressure {
    /// The severity.
    pub level: Level,
    /// Bytes that can be taken before memory is short, if known.
    pub available: Option<u64>,
}

impl Pressure {
    /// Combines two readings: the worse level, and the smaller number of available bytes.
    pub fn and(self, other: Self) -> Self {
        let available = match (self.available, other.available) {
            (Some(one), Some(another)) => Some(one.min(another)),
            (one, another) => one.or(another),
        };
        Self { level: self.level.max(other.level), available }
    }
}

/// A source of memory pressure.
///
/// Closures are sources too:
///
/// ```
/// use firebox_memory::pressure::{Level, Pressure, PressureSource};
///
/// let mut source = || Some(Pressure { level: Level::None, available: Some(1 << 30) });
/// assert_eq!(source.read().unwrap().level, Level::None);
/// ```
pub trait PressureSource: Send {
    /// Reads the current pressure; `None` if it is unknown.
    fn read(&mut self) -> Option<Pressure>;

    /// Returns whether something happened that should be read at once. Called after every step, so it has to be cheap.
    fn is_urgent(&self) -> bool {
        false
    }
}

impl<F: FnMut() -> Option<Pressure> + Send> PressureSource for F {
    fn read(&mut self) -> Option<Pressure> {
        self()
    }
}

/// Returns the sources of this system: the machine as a whole, and the control groups of this process.
pub fn system() -> Vec<Box<dyn PressureSource>> {
    system_below(Path::new("/"))
}

/// Returns the sources of a system whose root directory is `root`.
pub fn system_below(root: &Path) -> Vec<Box<dyn PressureSource>> {
    let mut sources: Vec<Box<dyn PressureSource>> = Vec::new();
    sources.extend(Machine::below(root).map(|machine| Box::new(machine) as Box<dyn PressureSource>));
    sources.extend(Cgroup::v1(root).map(|group| Box::new(group) as Box<dyn PressureSource>));
    sources.extend(Cgroup::v2(root).map(|group| Box::new(group) as Box<dyn PressureSource>));
    sources
}

/// Combines the readings of all sources; `None` if no source returns one.
pub fn read_all(sources: &mut [Box<dyn PressureSource>]) -> Option<Pressure> {
    sources.iter_mut().filter_map(|source| source.read()).reduce(Pressure::and)
}

#[cfg(test)]
mod tests;
