use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{Level, Pressure, PressureSource};

/// Passes on what a system tells its applications, such as a phone's memory warning. Clones warn the same.
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

/// Where warnings arrive.
#[derive(Debug)]
pub struct Warned(Arc<AtomicU8>);

impl Warning {
    /// Both ends.
    pub fn channel() -> (Self, Warned) {
        let level = Arc::new(AtomicU8::new(Level::None as u8));
        (Self(level.clone()), Warned(level))
    }

    /// Warns once. Systems do not say when it is over, so a warning holds until it was read.
    pub fn raise(&self, level: Level) {
        self.0.fetch_max(level as u8, Ordering::Relaxed);
    }
}

impl PressureSource for Warned {
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
