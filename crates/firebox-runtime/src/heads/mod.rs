//! Heads that a model's sequences change between: in memory when they are needed, and replaced where they cannot be.

mod classifying;
mod history;
mod rack;
mod retry;
mod source;

pub use classifying::Likelihood;
pub use history::HeadHistory;
pub use rack::{FALLBACK, HeadEvent, HeadRack, RackConfig, Worn};
pub use source::{HeadSource, InstalledHeads, ReadyHead, Requantized};

#[cfg(test)]
mod tests;
