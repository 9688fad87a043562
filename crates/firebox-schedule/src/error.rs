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
    /// Too many tasks wait.
    #[error(
        "{limit} {priority} requests wait already; try again when some are done, or let more of them wait: `--queue` of \
         `firebox serve`, most_waiting of an engine"
    )]
    QueueFull {
        /// The priority of the refused task.
        priority: Priority,
        /// The limit.
        limit: usize,
    },
    /// Too many tasks of a client wait.
    #[error(
        "{limit} requests of this key wait already; try again when some are done, or let more of them wait: \
         `--per-key-waiting` of `firebox serve`, `waiting` of the key in firebox.toml"
    )]
    ClientQueueFull {
        /// The limit.
        limit: usize,
    },
    /// The profile of a device cannot be simulated.
    #[error("device profile {name}: {reason}")]
    SimulatedDevice {
        /// The file, or the name of a built-in profile.
        name: String,
        /// What is wrong with the profile.
        reason: String,
    },
    /// A setting is invalid.
    #[error("{setting} = {value}: {reason}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        reason: &'static str,
    },
}
