//! The demands of one request: its priority, pace and deadline.

use std::time::Duration;

use firebox_memory::Priority;
use serde::{Deserialize, Serialize};

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
