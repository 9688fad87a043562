//! Prompts that several sessions begin with, computed once: [`PersistentPrefix`] keeps one in a file, and [`PrefixTree`]
//! finds what running sessions have in common.

mod blocks;
mod file;
mod tree;

pub use file::{Origin, PersistentPrefix, PrefixOptions};
pub use tree::{PrefixHit, PrefixLimits, PrefixStats, PrefixTree};
