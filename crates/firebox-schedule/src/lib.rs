//! Which model runs next, who may run at once, and who waits where.
//!
//! A *lane* is a model, a *task* a request on it; all tasks of a lane go through its layers together. The [`Scheduler`]
//! is asked which lane has the machine, is told after every layer what it took, and knows no clock and no tensors. Its
//! rules, the first that decides:
//!
//! 1. A lane keeps the machine for a quantum.
//! 2. A tenth of the quanta goes to lanes in the order of their waiting, so that nobody starves. A guaranteed share and no
//!    ageing of priorities: it is bounded, so that what it costs the most urgent is known in advance and they can be that
//!    much ahead.
//! 3. Deadlines that come near: the higher priority first, the earlier deadline among equals.
//! 4. Tasks without a pace take what is left, and so do laggards: who is late by more than the slippage loses its
//!    priority, and whoever would take the most of the machine loses it first.
//! 5. What is ahead of its pace runs when nobody else does. The machine is never idle while something is ready.
//!
//! The [`Queue`] says how many tasks of a lane run at once. [`NextModel`] learns which model usually follows which.
//! [`simulation`] runs all of this, with the real governor, through a day on a device that is not there.

mod admission;
mod config;
mod counters;
mod error;
mod lane;
mod monitor;
mod next_model;
mod scheduler;
pub mod simulation;
mod succession;
mod task;
mod track;

pub use admission::{AdmissionConfig, Change, Place, Queue, Ticket};
pub use config::ScheduleConfig;
pub use counters::{ClassCounters, ScheduleCounters, ScheduleEvent};
pub use error::ScheduleError;
pub use firebox_memory::Priority;
pub use next_model::NextModel;
pub use scheduler::Scheduler;
pub use succession::Succession;
pub use task::{Choice, LaneId, Readiness, Task, TaskId};

#[cfg(any(test, feature = "fuzzing"))]
mod happenings;
#[cfg(test)]
mod properties;
#[cfg(any(test, feature = "fuzzing"))]
mod stage;
#[cfg(test)]
mod tests;

/// Runs a scheduler through the events that `bytes` encode, and panics where one of its rules is violated.
#[cfg(feature = "fuzzing")]
pub fn check_events(bytes: &[u8]) {
    happenings::wrong_nobody(happenings::Happening::of_bytes(bytes));
}
