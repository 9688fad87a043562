//! Heads that a model's sequences change between: in memory when they are needed, and replaced where they cannot be.

mod changes;
mod classifying;
mod rack;
mod retry;
mod router;
mod source;
mod wearing;

pub use changes::Changes;
pub use classifying::Likelihood;
/// Which head usually follows which.
pub use firebox_schedule::Succession as HeadHistory;
pub use rack::{FALLBACK, HeadEvent, HeadRack, HeadState, RackConfig, Worn};
pub use router::{ROUTER, Router};
pub use source::{HeadSource, InstalledHeads, ReadyHead, Requantized};
pub(crate) use wearing::Fetched;

#[cfg(test)]
pub(crate) mod tests;
