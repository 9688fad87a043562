//! Heads that the sessions of a model switch between: loaded into memory when needed, and replaced by a fallback when they
//! cannot be used.

pub(crate) mod config;
mod event;
mod loader;
pub(crate) mod pool;
mod retry;
pub(crate) mod source;
mod state;

pub use config::{FALLBACK, HeadPoolConfig};
pub use event::{HeadEvent, HeadState};
/// Which head usually follows which.
pub use firebox_schedule::Succession as HeadHistory;
pub use pool::{HeadPool, HeadSwitch};
pub use source::{HeadSource, InstalledHeads, ReadyHead, Requantized};

pub use crate::session::{Likelihood, ROUTER, Router};
