//! Memory warnings that a system sends to its applications.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{Level, Pressure, PressureSource};

/// Passes on memory warnings of the system, such as a phone's. Clones raise the same warning.
///
/// ```
/// use firebox_memory::pressure::{Level, PressureSource, Warning};
///
/// let (warning, mut warned) = Warning::channel();
/// warning.raise(Level::Critical); // from any thread
/// assert_eq!(warned.read().unwrap().level, Level::Critical);
/// assert_eq!(warned.read().unwrap().level, Level::None);
/// ```
#[derive(Debug, Clone)]
pub struct Warning(Arc<AtomicU8>);

/// The receiving end of a [`Warning`].
#[derive(Debug)]
pub struct WarningSource(Arc<AtomicU8>);

impl Warning {
    /// Creates both ends.
    pub fn channel() -> (Self, WarningSource) {
        let level = Arc::new(AtomicU8::new(Level::None as u8));
        (Self(level.clone()), WarningSource(level))
    }

    /// Raises a warning. Systems do not report its end, so that it holds until it was read once.
    pub fn raise(&self, level: Level) {
        self.0.fetch_max(level as u8, Ordering::Relaxed);
    }
}

impl PressureSource for WarningSource {
    fn read(&mut self) -> Option<Pressure> {
        let level = match self.0.swap(Level::None as u8, Ordering::Relaxed) {
            0 => Level::None,
            1 => Level::Some,
            _ => Level::Critical,
        };
        Some(Pressure { level, available: None })
    }

    fn is_urgent(&self) -> bool {
        self.0.load(Ordering::Relaxed) != Level::None as u8
    }
}
