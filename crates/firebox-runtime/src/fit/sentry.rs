use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use firebox_model::Decoder;

use super::keeper::Keeper;
use crate::RuntimeError;
use crate::pressure::{Level, Pressure, PressureSource, read_all};

/// Nobody takes memory faster than the kernel clears pages for a few threads at once.
const BYTES_PER_SECOND: u64 = 2 << 30;

/// Reading the system's files takes a twelfth of a millisecond: two percent of one core.
const SHORTEST: Duration = Duration::from_millis(4);

/// Where nothing is kept there is nothing to let go of, and more is kept only while there is plenty.
const WITH_NOTHING_KEPT: Duration = Duration::from_millis(32);

/// Memory may come to be short for other reasons than that somebody takes it: a limit may be lowered.
const LONGEST: Duration = Duration::from_millis(250);

/// Looks how short memory is while passes run, and has parts let go of at once where it is: whoever takes memory suddenly
/// has it within fewer milliseconds than a pass takes. Ends soon after the model.
pub(super) fn keep_watch(
    keeper: &Arc<Keeper>,
    decoder: &Arc<Decoder>,
    mut sources: Vec<Box<dyn PressureSource>>,
) -> Result<(), RuntimeError> {
    let (keeper, decoder) = (Arc::downgrade(keeper), Arc::downgrade(decoder));
    let watch = move || {
        while let Some(wait) = look(&keeper, &decoder, &mut sources) {
            thread::sleep(wait);
        }
    };
    let started = thread::Builder::new().name("firebox-memory".into()).spawn(watch);
    started.map(drop).map_err(|error| RuntimeError::Threads { reason: error.to_string() })
}

/// Looks once. Returns when to look again; nothing where the model is gone.
fn look(
    keeper: &Weak<Keeper>,
    decoder: &Weak<Decoder>,
    sources: &mut [Box<dyn PressureSource>],
) -> Option<Duration> {
    let pressure = read_all(sources).unwrap_or_default();
    let (keeper, decoder) = (keeper.upgrade()?, decoder.upgrade()?);
    let streamed = decoder.streamed()?;
    if let Some(tenancy) = keeper.tenancy() {
        tenancy.tenants.see(pressure);
    }
    if pressure.level > Level::None {
        keeper.alarmed(streamed, pressure);
    }
    let keeps = (0..streamed.parts()).any(|part| streamed.is_kept(part));
    Some(until_next(pressure).max(if keeps { SHORTEST } else { WITH_NOTHING_KEPT }))
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
