//! How short memory is, as far as the system says.
//!
//! A [`PressureSource`] is asked now and then. [`system`] finds what Linux offers; a phone's memory warning comes in
//! through a [`Warning`], and anything else as a closure.

mod cgroup;
mod machine;
mod room;
mod stall;
mod warning;

use std::path::Path;

pub use cgroup::Cgroup;
pub use machine::Machine;
pub use room::Room;
use serde::Serialize;
pub use warning::{Warned, Warning};

/// How much it matters to use less memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// There is enough.
    #[default]
    None,
    /// It is getting short.
    Some,
    /// Programs are about to be killed for it.
    Critical,
}

/// How short memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Pressure {
    /// How much it matters.
    pub level: Level,
    /// Bytes that can be taken before it gets short, where that is known.
    pub available: Option<u64>,
}

impl Pressure {
    /// Both together: the worst level, and the least that is available.
    pub fn and(self, other: Self) -> Self {
        let available = match (self.available, other.available) {
            (Some(one), Some(another)) => Some(one.min(another)),
            (one, another) => one.or(another),
        };
        Self { level: self.level.max(other.level), available }
    }
}

/// Somebody who knows how short memory is.
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
    /// How short memory is now; absent where this cannot be told.
    fn read(&mut self) -> Option<Pressure>;

    /// Whether something happened that should be read at once. Asked after every step, so it must cost nothing.
    fn is_urgent(&self) -> bool {
        false
    }
}

impl<F: FnMut() -> Option<Pressure> + Send> PressureSource for F {
    fn read(&mut self) -> Option<Pressure> {
        self()
    }
}

/// What this system offers: the machine as a whole, and the control groups this process is in.
pub fn system() -> Vec<Box<dyn PressureSource>> {
    system_below(Path::new("/"))
}

/// The same for a system whose files lie in another folder.
pub fn system_below(root: &Path) -> Vec<Box<dyn PressureSource>> {
    let mut sources: Vec<Box<dyn PressureSource>> = Vec::new();
    sources.extend(Machine::below(root).map(|machine| Box::new(machine) as Box<dyn PressureSource>));
    sources.extend(Cgroup::v1(root).map(|group| Box::new(group) as Box<dyn PressureSource>));
    sources.extend(Cgroup::v2(root).map(|group| Box::new(group) as Box<dyn PressureSource>));
    sources
}

/// What all sources say together; absent where none says anything.
pub fn read_all(sources: &mut [Box<dyn PressureSource>]) -> Option<Pressure> {
    sources.iter_mut().filter_map(|source| source.read()).reduce(Pressure::and)
}

#[cfg(test)]
mod tests;
