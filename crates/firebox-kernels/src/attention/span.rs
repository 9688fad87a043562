//! Spans of cached keys and values, and the spans that the rows of a sequence attend to.

use super::kv_tensor::KvTensor;
use super::params::AttentionParams;
use super::visibility::Visibility;
use crate::step::StepCounter;

/// Keys and values of consecutive positions.
#[derive(Debug, Clone)]
pub struct Span {
    /// Keys.
    pub keys: KvTensor,
    /// Values.
    pub values: KvTensor,
    /// Position of the first key.
    pub position: usize,
    /// Mask of visible positions. `None` means that all are visible.
    pub visible: Option<Visibility>,
}

impl Span {
    /// Returns the number of positions.
    pub fn len(&self) -> usize {
        self.keys.positions()
    }

    /// Whether the span has no positions.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Panics unless queries of this shape can attend to the span.
    pub(super) fn check(&self, heads: usize, head_dim: usize) {
        let [keys, values] = [&self.keys, &self.values].map(|stored| stored.check(heads, head_dim));
        assert_eq!(keys, values, "keys and values differ in heads or positions");
    }
}

/// Consecutive query rows of one sequence in a batch, and the spans they attend to.
#[derive(Debug, Clone)]
pub struct AttentionSequence {
    /// Number of rows.
    pub rows: usize,
    /// The cached keys and values of the sequence.
    pub spans: Vec<Span>,
    /// Mask and scaling of the scores.
    pub params: AttentionParams,
    /// The counter of a recorded step, which adds to the position of the row and to the length of the span that holds it. The
    /// sequence has one row then, and no masks.
    pub steps: Option<StepCounter>,
}
