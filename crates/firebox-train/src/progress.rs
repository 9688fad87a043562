//! Who is told how a run goes.

use std::io::Write;
use std::path::PathBuf;

use crate::ending::Ending;
use crate::metrics::Record;

/// Who is told how a run goes.
pub trait Progress {
    /// The run begins, or goes on.
    fn started(&mut self, start: &Start) {
        let _ = start;
    }

    /// A step was taken.
    fn step(&mut self, report: &StepReport<'_>) {
        let _ = report;
    }

    /// Reports an evaluation on the held-out batches.
    fn evaluated(&mut self, evaluation: &Evaluation) {
        let _ = evaluation;
    }

    /// The run is over, for now or for good.
    fn finished(&mut self, ending: Ending) {
        let _ = ending;
    }

    /// Returns whether the run should stop after this step.
    fn stop_requested(&self) -> bool {
        false
    }
}

/// The state of a run at its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// Steps taken already.
    pub step: u64,
    /// Steps in all.
    pub steps: u64,
    /// The number of trainable values.
    pub trainable: u64,
    /// Checkpoints that were passed over because they are not whole.
    pub torn: Vec<PathBuf>,
}

/// The report of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport<'a> {
    /// The step's measurements.
    pub record: &'a Record,
    /// Steps in all.
    pub steps: u64,
    /// The epoch of the step's last batch.
    pub epoch: u64,
}

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// Steps taken.
    pub step: u64,
    /// The mean loss over what is held out.
    pub loss: f64,
    /// True if it is the best so far.
    pub best: bool,
}

/// Discards all progress reports.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}

/// Plain lines, for logs. Lines that cannot be written are lost.
#[derive(Debug)]
pub struct Lines<W> {
    to: W,
    every: u64,
}

impl<W: Write> Lines<W> {
    /// A line for every so many steps.
    pub fn new(to: W, every: u64) -> Self {
        Self { to, every: every.max(1) }
    }
}

impl<W: Write> Progress for Lines<W> {
    fn started(&mut self, start: &Start) {
        for path in &start.torn {
            let _ = writeln!(self.to, "passed over {}: it is not whole", path.display());
        }
        let _ = match start.step {
            0 => writeln!(self.to, "{} steps, {} numbers to train", start.steps, start.trainable),
            step => writeln!(self.to, "going on after step {step} of {}", start.steps),
        };
    }

    fn step(&mut self, report: &StepReport<'_>) {
        let Record { step, loss, learning_rate, gradient_norm, tokens_per_second, .. } = report.record;
        if step.is_multiple_of(self.every) || *step == report.steps {
            let _ = writeln!(
                self.to,
                "step {step} of {}  loss {loss:.4}  rate {learning_rate:.2e}  norm {gradient_norm:.3}  \
                 {tokens_per_second:.0} tokens/s",
                report.steps,
            );
        }
    }

    fn evaluated(&mut self, evaluation: &Evaluation) {
        let Evaluation { step, loss, best } = evaluation;
        let mark = if *best { "  the best so far" } else { "" };
        let _ = writeln!(self.to, "step {step}  held out {loss:.4}{mark}");
    }

    fn finished(&mut self, ending: Ending) {
        let _ = match ending {
            Ending::Completed => writeln!(self.to, "completed"),
            Ending::NoBetter => writeln!(self.to, "ended early: it was getting no better"),
            Ending::Stopped => writeln!(self.to, "stopped; resume it to go on"),
        };
    }
}
