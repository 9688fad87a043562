//! Compares with llama.cpp running the same weights, in turn, if a Python that has it is given. It runs with one buffer of
//! keys and values for all sequences and with one for each, and the better result of either counts. Its memory is without
//! that of Python.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use firebox_store::Checkpoint;

use crate::child::{self, Task, TaskKind};
use crate::figure::{Declared, Figures, times};
use crate::measures::run::{Run, RunResult};
use crate::setup::{Setup, once};

/// Makes GGUF files of a model, and measures them.
const SCRIPT: &str = include_str!("../../llamacpp.py");

const OTHER: &str = "llama.cpp";

pub const FIGURES: &[Declared] = &[
    times("foreign.f16_prompt", "tok/s", OTHER),
    times("foreign.f16_one", "tok/s", OTHER),
    times("foreign.f16_four", "tok/s", OTHER),
    times("foreign.f16_eight", "tok/s", OTHER),
    times("foreign.f16_memory", "MB", OTHER),
    times("foreign.f16_first", "s", OTHER),
    times("foreign.q8_prompt", "tok/s", OTHER),
    times("foreign.q8_one", "tok/s", OTHER),
    times("foreign.q8_four", "tok/s", OTHER),
    times("foreign.q8_eight", "tok/s", OTHER),
    times("foreign.q8_memory", "MB", OTHER),
    times("foreign.q8_first", "s", OTHER),
    times("foreign.q4_prompt", "tok/s", OTHER),
    times("foreign.q4_one", "tok/s", OTHER),
    times("foreign.q4_four", "tok/s", OTHER),
    times("foreign.q4_eight", "tok/s", OTHER),
    times("foreign.q4_memory", "MB", OTHER),
    times("foreign.q4_first", "s", OTHER),
    times("foreign.q4_k_m_prompt", "tok/s", OTHER),
    times("foreign.q4_k_m_one", "tok/s", OTHER),
    times("foreign.q4_k_m_four", "tok/s", OTHER),
    times("foreign.q4_k_m_eight", "tok/s", OTHER),
    times("foreign.q4_k_m_memory", "MB", OTHER),
    times("foreign.q4_k_m_first", "s", OTHER),
];

const BATCHES: [(usize, &str); 3] = [(1, "one"), (4, "four"), (8, "eight")];

pub fn measure(setup: &Setup, figures: &mut Figures) -> anyhow::Result<()> {
    figures.leave_out(
        "candle: nothing of it is installed; it is a library, and has no command to be measured by",
    );
    let Some(python) = &setup.peer else {
        figures
            .leave_out("llama.cpp: no Python was named that has llama-cpp-python and gguf (`--peer PYTHON`)");
        return Ok(());
    };
    if setup.model.is_some() {
        figures.leave_out("llama.cpp: it is measured with the made model only");
        return Ok(());
    }
    let (script, folder) = (setup.models().join("llamacpp.py"), setup.models().join("gguf"));
    std::fs::write(&script, SCRIPT)?;
    once(&folder, |folder| {
        let mut convert = Command::new(python);
        convert.arg(&script).arg("convert").arg(setup.plain()).arg(folder);
        let _: serde_json::Value = child::answer(&mut convert, None)?;
        Ok(())
    })?;
    let file = |name: &str| folder.join(format!("{name}.gguf"));
    for _ in 0..setup.rounds {
        for (name, ours, theirs) in [
            ("f16", file("f16"), file("f16")),
            ("q8", setup.q8(), file("q8_0")),
            ("q4", setup.q4(), file("q4_0")),
            ("q4_k_m", file("q4_k_m"), file("q4_k_m")),
        ] {
            let ours = run(setup, ours)?;
            let unified = foreign(setup, python, &script, &theirs, true)?;
            let theirs = unified.better(&foreign(setup, python, &script, &theirs, false)?);
            let figure = |what: &str| format!("foreign.{name}_{what}");
            figures.more(&figure("prompt"), ours.prefill, theirs.prefill)?;
            for (at, (_, words)) in BATCHES.into_iter().enumerate() {
                let speed = |ran: &RunResult| ran.decode.get(at).copied().context("a batch is missing");
                figures.more(&figure(words), speed(&ours)?, speed(&theirs)?)?;
            }
            figures.more(&figure("memory"), ours.peak as f64 / 1e6, theirs.peak as f64 / 1e6)?;
            figures.more(&figure("first"), ours.first, theirs.first)?;
        }
    }
    Ok(())
}

fn task(setup: &Setup, model: PathBuf) -> Run {
    let (prompt, depth) = setup.usual_or((512, 128), (32, 16));
    let batches = BATCHES.map(|(batch, _)| batch).to_vec();
    Run { prompt, depth, batches, ..Run::short(model) }
}

fn run(setup: &Setup, model: PathBuf) -> anyhow::Result<RunResult> {
    // Otherwise the first run would fill the page cache for the second.
    Checkpoint::open(&model)?.evict()?;
    child::asked(&Task::new(TaskKind::Run, &task(setup, model))?, None)
}

/// Measures llama.cpp, whose sequences share one buffer of keys and values, or have one each.
fn foreign(
    setup: &Setup,
    python: &Path,
    script: &Path,
    model: &Path,
    unified: bool,
) -> anyhow::Result<RunResult> {
    Checkpoint::open(model)?.evict()?;
    let Run { prompt, depth, tokens, batches, .. } = task(setup, model.to_owned());
    let mut command = Command::new(python);
    command.arg(script).arg("measure").arg(model);
    let threads = rayon::current_num_threads();
    for number in [usize::from(unified), threads, prompt, depth, tokens].iter().chain(&batches) {
        command.arg(number.to_string());
    }
    child::answer(&mut command, None)
}
