use std::ops::Range;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType};
use burn::tensor::{DType, Int, Tensor};

use super::{AttendOps, flex, reference};
use crate::flex::{Dispatched, has_own, is_flex};

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

    /// Some of the positions, where they lie.
    pub fn part(&self, positions: Range<usize>) -> Self {
        let (start, count) = (positions.start, positions.len());
        if start == 0 && count == self.positions() {
            return self.clone();
        }
        match self {
            Self::Float(values) => Self::Float(values.clone().narrow(1, start, count)),
            Self::Bytes { words, scales } => Self::Bytes {
                words: words.clone().narrow(1, start, count),
                scales: scales.clone().narrow(1, start, count),
            },
        }
    }

    /// Writes over the positions from `at` on: in place, where nobody else holds the numbers. Floats become what is stored.
    ///
    /// # Panics
    /// If one are floats and the other bytes, or shapes contradict each other.
    pub fn assign(&mut self, at: usize, added: Self) {
        match (self, added) {
            (Self::Float(values), Self::Float(added)) => {
                if added.dtype() == DType::F32 && is_flex(&values.device()) && is_flex(&added.device()) {
                    return values.inplace(|values| flex::assign(values, at, added));
                }
                let ([heads, count, width], added) = (added.dims(), added.cast(values.dtype()));
                values.inplace(|values| values.slice_assign([0..heads, at..at + count, 0..width], added));
            }
            (Self::Bytes { words, scales }, Self::Bytes { words: added_words, scales: added_scales }) => {
                let [heads, count, width] = added_words.dims();
                words.inplace(|words| words.slice_assign([0..heads, at..at + count, 0..width], added_words));
                scales.inplace(|scales| scales.slice_assign([0..heads, at..at + count], added_scales));
            }
            _ => panic!("floats and bytes do not mix"),
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

    /// How many heads and positions there are. Panics unless queries of this shape can attend to them.
    pub(super) fn check(&self, heads: usize, head_dim: usize) -> [usize; 2] {
        let ([kv_heads, positions, width], expected) = match self {
            Self::Float(values) => (values.dims(), head_dim),
            Self::Bytes { words, .. } => (words.dims(), head_dim.div_ceil(WORD)),
        };
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} query heads over {kv_heads}");
        assert_eq!(width, expected, "the width of what is stored for heads of {head_dim}");
        if let Self::Bytes { scales, .. } = self {
            assert_eq!(scales.dims(), [kv_heads, positions], "scales of stored words");
        }
        [kv_heads, positions]
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
