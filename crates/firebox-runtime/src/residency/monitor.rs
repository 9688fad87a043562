//! A thread that watches memory pressure while passes run, and has parts evicted at once.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use firebox_model::StreamedWeights;

use super::config::CONFIG;
use super::weights::CachedModel;
use crate::RuntimeError;
use crate::memory::anonymous_bytes;
use crate::pressure::{Level, Pressure, PressureSource, read_all};

/// Starts the monitor of a model: another program may take memory faster than a pass ends. The thread ends soon after
/// the model is dropped.
pub(super) fn start(
    model: &Arc<CachedModel>,
    weights: &Arc<StreamedWeights>,
    mut sources: Vec<Box<dyn PressureSource>>,
) -> Result<(), RuntimeError> {
    let (model, weights) = (Arc::downgrade(model), Arc::downgrade(weights));
    let mut others = OtherPrograms::default();
    let watch = move || {
        while let Some(wait) = check(&model, &weights, &mut sources, &mut others) {
            thread::sleep(wait);
        }
    };
    let started = thread::Builder::new().name("firebox-memory".into()).spawn(watch);
    started.map(drop).map_err(|error| RuntimeError::Threads { reason: error.to_string() })
}

/// Reads the pressure once. Returns the time until the next reading, or `None` if the model is gone.
fn check(
    model: &Weak<CachedModel>,
    weights: &Weak<StreamedWeights>,
    sources: &mut [Box<dyn PressureSource>],
    others: &mut OtherPrograms,
) -> Option<Duration> {
    let mut pressure = read_all(sources).unwrap_or_default();
    if let Some(available) = pressure.available
        && others.exhaust(Instant::now(), available, || anonymous_bytes().unwrap_or(0))
    {
        pressure.level = pressure.level.max(Level::Some);
    }
    let (model, weights) = (model.upgrade()?, weights.upgrade()?);
    if model.is_shared() {
        model.cache.note_pressure(pressure);
    }
    if pressure.level > Level::None {
        model.relieve(&weights, pressure);
    }
    let has_resident = (0..weights.parts()).any(|part| weights.is_resident(part));
    let shortest = if has_resident { CONFIG.monitor_interval } else { CONFIG.idle_monitor_interval };
    Some(until_next(pressure).max(shortest))
}

/// The memory that other programs leave, and how fast they take it.
#[derive(Default)]
struct OtherPrograms {
    /// The last reading, and the bytes that were left then.
    last: Option<(Instant, u64)>,
    /// Bytes that they took a second.
    rate: f64,
}

impl OtherPrograms {
    /// Returns whether other programs take memory so fast that it is exhausted before parts could be evicted. `own`
    /// returns the bytes of this process, whose own growth was charged before. Two fast readings in a row are needed:
    /// limits may be moved, or something may be allocated between reading the two numbers.
    fn exhaust(&mut self, now: Instant, available: u64, own: impl FnOnce() -> u64) -> bool {
        if available == 0 || available > CONFIG.plenty {
            // The rate is unknown if nothing is available, and does not matter if there is plenty.
            *self = Self::default();
            return false;
        }
        let left = available + own();
        let before = self.rate;
        self.rate = self.last.replace((now, left)).map_or(0.0, |(then, left_before)| {
            let seconds = now.duration_since(then).as_secs_f64().max(f64::EPSILON);
            let taken = left_before.saturating_sub(left) as f64;
            (taken / seconds).min(CONFIG.others_bytes_per_second as f64)
        });
        self.rate.min(before) * CONFIG.reaction_time.as_secs_f64() > available as f64
    }
}

/// Half of the time that it takes at least until the available memory is gone.
fn until_next(pressure: Pressure) -> Duration {
    let Some(available) = pressure.available else { return CONFIG.max_monitor_interval };
    let micros = available / 2 / (CONFIG.others_bytes_per_second / 1_000_000);
    Duration::from_micros(micros).clamp(CONFIG.monitor_interval, CONFIG.max_monitor_interval)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_growth_of_other_programs_is_foreseen() {
        const MIB: u64 = 1 << 20;
        let begun = Instant::now();
        let at = |millis| begun + Duration::from_millis(millis);
        let mut others = OtherPrograms::default();
        let mut take =
            |millis, available: u64, own: u64| others.exhaust(at(millis), available * MIB, || own * MIB);
        assert!(!take(0, 20, 100), "nothing is known yet");
        assert!(!take(4, 12, 108), "this process took it");
        assert!(!take(104, 10, 108), "two megabytes in a tenth of a second");
        assert!(!take(108, 7, 108), "seen once");
        assert!(take(112, 4, 108), "in 16 ms all of it is gone");
        assert!(!take(116, 20, 84), "this process released 24 and others took 8");
        assert!(!take(120, 80, 84));
        assert!(!take(124, 72, 84) && !take(128, 64, 84), "as fast as can be, but much is left");
        assert!(!take(132, 0, 84), "memory is short already");
        assert!(
            !take(136, 14, 60) && !take(140, 10, 60),
            "memory that was missing before was not taken by others"
        );
        assert!(take(144, 6, 60));
    }

    #[test]
    fn the_less_is_available_the_sooner_it_is_read_again() {
        let at = |available| until_next(Pressure { level: Level::None, available });
        assert_eq!(at(None), CONFIG.max_monitor_interval);
        assert_eq!(at(Some(16 << 30)), CONFIG.max_monitor_interval);
        assert_eq!(at(Some(0)), CONFIG.monitor_interval);
        let megabytes = [400, 100, 40].map(|megabytes| at(Some(megabytes << 20)));
        assert!(megabytes.is_sorted_by(|more, less| more > less), "{megabytes:?}");
        // Half of it may be gone by then.
        assert!(
            megabytes[2].as_secs_f64() * CONFIG.others_bytes_per_second as f64 <= f64::from(40 << 20) / 1.9
        );
    }
}
