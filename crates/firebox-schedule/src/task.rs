use std::time::Duration;

use firebox_memory::Priority;
use serde::{Deserialize, Serialize};

/// One model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct LaneId(pub(crate) u32);

/// One session's request on a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct TaskId(pub(crate) u64);

/// What is asked of the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Task {
    /// How much it matters.
    pub priority: Priority,
    /// Tokens a second that it should come at. Interactive and pinned tasks have one anyway, see
    /// [`ScheduleConfig::target`](super::ScheduleConfig::target); others take what is left.
    pub pace: Option<f64>,
    /// How long after it was added its first token should be there.
    pub first_by: Option<Duration>,
}

impl Task {
    /// With the pace that is usual for it.
    pub fn new(priority: Priority) -> Self {
        Self { priority, ..Self::default() }
    }
}

/// What a lane could do with the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// Run its next layer.
    Ready,
    /// Wait for its next layer, which is not in memory.
    Waiting,
    /// Nothing.
    Idle,
}

/// Who has the machine next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// A lane runs.
    Run {
        /// Which.
        lane: LaneId,
        /// When its quantum ends. It runs on until somebody [`preempts`](super::Scheduler::preempts) it.
        until: Duration,
    },
    /// Nothing is ready.
    Wait {
        /// When a deadline passes for which a layer is not in memory; absent where none does.
        until: Option<Duration>,
    },
}
