//! Runs measures in child processes, so that each has its own memory peak and starts with an empty page cache.

use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::figure::{Figures, Measured};
use crate::measures;
use crate::measures::{heads, models, run};
use crate::setup::Setup;
use firebox_testing::control_group::ControlGroup;

/// The option by which this program tells itself what to do.
pub const OPTION: &str = "--task";

/// Something to do.
#[derive(Debug, Serialize, Deserialize)]
pub enum Task {
    Measure { name: String, setup: Setup },
    Models(models::Trial),
    Head(heads::HeadTask),
    Run(run::Run),
}

/// Performs the task that this process was started for, and returns the answer as JSON.
pub fn perform(task: &str) -> anyhow::Result<String> {
    let task: Task = serde_json::from_str(task).context("only the program itself gives itself tasks")?;
    let answer = match task {
        Task::Measure { name, setup } => {
            let measure = measures::named(&name).with_context(|| format!("there is no measure {name}"))?;
            let mut figures = Figures::new(measure.figures);
            (measure.run)(&setup, &mut figures)?;
            serde_json::to_string(&figures.into_measured())
        }
        Task::Models(trial) => serde_json::to_string(&trial.run()?),
        Task::Head(with_head) => serde_json::to_string(&with_head.run()?),
        Task::Run(run) => serde_json::to_string(&run.run()?),
    };
    Ok(answer?)
}

/// Everything that a measure brings.
pub fn measured(name: &str, setup: &Setup) -> anyhow::Result<Measured> {
    asked(&Task::Measure { name: name.to_owned(), setup: setup.clone() }, None)
}

/// Runs a task in a child process, within a control group if one is given, and returns its answer.
pub fn asked<T: DeserializeOwned>(task: &Task, group: Option<&ControlGroup>) -> anyhow::Result<T> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(OPTION).arg(serde_json::to_string(task)?);
    answer(&mut command, group)
}

/// Runs a program and parses the last line of its output as JSON.
pub fn answer<T: DeserializeOwned>(command: &mut Command, group: Option<&ControlGroup>) -> anyhow::Result<T> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = match group {
        Some(group) => group.spawn(command),
        None => command.spawn(),
    };
    let program = command.get_program().to_string_lossy().into_owned();
    let output =
        child.and_then(|child| child.wait_with_output()).with_context(|| format!("cannot run {program}"))?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} ended with {}: {}", output.status, complaint.trim());
    let said = String::from_utf8_lossy(&output.stdout);
    let last = said.lines().last().unwrap_or_default();
    serde_json::from_str(last).with_context(|| format!("{program} said {last:?}"))
}
