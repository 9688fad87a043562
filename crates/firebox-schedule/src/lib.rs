//! Schedules requests to several models on one machine.
//!
//! Each model has a queue of *tasks*, its requests, which go through its layers together. The [`Scheduler`] chooses the model
//! that runs, is told the time of every layer, and needs neither a clock nor tensors. The first rule that applies decides:
//!
//! 1. A model keeps the machine for a quantum.
//! 2. A tenth of the quanta goes to models in the order of their waiting, so that none starves. This share is bounded, unlike
//!    ageing of priorities, so that its cost for the most urgent is known in advance and they can be ahead by as much.
//! 3. Near deadlines: the higher priority first, the earlier deadline among equals.
//! 4. Tasks without a pace take what is left, and so do demoted ones: a task that is late by more than the slippage loses its
//!    priority, and the model that would take most of the machine loses it first.
//! 5. Tasks that are ahead of their pace run when nothing else does. The machine is never idle while a model is ready.
//!
//! The [`Queue`] decides how many tasks of a model run at once. [`NextModel`] learns which model follows which.
//! [`simulation`] runs all of this, with the real governor, through a day on a simulated device.

mod admission;
mod choice;
mod client;
mod config;
mod counters;
mod error;
mod model_queue;
mod monitor;
mod next_model;
mod scheduler;
pub mod simulation;
mod succession;
mod task;
mod task_progress;

pub use admission::{AdmissionConfig, Change, Place, Queue, Ticket};
pub use choice::{Choice, Readiness};
pub use client::Client;
pub use config::ScheduleConfig;
pub use counters::{ClassCounters, ScheduleCounters, ScheduleEvent};
pub use error::ScheduleError;
pub use firebox_memory::Priority;
pub use model_queue::ModelId;
pub use next_model::NextModel;
pub use scheduler::Scheduler;
pub use succession::Succession;
pub use task::{Task, TaskId};

#[cfg(any(test, feature = "fuzzing"))]
mod actions;
#[cfg(any(test, feature = "fuzzing"))]
mod harness;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

/// Runs a scheduler through the events that `bytes` encode, and panics where one of its rules is violated.
#[cfg(feature = "fuzzing")]
pub fn check_events(bytes: &[u8]) {
    actions::check_invariants(actions::Action::decode(bytes));
}
