use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType};
use burn::tensor::{DType, Int, Tensor};

use super::{AttendOps, reference};
use crate::flex::{Dispatched, has_own};

/// Bytes in a word.
const WORD: usize = 4;

/// Keys or values of consecutive positions. Strides between heads and between positions are free: a part of a
/// larger buffer is read where it lies.
#[derive(Debug, Clone)]
pub enum Stored {
    /// f32 or f16, `[kv_heads, positions, head_dim]`.
    Float(Tensor<3>),
    /// Signed bytes, each standing for itself times the scale of its head and position.
    Bytes {
        /// Four bytes to a 32-bit word, the first in the lowest bits, `[kv_heads, positions, words]`; bytes beyond
        /// the width of a head are zero.
        words: Tensor<3, Int>,
        /// f32, `[kv_heads, positions]`.
        scales: Tensor<2>,
    },
}

impl Stored {
    /// The numbers `[kv_heads, positions, head_dim]` rounded to bytes: the largest magnitude of every head and
    /// position becomes 127.
    pub fn quantize(values: Tensor<3>) -> Self {
        let values = values.cast(DType::F32);
        if !has_own(&values.device()) || values.shape().num_elements() == 0 {
            return reference::quantize(values);
        }
        let (words, scales) = <Dispatched as AttendOps>::quantize(values.into_dispatch());
        Self::Bytes { words: Tensor::from_dispatch(words), scales: Tensor::from_dispatch(scales) }
    }

    /// The stored numbers, `[kv_heads, positions, head_dim]` in f32.
    pub fn dequantize(&self, head_dim: usize) -> Tensor<3> {
        match self {
            Self::Float(values) => values.clone().cast(DType::F32),
            Self::Bytes { words, scales } => reference::dequantize(words.clone(), scales.clone(), head_dim),
        }
    }

    /// How many heads of keys or values there are.
    pub fn kv_heads(&self) -> usize {
        match self {
            Self::Float(values) => values.dims()[0],
            Self::Bytes { words, .. } => words.dims()[0],
        }
    }

    /// How many positions are stored.
    pub fn positions(&self) -> usize {
        match self {
            Self::Float(values) => values.dims()[1],
            Self::Bytes { words, .. } => words.dims()[1],
        }
    }

    /// Panics unless queries of this shape can attend to it.
    pub(super) fn check(&self, heads: usize, positions: usize, head_dim: usize) {
        let kv_heads = self.kv_heads();
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} query heads over {kv_heads}");
        match self {
            Self::Float(values) => {
                assert_eq!(values.dims(), [kv_heads, positions, head_dim], "stored numbers");
            }
            Self::Bytes { words, scales } => {
                assert_eq!(words.dims(), [kv_heads, positions, head_dim.div_ceil(WORD)], "stored words");
                assert_eq!(scales.dims(), [kv_heads, positions], "scales of stored words");
            }
        }
    }

    pub(super) fn held(&self) -> Held<Dispatch> {
        match self.clone() {
            Self::Float(values) => Held::Float(values.into_dispatch()),
            Self::Bytes { words, scales } => {
                Held::Bytes { words: words.into_dispatch(), scales: scales.into_dispatch() }
            }
        }
    }
}

/// [`Stored`] as a backend sees it.
#[derive(ExtensionType)]
pub(crate) enum Held<B: Backend> {
    Float(FloatTensor<B>),
    Bytes { words: IntTensor<B>, scales: FloatTensor<B> },
}
