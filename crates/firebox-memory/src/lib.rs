//! Memory of a process and what it is used for, without any tensor.
//!
//! A [`Budget`] bounds what all models of a process take together. The [`planner`] decides what part of a model stays in
//! memory; a [`Governor`](governor::Governor) corrects that while the model runs, by the memory [`pressure`] that the system
//! reports and by what every step costs. [`thermal`] reads the temperature of the machine.

mod account;
mod budget;
mod bytes;
#[cfg(target_os = "linux")]
mod code;
mod error;
pub mod governor;
mod page_faults;
pub mod planner;
pub mod pressure;
mod priority;
pub mod process;
mod size;
pub mod thermal;

pub use account::Account;
pub use budget::{Budget, Charge};
pub use bytes::human_bytes;
pub use error::MemoryError;
pub use page_faults::{MajorPageFaults, PageFaults};
pub use priority::Priority;
pub use size::parse_bytes;
