//! The trait of observers, which are told what a decoder computes and when.

use std::fmt::Debug;
use std::time::Instant;

/// Looks on while a decoder computes. Everything is told by the thread that computes, when it is done.
pub trait Observer: Debug + Send + Sync {
    /// Whether it wants to know of layers. Asked once for every pass.
    fn follows(&self) -> bool;

    /// A layer of a pass of so many rows was run.
    fn layer(&self, layer: usize, rows: usize, began: Instant);

    /// So many rows were turned into logits.
    fn logits(&self, rows: usize, began: Instant);

    /// A whole pass was run.
    fn pass(&self, passed: Passed, began: Instant);

    /// What another head remembers of so many tokens was computed.
    fn replay(&self, tokens: usize, began: Instant);
}

/// What a pass consisted of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passed {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of all of them.
    pub rows: usize,
    /// How many of the rows were turned into logits.
    pub logits: usize,
}
