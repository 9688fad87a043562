//! Tasks, and the choices of a scheduler.

use std::time::Duration;

use firebox_memory::Priority;
use serde::{Deserialize, Serialize};

/// A model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ModelId(pub(crate) u32);

/// A request to a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct TaskId(pub(crate) u64);

/// The demands of a task.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Task {
    /// The priority.
    pub priority: Priority,
    /// Tokens per second. Interactive and pinned tasks have a default, see
    /// [`ScheduleConfig::target`](super::ScheduleConfig::target); others take what is left.
    pub pace: Option<f64>,
    /// The deadline of the first token after the task was added.
    pub first_by: Option<Duration>,
}

impl Task {
    /// Creates a task with the default pace of its priority.
    pub fn new(priority: Priority) -> Self {
        Self { priority, ..Self::default() }
    }
}

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
