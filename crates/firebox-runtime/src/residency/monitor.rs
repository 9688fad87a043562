use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use firebox_model::Decoder;

use super::weights::WeightCache;
use crate::RuntimeError;
use crate::memory::anonymous_bytes;
use crate::pressure::{Level, Pressure, PressureSource, read_all};

/// Nobody takes memory faster than the kernel clears pages for a few threads at once.
const BYTES_PER_SECOND: u64 = 2 << 30;

/// Reading the system's files takes an eighth of a millisecond: three percent of one core.
const SHORTEST: Duration = Duration::from_millis(4);

/// Where nothing is kept there is nothing to let go of, and more is kept only while there is plenty.
const WITH_NOTHING_KEPT: Duration = Duration::from_millis(32);

/// Memory may come to be short for other reasons than that somebody takes it: a limit may be lowered.
const LONGEST: Duration = Duration::from_millis(250);

/// Until a part is gone after somebody began to take memory: the shortest time from one look to the next, two ticks of the
/// system's clock by which it may be late where all cores are busy, and letting go.
const REACTION: Duration = Duration::from_millis(16);

/// Nobody takes so many bytes before it was looked at twice.
const FAR: u64 = BYTES_PER_SECOND / 8;

/// Looks how short memory is while passes run, and has parts let go of at once where it is: whoever takes memory suddenly
/// has it within fewer milliseconds than a pass takes. Ends soon after the model.
pub(super) fn keep_watch(
    keeper: &Arc<WeightCache>,
    decoder: &Arc<Decoder>,
    mut sources: Vec<Box<dyn PressureSource>>,
) -> Result<(), RuntimeError> {
    let (keeper, decoder) = (Arc::downgrade(keeper), Arc::downgrade(decoder));
    let mut others = Others::default();
    let watch = move || {
        while let Some(wait) = look(&keeper, &decoder, &mut sources, &mut others) {
            thread::sleep(wait);
        }
    };
    let started = thread::Builder::new().name("firebox-memory".into()).spawn(watch);
    started.map(drop).map_err(|error| RuntimeError::Threads { reason: error.to_string() })
}

/// Looks once. Returns when to look again; nothing where the model is gone.
fn look(
    keeper: &Weak<WeightCache>,
    decoder: &Weak<Decoder>,
    sources: &mut [Box<dyn PressureSource>],
    others: &mut Others,
) -> Option<Duration> {
    let mut pressure = read_all(sources).unwrap_or_default();
    if let Some(available) = pressure.available
        && others.take(Instant::now(), available, || anonymous_bytes().unwrap_or(0))
    {
        pressure.level = pressure.level.max(Level::Some);
    }
    let (keeper, decoder) = (keeper.upgrade()?, decoder.upgrade()?);
    let streamed = decoder.streamed()?;
    if let Some(tenancy) = keeper.tenancy() {
        tenancy.tenants.see(pressure);
    }
    if pressure.level > Level::None {
        keeper.alarmed(streamed, pressure);
    }
    let keeps = (0..streamed.parts()).any(|part| streamed.is_resident(part));
    Some(until_next(pressure).max(if keeps { SHORTEST } else { WITH_NOTHING_KEPT }))
}

/// What others leave of the memory.
#[derive(Default)]
struct Others {
    /// When that was seen last, and what they left.
    seen: Option<(Instant, u64)>,
    /// Bytes a second that they took then.
    rate: f64,
}

impl Others {
    /// Whether they take so much that what is available is gone before anything could be let go of, where so much is this
    /// process's own: what it takes itself was paid for before. Seen only once it may be that marks were moved, or that something
    /// was taken between two readings.
    fn take(&mut self, now: Instant, available: u64, own: impl FnOnce() -> u64) -> bool {
        if available == 0 || available > FAR {
            // How much is missing is not known, or it does not matter yet.
            *self = Self::default();
            return false;
        }
        let leave = available + own();
        let before = self.rate;
        self.rate = self.seen.replace((now, leave)).map_or(0.0, |(then, left)| {
            let seconds = now.duration_since(then).as_secs_f64().max(f64::EPSILON);
            (left.saturating_sub(leave) as f64 / seconds).min(BYTES_PER_SECOND as f64)
        });
        self.rate.min(before) * REACTION.as_secs_f64() > available as f64
    }
}

/// Half as long as it takes at least until what is available is taken.
fn until_next(pressure: Pressure) -> Duration {
    let Some(available) = pressure.available else { return LONGEST };
    let micros = available / 2 / (BYTES_PER_SECOND / 1_000_000);
    Duration::from_micros(micros).clamp(SHORTEST, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_take_fast_is_foreseen() {
        const MIB: u64 = 1 << 20;
        let begun = Instant::now();
        let at = |millis| begun + Duration::from_millis(millis);
        let mut others = Others::default();
        let mut take =
            |millis, available: u64, own: u64| others.take(at(millis), available * MIB, || own * MIB);
        assert!(!take(0, 20, 100), "nothing is known yet");
        assert!(!take(4, 12, 108), "it took that itself");
        assert!(!take(104, 10, 108), "two megabytes in a tenth of a second");
        assert!(!take(108, 7, 108), "seen once");
        assert!(take(112, 4, 108), "in 16 ms all of it is gone");
        assert!(!take(116, 20, 84), "it let go of 24 and they took 8");
        assert!(!take(120, 80, 84));
        assert!(!take(124, 72, 84) && !take(128, 64, 84), "as fast as can be, but there is much left");
        assert!(!take(132, 0, 84), "it is short already");
        assert!(
            !take(136, 14, 60) && !take(140, 10, 60),
            "what was missing before is nothing that they took"
        );
        assert!(take(144, 6, 60));
    }

    #[test]
    fn the_less_there_is_the_sooner_it_looks_again() {
        let at = |available| until_next(Pressure { level: Level::None, available });
        assert_eq!(at(None), LONGEST);
        assert_eq!(at(Some(16 << 30)), LONGEST);
        assert_eq!(at(Some(0)), SHORTEST);
        let megabytes = [400, 100, 40].map(|megabytes| at(Some(megabytes << 20)));
        assert!(megabytes.is_sorted_by(|more, less| more > less), "{megabytes:?}");
        // By then half of it may be gone.
        assert!(megabytes[2].as_secs_f64() * BYTES_PER_SECOND as f64 <= f64::from(40 << 20) / 1.9);
    }
}
