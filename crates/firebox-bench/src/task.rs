//! Performs the tasks of child processes.

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::child::{self, Task, TaskKind};
use crate::figure::{Figures, Measured};
use crate::measures::{self, heads, models, run};
use crate::setup::Setup;

/// The details of a measure.
#[derive(Debug, Serialize, Deserialize)]
struct NamedMeasure {
    name: String,
    setup: Setup,
}

/// Performs the task that this process was started for, and returns the answer as JSON.
pub fn perform(task: &str) -> anyhow::Result<String> {
    let by_itself = "only the program itself gives itself tasks";
    let Task { kind, details } = serde_json::from_str(task).context(by_itself)?;
    let answer = match kind {
        TaskKind::Measure => {
            let NamedMeasure { name, setup } = serde_json::from_value(details).context(by_itself)?;
            let measure = measures::named(&name).with_context(|| format!("there is no measure {name}"))?;
            let mut figures = Figures::new(measure.figures);
            (measure.run)(&setup, &mut figures)?;
            serde_json::to_string(&figures.into_measured())
        }
        TaskKind::Models => {
            let trial: models::Trial = serde_json::from_value(details).context(by_itself)?;
            serde_json::to_string(&trial.run()?)
        }
        TaskKind::Head => {
            let with_head: heads::HeadTask = serde_json::from_value(details).context(by_itself)?;
            serde_json::to_string(&with_head.run()?)
        }
        TaskKind::Run => {
            let run: run::Run = serde_json::from_value(details).context(by_itself)?;
            serde_json::to_string(&run.run()?)
        }
    };
    Ok(answer?)
}

/// Everything that a measure brings, measured in a child process.
pub fn measured(name: &str, setup: &Setup) -> anyhow::Result<Measured> {
    let measure = NamedMeasure { name: name.to_owned(), setup: setup.clone() };
    child::asked(&Task::new(TaskKind::Measure, &measure)?, None)
}
