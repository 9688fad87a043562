//! The input of a pass: tokens of one sequence.

use std::sync::Arc;

use crate::Head;
use crate::rows::Span;

/// Consecutive tokens of one sequence, on their way through the layers.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// How many tokens of the sequence have passed before.
    pub position: usize,
    /// How long the sequence is known to become, at least: position schemes that depend on the length of
    /// the sequence use it, so that a prompt means the same in one piece and in several.
    pub length: usize,
    /// What its last layers are; absent means the model's own.
    pub head: Option<&'a Arc<Head>>,
}

impl<'a> Input<'a> {
    /// Tokens for the model's own last layers.
    pub fn new(tokens: &'a [u32], position: usize, length: usize) -> Self {
        Self { tokens, position, length, head: None }
    }

    /// Returns the rows that the tokens become.
    pub(crate) fn span(&self) -> Span {
        Span { rows: self.tokens.len(), position: self.position, length: self.length }
    }
}
