//! What a change of heads takes beside opening the model anew.

use firebox_runtime::device;
use firebox_runtime::fit::disk_rate;
use firebox_runtime::heads::Changes;
use firebox_store::Heads;

use crate::figure::{Declared, Figures, times};
use crate::setup::{HEAD, Setup};

pub const FIGURES: &[Declared] = &[
    times("heads.warm", "ms", "opening the model"),
    times("heads.warm_first", "ms", "opening the model"),
    times("heads.cold", "ms", "opening the model"),
    times("heads.cold_first", "ms", "opening the model"),
    times("heads.fallback", "ms", "opening the model"),
    times("heads.fallback_first", "ms", "opening the model"),
    times("heads.beside_reading", "ms", "reading as many bytes"),
];

/// Rounds are short.
const ROUNDS: usize = 7;

/// Tokens that were said before.
const DEPTH: u32 = 16;

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let (path, cpu) = (setup.q4(), device("cpu")?);
    let bytes = Heads::open(&path)?.head(HEAD)?.bytes();
    let prompt: Vec<u32> = (1..=DEPTH).collect();
    for _ in 0..setup.usual_or(ROUNDS, 1) {
        let (changes, model) = Changes::measure(&path, &cpu, HEAD, &prompt)?;
        let reading = bytes as f64 / disk_rate(model.checkpoint())?;
        let reload = 1e3 * changes.reload;
        for (name, seconds) in [
            ("heads.warm", changes.warm),
            ("heads.warm_first", changes.warm_first_token),
            ("heads.cold", changes.cold),
            ("heads.cold_first", changes.cold_first_token),
            ("heads.fallback", changes.fallback),
            ("heads.fallback_first", changes.fallback_first_token),
        ] {
            figures.sooner(name, 1e3 * seconds, reload)?;
        }
        figures.more("heads.beside_reading", 1e3 * changes.cold, 1e3 * reading)?;
    }
    Ok(())
}
