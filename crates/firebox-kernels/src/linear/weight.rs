//! Weights in the forms that checkpoints store.

use burn::tensor::{Int, Tensor};

use super::blocks::BlockFormat;
use super::grouping::Grouping;

/// A weight of `[outputs, inputs]`.
#[derive(Debug, Clone)]
pub enum Weight {
    /// f32, f16 or bf16.
    Dense(Tensor<2>),
    /// Small integers with scales.
    Grouped {
        /// `[outputs, words]`
        words: Tensor<2, Int>,
        /// `[outputs, groups]`
        scales: Tensor<2>,
        /// Layout of words and scales.
        grouping: Grouping,
    },
    /// GGUF blocks.
    Blocks {
        /// `[outputs, bytes of a row]`, 8-bit unsigned integers.
        bytes: Tensor<2, Int>,
        /// Block format.
        format: BlockFormat,
    },
}
