//! Attention of some rows of one sequence over its cached positions.

mod flex;
pub mod reference;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::Tensor;

use crate::flex::{Dispatched, is_flex};

/// What a row sees, and how scores are made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attending {
    /// The position of the first row; the others follow it.
    pub position: usize,
    /// The position of the first cached key.
    pub first: usize,
    /// How many positions a row sees, its own included; absent means all.
    pub window: Option<usize>,
    /// Multiplies queries times keys.
    pub scale: f32,
    /// `cap * tanh(score / cap)` on the scores.
    pub softcap: Option<f32>,
}

impl Attending {
    /// The cached keys that the row sees, as indices from the first.
    pub(crate) fn visible(&self, row: usize) -> std::ops::Range<usize> {
        let own = self.position + row;
        let from = match self.window {
            Some(window) => (own + 1).saturating_sub(window),
            None => 0,
        };
        from.saturating_sub(self.first)..own + 1 - self.first
    }
}

/// From queries `[rows, heads, head_dim]`, keys and values `[kv_heads, positions, head_dim]`, what the rows
/// gather, `[rows, heads * head_dim]`. Query heads share key heads in consecutive runs.
///
/// On the CPU a row's result does not depend on the rows beside it or on the number of threads.
pub fn attend(query: Tensor<3>, keys: Tensor<3>, values: Tensor<3>, attending: Attending) -> Tensor<2> {
    if !is_flex(&query.device()) {
        return reference::attend(query, keys, values, attending);
    }
    Tensor::from_dispatch(<Dispatched as AttendOps>::attend(
        query.into_dispatch(),
        keys.into_dispatch(),
        values.into_dispatch(),
        attending,
    ))
}

#[backend_extension(Flex)]
pub(crate) trait AttendOps: Backend {
    fn attend(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        attending: Attending,
    ) -> FloatTensor<Self>;
}
