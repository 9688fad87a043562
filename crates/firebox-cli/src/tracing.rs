//! `--trace`: what a model does, as a file.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use firebox_runtime::Model;
use firebox_runtime::telemetry::{TIMELINE_EVENTS, Timeline};

use crate::console::Console;

/// Options of watching a model at work.
#[derive(Debug, Clone, Args)]
pub struct TraceArgs {
    /// Write what happened when to this file, for chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

impl TraceArgs {
    /// Begins to remember what a model does, if that is asked for.
    pub fn begin(&self, model: &Model) -> Option<Trace> {
        let path = self.trace.clone()?;
        let timeline = model.telemetry().timeline().clone();
        timeline.start(TIMELINE_EVENTS);
        Some(Trace { path, timeline })
    }
}

/// A timeline that is recorded, and the path that it is written to.
pub struct Trace {
    path: PathBuf,
    timeline: Timeline,
}

impl Trace {
    /// Writes the file.
    pub fn save(self, console: &Console) -> anyhow::Result<()> {
        self.timeline.stop();
        self.timeline.save(&self.path).with_context(|| format!("cannot write {}", self.path.display()))?;
        let (events, lost) = self.timeline.counts();
        let lost = if lost == 0 { String::new() } else { format!(", and forgot {lost} before them") };
        console.detail(format!("wrote {events} events to {}{lost}", self.path.display()));
        Ok(())
    }
}
