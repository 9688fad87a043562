//! Errors of schedules and their simulation.

use firebox_memory::{MemoryError, Priority};
use firebox_store::StoreError;

/// Why a request was refused, or a schedule or simulation could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum ScheduleError {
    /// Memory could not be charged or planned.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A history of models could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// As many tasks wait as may.
    #[error(
        "{limit} {priority} requests wait already; try again when some are done, or let more of them wait: `--queue` of \
         `firebox serve`, most_waiting of an engine"
    )]
    QueueFull {
        /// How urgent the task was that was refused.
        priority: Priority,
        /// How many may wait.
        limit: usize,
    },
    /// The profile of a device cannot be simulated.
    #[error("device profile {name}: {reason}")]
    SimulatedDevice {
        /// The file, or the name of one of Firebox's own.
        name: String,
        /// What is wrong with it, and what would help.
        reason: String,
    },
    /// A setting makes no sense.
    #[error("{setting} = {value}: {reason}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// What it was set to.
        value: String,
        /// Why that cannot be.
        reason: &'static str,
    },
}
