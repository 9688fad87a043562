//! What a scheduler is told of a model, and what it answers.

use std::time::Duration;

use super::ModelId;

/// What a model can do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// Run its next layer.
    Ready,
    /// Wait for its next layer, which is not in memory.
    Waiting,
    /// Nothing.
    Idle,
}

/// The choice of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// A model runs.
    Run {
        /// The model.
        model: ModelId,
        /// The end of its quantum.
        until: Duration,
    },
    /// Nothing is ready.
    Wait {
        /// The next deadline of a model whose layer is not in memory, if any.
        until: Option<Duration>,
    },
}
