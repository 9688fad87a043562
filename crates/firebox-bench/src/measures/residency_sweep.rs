//! Speed and memory by the number and choice of resident layers, predicted and measured.

use anyhow::Context as _;
use firebox_runtime::{Model, device};

use crate::child::{self, Task, TaskKind};
use crate::figure::{Declared, Figures, compared, times};
use crate::measures::run::{PLENTY, Predicted, Resident, Run, RunResult};
use crate::setup::Setup;

/// The figures of speed and memory at each step; every step has a fourth of the layers more resident.
pub const STEPS: [(&str, &str); 5] = [
    ("sweep.kept_0", "sweep.memory_0"),
    ("sweep.kept_25", "sweep.memory_25"),
    ("sweep.kept_50", "sweep.memory_50"),
    ("sweep.kept_75", "sweep.memory_75"),
    ("sweep.kept_100", "sweep.memory_100"),
];

pub const FIGURES: &[Declared] = &[
    compared(STEPS[0].0, "% off", "tok/s", "predicted"),
    compared(STEPS[1].0, "% off", "tok/s", "predicted"),
    compared(STEPS[2].0, "% off", "tok/s", "predicted"),
    compared(STEPS[3].0, "% off", "tok/s", "predicted"),
    compared(STEPS[4].0, "% off", "tok/s", "predicted"),
    compared(STEPS[0].1, "% off", "MB", "predicted"),
    compared(STEPS[1].1, "% off", "MB", "predicted"),
    compared(STEPS[2].1, "% off", "MB", "predicted"),
    compared(STEPS[3].1, "% off", "MB", "predicted"),
    compared(STEPS[4].1, "% off", "MB", "predicted"),
    compared("sweep.worst_error", "%", "tok/s", "predicted"),
    times("sweep.first", "tok/s", "nothing kept"),
    times("sweep.last", "tok/s", "nothing kept"),
    times("sweep.spread", "tok/s", "nothing kept"),
    times("sweep.slowest", "tok/s", "nothing kept"),
];

/// Tokens decoded for one figure.
const TOKENS: (usize, usize) = (12, 4);

const PLACEMENTS: [(Resident, &str); 3] =
    [(Resident::First, "sweep.first"), (Resident::Last, "sweep.last"), (Resident::Spread, "sweep.spread")];

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let layers = Model::open(setup.plain(), &device("cpu")?)?.decoder()?.layers();
    let quarters = STEPS.len() - 1;
    for _ in 0..setup.rounds {
        let (mut worst, mut speeds) = ((0.0, 0.0, 0.0), Vec::new());
        for (quarter, (speed, memory)) in STEPS.into_iter().enumerate() {
            let (ran, predicted) = run(setup, layers * quarter / quarters, Resident::Fastest)?;
            let measured = ran.speed()?;
            let off = error(predicted.speed, measured);
            figures.add_pair(speed, off, measured, predicted.speed)?;
            let [peak, predicted_peak] = [ran.peak, predicted.peak].map(|bytes| bytes as f64 / 1e6);
            figures.add_pair(memory, error(predicted_peak, peak), peak, predicted_peak)?;
            if off.abs() >= worst.0 {
                worst = (off.abs(), measured, predicted.speed);
            }
            speeds.push(measured);
        }
        let streamed = speeds[0];
        for (resident, name) in PLACEMENTS {
            let measured = run(setup, layers / 2, resident)?.0.speed()?;
            figures.more(name, measured, streamed)?;
            speeds.push(measured);
        }
        let (off, measured, predicted) = worst;
        figures.add_pair("sweep.worst_error", off, measured, predicted)?;
        let slowest = speeds.into_iter().fold(f64::INFINITY, f64::min);
        figures.more("sweep.slowest", slowest, streamed)?;
    }
    Ok(())
}

/// Returns by how many per cent the predicted value exceeds the measured one.
fn error(predicted: f64, measured: f64) -> f64 {
    100.0 * (predicted / measured - 1.0)
}

/// Probes and plans the model with this many resident layers, and runs it.
fn run(setup: &Setup, layers: usize, resident: Resident) -> anyhow::Result<(RunResult, Predicted)> {
    let (memory, layers) = (Some(PLENTY), Some((layers, resident)));
    let tokens = setup.usual_or(TOKENS.0, TOKENS.1);
    let run = Run { memory, layers, prompt: 16, depth: 32, tokens, ..Run::short(setup.plain()) };
    let ran: RunResult = child::asked(&Task::new(TaskKind::Run, &run)?, None)?;
    let predicted = ran.predicted.context("what is fitted into memory is planned")?;
    Ok((ran, predicted))
}
