//! Half of the memory that a model takes, held to by the system: a mapped model, whose pages come and go, beside one that
//! was told how much there is.

use std::io::ErrorKind;

use firebox_store::Checkpoint;

use crate::child::{self, Task, TaskKind};
use crate::figure::{Declared, Figures, times};
use crate::measures::run::{Resident, Run, RunResult};
use crate::setup::Setup;
use firebox_testing::control_group::ControlGroup;

pub const FIGURES: &[Declared] = &[
    times("short_memory.mapped", "s/token", "reading all of it for every token"),
    times("short_memory.within", "s/token", "reading all of it for every token"),
    times("short_memory.saved", "tok/s", "mapped"),
];

/// The memory of the group, as a part of the bytes of the weights.
const SHARE: f64 = 0.48;

/// The program alone takes more than a tiny model.
const PROGRAM: f64 = 160e6;

/// The part of that which a process is told: its own reading and its threads are charged to the group too.
const TOLD: f64 = 0.98;

const TOKENS: usize = 6;

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    let checkpoint = Checkpoint::open(setup.plain())?;
    let bytes = checkpoint.tensors().map(|tensor| tensor.bytes).sum::<u64>() as f64;
    let room = (bytes * SHARE).max(setup.usual_or(0.0, PROGRAM));
    let group = match ControlGroup::new("report", room as u64) {
        Ok(group) => group,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            figures
                .leave_out(format!("half of the memory: {error}; it takes the right to make control groups"));
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let mapped = Run { prompt: 16, depth: 16, tokens: TOKENS, ..Run::short(setup.plain()) };
    let within = Run { memory: Some((room * TOLD) as u64), ..mapped.clone() };
    let streamed = Run { layers: Some((0, Resident::Fastest)), ..within.clone() };
    let seconds = |run: &Run| -> anyhow::Result<f64> {
        // Pages that are already in the page cache would not be charged to the group.
        checkpoint.evict()?;
        let ran: RunResult = child::asked(&Task::new(TaskKind::Run, run)?, Some(&group))?;
        Ok(1.0 / ran.speed()?)
    };
    for _ in 0..setup.rounds {
        let (mapped, within, streamed) = (seconds(&mapped)?, seconds(&within)?, seconds(&streamed)?);
        figures.more("short_memory.mapped", mapped, streamed)?;
        figures.more("short_memory.within", within, streamed)?;
        figures.more("short_memory.saved", 1.0 / within, 1.0 / mapped)?;
    }
    Ok(())
}
