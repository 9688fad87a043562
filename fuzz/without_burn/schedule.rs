//! The schedule as `firebox-runtime` has it, and the stage that its tests have.

#![allow(dead_code, unused_imports)] // Some of it is only used by what is not here.

#[path = "../../crates/firebox-runtime/src/schedule/admission.rs"]
mod admission;
#[path = "../../crates/firebox-runtime/src/schedule/config.rs"]
mod config;
#[path = "../../crates/firebox-runtime/src/schedule/counters.rs"]
mod counters;
#[path = "../../crates/firebox-runtime/src/schedule/happenings.rs"]
pub mod happenings;
#[path = "../../crates/firebox-runtime/src/schedule/lane.rs"]
mod lane;
#[path = "../../crates/firebox-runtime/src/schedule/monitor.rs"]
mod monitor;
#[path = "../../crates/firebox-runtime/src/schedule/scheduler.rs"]
mod scheduler;
#[path = "../../crates/firebox-runtime/src/schedule/stage.rs"]
mod stage;
#[path = "../../crates/firebox-runtime/src/schedule/task.rs"]
mod task;
#[path = "../../crates/firebox-runtime/src/schedule/track.rs"]
mod track;

pub use admission::{AdmissionConfig, Change, Place, Queue, Ticket};
pub use config::ScheduleConfig;
pub use counters::{ClassCounters, ScheduleCounters, ScheduleEvent};
pub use scheduler::Scheduler;
pub use task::{Choice, LaneId, Priority, Readiness, Task, TaskId};
