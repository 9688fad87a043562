//! Runs tasks in child processes, so that each has its own memory peak and starts with an empty page cache.

use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use firebox_testing::control_group::ControlGroup;

/// The option by which this program tells itself what to do.
pub const OPTION: &str = "--task";

/// Something to do in a child process.
#[derive(Debug, Serialize, Deserialize)]
pub struct Task {
    pub kind: TaskKind,
    /// What the kind of task needs, as JSON.
    pub details: Value,
}

/// The kind of a task, which says how its details are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaskKind {
    /// A measure.
    Measure,
    /// A trial of several models.
    Models,
    /// Decoding with a head or without.
    Head,
    /// A run of one model.
    Run,
}

impl Task {
    pub fn new(kind: TaskKind, details: &impl Serialize) -> anyhow::Result<Self> {
        Ok(Self { kind, details: serde_json::to_value(details)? })
    }
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
