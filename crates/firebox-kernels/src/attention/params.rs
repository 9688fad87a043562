//! Masking and scaling of attention scores.

use std::ops::Range;

/// Positions that are processed as one block, counted from the start of a span.
///
/// On the CPU the last bits of a result depend on where blocks begin. A caller that passes only the end of a
/// cache starts it at a multiple of `BLOCK` to get the bits of the whole cache.
pub const BLOCK: usize = 256;

/// Largest head dimension that the accelerator kernels support.
pub(super) const MAX_HEAD_DIM: usize = 512;

/// Causal mask, window and scaling of the scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionParams {
    /// Position of the first row; the other rows follow.
    pub position: usize,
    /// Number of positions that a row sees, its own included. `None` means all.
    pub window: Option<usize>,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Applies `cap * tanh(score / cap)` to the scores.
    pub softcap: Option<f32>,
}

impl AttentionParams {
    /// Returns the range of keys that `row` sees, as indices into `positions` keys that start at `position`.
    pub(crate) fn visible(&self, row: usize, position: usize, positions: usize) -> Range<usize> {
        let end = self.position + row + 1;
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        let index = |at: usize| at.saturating_sub(position).min(positions);
        index(start)..index(end)
    }
}
