//! Burn's training dashboard.

use std::io::{self, IsTerminal};
use std::sync::Arc;

use burn::train::Interrupter;
use burn::train::logger::TrainingProgressLogger;
use burn::train::metric::{
    MetricAttributes, MetricDefinition, MetricEntry, MetricId, NumericAttributes, NumericEntry,
    SerializedEntry,
};
use burn::train::renderer::tui::TuiMetricsRendererWrapper;
use burn::train::renderer::{MetricState, MetricsRenderer, MetricsRendererTraining};

use crate::progress::{Evaluation, Progress, Start, StepReport};
use crate::trainer::Ending;

const LOSS: &str = "Loss";
const RATE: &str = "Learning rate";
const NORM: &str = "Gradient norm";
const SPEED: &str = "Tokens per second";

/// Burn's own dashboard, full screen. It draws on a thread of its own.
///
/// `q` asks what to do: to stop ends the run after the step, with a checkpoint. To kill makes Burn panic on the thread
/// that trains; the run can be resumed from its last checkpoint.
pub struct Dashboard {
    interrupter: Interrupter,
    screen: Option<TuiMetricsRendererWrapper>,
}

impl Dashboard {
    /// The dashboard, if standard output is a terminal.
    pub fn new() -> Option<Self> {
        io::stdout().is_terminal().then(|| Self { interrupter: Interrupter::new(), screen: None })
    }
}

impl Progress for Dashboard {
    fn started(&mut self, start: &Start) {
        let mut screen = TuiMetricsRendererWrapper::new(self.interrupter.clone(), None);
        for (name, unit, higher_is_better) in
            [(LOSS, None, false), (RATE, None, false), (NORM, None, false), (SPEED, Some("tokens/s"), true)]
        {
            screen.register_metric(MetricDefinition {
                metric_id: id(name),
                name: Arc::new(name.to_owned()),
                description: None,
                attributes: MetricAttributes::Numeric(NumericAttributes {
                    unit: unit.map(str::to_owned),
                    higher_is_better,
                }),
            });
        }
        // The whole run as one epoch of Burn's: its bars and estimates count epochs, and a run counts steps.
        screen.start(1, 1, Some(start.steps as usize), Some("training"));
        screen.start_split("train", start.steps as usize);
        screen.update_split(start.step as usize);
        for path in &start.torn {
            screen.log_event_training(format!("passed over {}", path.display()));
        }
        self.screen = Some(screen);
    }

    fn step(&mut self, report: &StepReport<'_>) {
        let Some(screen) = &mut self.screen else { return };
        let record = report.record;
        for (name, value) in [
            (LOSS, record.loss),
            (RATE, record.learning_rate),
            (NORM, record.gradient_norm),
            (SPEED, record.tokens_per_second),
        ] {
            screen.update_train(numeric(name, value));
        }
        screen.update_split(record.step as usize);
    }

    fn evaluated(&mut self, evaluation: &Evaluation) {
        if let Some(screen) = &mut self.screen {
            screen.update_valid(numeric(LOSS, evaluation.loss));
        }
    }

    fn finished(&mut self, _: Ending) {
        // Gives the terminal back.
        self.screen = None;
    }

    fn stop_requested(&self) -> bool {
        self.interrupter.should_stop()
    }
}

fn id(name: &str) -> MetricId {
    MetricId::new(Arc::new(name.to_owned()))
}

fn numeric(name: &str, value: f64) -> MetricState {
    let entry = NumericEntry::Value(value);
    let text = SerializedEntry::new(format!("{value:.4e}"), entry.serialize());
    MetricState::Numeric(MetricEntry::new(id(name), text), Some(entry))
}

impl std::fmt::Debug for Dashboard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dashboard").field("open", &self.screen.is_some()).finish()
    }
}
