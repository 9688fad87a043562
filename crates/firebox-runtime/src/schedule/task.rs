use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct LaneId(pub(super) u32);

/// One session's request on a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct TaskId(pub(super) u64);

/// Whose deadline counts more. Among equals the earlier deadline does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// When there is nothing else to do; nobody waits for it.
    Background,
    /// Somebody waits for all of it.
    #[default]
    Normal,
    /// Somebody reads along.
    Interactive,
    /// Has to answer, whatever else goes on, and is never demoted.
    Pinned,
}

impl Priority {
    /// All of them, the least urgent first.
    pub const ALL: [Self; 4] = [Self::Background, Self::Normal, Self::Interactive, Self::Pinned];

    /// The next more urgent one, short of pinned: who waits does not become pinned by it.
    pub(super) fn raised(self, steps: u32) -> Self {
        let most = self.max(Self::Interactive);
        Self::ALL[(self as usize).saturating_add(steps as usize).min(most as usize)]
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Background => "background",
            Self::Normal => "normal",
            Self::Interactive => "interactive",
            Self::Pinned => "pinned",
        })
    }
}

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
