//! Speed and memory by how many layers are kept and by which ones, foretold and measured.

use anyhow::Context as _;
use firebox_runtime::{Model, device};

use crate::child::{self, Task, TaskKind};
use crate::figure::{Declared, Figures, compared, times};
use crate::measures::run::{Foretold, Kept, PLENTY, Ran, Run};
use crate::setup::Setup;

/// Speed and memory by how much is kept, a fourth of the layers more in each.
pub const STEPS: [(&str, &str); 5] = [
    ("sweep.kept_0", "sweep.memory_0"),
    ("sweep.kept_25", "sweep.memory_25"),
    ("sweep.kept_50", "sweep.memory_50"),
    ("sweep.kept_75", "sweep.memory_75"),
    ("sweep.kept_100", "sweep.memory_100"),
];

pub const FIGURES: &[Declared] = &[
    compared(STEPS[0].0, "% off", "tok/s", "foretold"),
    compared(STEPS[1].0, "% off", "tok/s", "foretold"),
    compared(STEPS[2].0, "% off", "tok/s", "foretold"),
    compared(STEPS[3].0, "% off", "tok/s", "foretold"),
    compared(STEPS[4].0, "% off", "tok/s", "foretold"),
    compared(STEPS[0].1, "% off", "MB", "foretold"),
    compared(STEPS[1].1, "% off", "MB", "foretold"),
    compared(STEPS[2].1, "% off", "MB", "foretold"),
    compared(STEPS[3].1, "% off", "MB", "foretold"),
    compared(STEPS[4].1, "% off", "MB", "foretold"),
    compared("sweep.worst_error", "%", "tok/s", "foretold"),
    times("sweep.first", "tok/s", "nothing kept"),
    times("sweep.last", "tok/s", "nothing kept"),
    times("sweep.spread", "tok/s", "nothing kept"),
    times("sweep.slowest", "tok/s", "nothing kept"),
];

/// Tokens decoded for one figure.
const TOKENS: (usize, usize) = (12, 4);

const PLACEMENTS: [(Kept, &str); 3] =
    [(Kept::First, "sweep.first"), (Kept::Last, "sweep.last"), (Kept::Spread, "sweep.spread")];

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let layers = Model::open(setup.plain(), &device("cpu")?)?.decoder()?.layers();
    let quarters = STEPS.len() - 1;
    for _ in 0..setup.rounds {
        let (mut worst, mut speeds) = ((0.0, 0.0, 0.0), Vec::new());
        for (quarter, (speed, memory)) in STEPS.into_iter().enumerate() {
            let (ran, foretold) = run(setup, layers * quarter / quarters, Kept::Fastest)?;
            let measured = ran.speed()?;
            let off = error(foretold.speed, measured);
            figures.add_pair(speed, off, measured, foretold.speed)?;
            let [peak, peak_foretold] = [ran.peak, foretold.peak].map(|bytes| bytes as f64 / 1e6);
            figures.add_pair(memory, error(peak_foretold, peak), peak, peak_foretold)?;
            if off.abs() >= worst.0 {
                worst = (off.abs(), measured, foretold.speed);
            }
            speeds.push(measured);
        }
        let streamed = speeds[0];
        for (kept, name) in PLACEMENTS {
            let measured = run(setup, layers / 2, kept)?.0.speed()?;
            figures.more(name, measured, streamed)?;
            speeds.push(measured);
        }
        let (off, measured, foretold) = worst;
        figures.add_pair("sweep.worst_error", off, measured, foretold)?;
        let slowest = speeds.into_iter().fold(f64::INFINITY, f64::min);
        figures.more("sweep.slowest", slowest, streamed)?;
    }
    Ok(())
}

/// Returns by how many per cent the predicted value exceeds the measured one.
fn error(foretold: f64, measured: f64) -> f64 {
    100.0 * (foretold / measured - 1.0)
}

/// As who asks for so many layers has it: probed, planned, and run.
fn run(setup: &Setup, layers: usize, kept: Kept) -> anyhow::Result<(Ran, Foretold)> {
    let (memory, layers) = (Some(PLENTY), Some((layers, kept)));
    let tokens = setup.usual_or(TOKENS.0, TOKENS.1);
    let run = Run { memory, layers, prompt: 16, depth: 32, tokens, ..Run::short(setup.plain()) };
    let ran: Ran = child::asked(&Task::new(TaskKind::Run, &run)?, None)?;
    let foretold = ran.foretold.context("what is fitted into memory is planned")?;
    Ok((ran, foretold))
}
