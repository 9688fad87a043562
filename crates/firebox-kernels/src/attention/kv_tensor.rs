//! Keys or values as they are stored: floats, or bytes with scales.

use std::ops::Range;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType};
use burn::tensor::{DType, Device, Int, Tensor};

/// Bytes of a word.
const WORD: usize = 4;

/// Keys or values of consecutive positions. Heads and positions may have any stride, so a slice of a larger
/// buffer is read in place.
#[derive(Debug, Clone)]
pub enum KvTensor {
    /// f32 or f16, `[kv_heads, positions, head_dim]`.
    Float(Tensor<3>),
    /// Signed bytes with one scale for each head and position.
    Bytes {
        /// Four bytes in each 32-bit word, the first in the lowest bits, `[kv_heads, positions, words]`.
        /// Bytes beyond `head_dim` are zero.
        words: Tensor<3, Int>,
        /// f32, `[kv_heads, positions]`.
        scales: Tensor<2>,
    },
}

impl KvTensor {
    /// Allocates zeros for `count` pairs of keys and values, `[kv_heads, positions, head_dim]` each, in one memory, so that a kernel reads
    /// all of them from one buffer. Such tensors are written by [`overwrite_both`](Self::overwrite_both); other writes copy them.
    ///
    /// Returns `None` on the CPU, and if the device cannot bind a buffer from each of them on.
    pub fn pairs(shape: [usize; 3], count: usize, device: &Device, dtype: DType) -> Option<Vec<[Self; 2]>> {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        {
            let pairs = super::cube::view::pairs(shape, count, device, dtype)?;
            Some(pairs.into_iter().map(|pair| pair.map(Self::Float)).collect())
        }
        #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
        {
            let _ = (shape, count, device, dtype);
            None
        }
    }

    /// Returns a slice of the positions, without a copy.
    pub fn part(&self, positions: Range<usize>) -> Self {
        let (start, count) = (positions.start, positions.len());
        if start == 0 && count == self.positions() {
            return self.clone();
        }
        match self {
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            Self::Float(values) if let Some(view) = super::cube::view::view(values, start, count) => {
                Self::Float(view)
            }
            Self::Float(values) => Self::Float(values.clone().narrow(1, start, count)),
            Self::Bytes { words, scales } => Self::Bytes {
                words: words.clone().narrow(1, start, count),
                scales: scales.clone().narrow(1, start, count),
            },
        }
    }

    /// Returns the number of key heads.
    pub fn kv_heads(&self) -> usize {
        match self {
            Self::Float(values) => values.dims()[0],
            Self::Bytes { words, .. } => words.dims()[0],
        }
    }

    /// Returns the number of stored positions.
    pub fn positions(&self) -> usize {
        match self {
            Self::Float(values) => values.dims()[1],
            Self::Bytes { words, .. } => words.dims()[1],
        }
    }

    /// Returns the number of heads and positions. Panics unless queries of this shape can attend to them.
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

    pub(super) fn primitive(&self) -> KvPrimitive<Dispatch> {
        match self.clone() {
            Self::Float(values) => KvPrimitive::Float(values.into_dispatch()),
            Self::Bytes { words, scales } => {
                KvPrimitive::Bytes { words: words.into_dispatch(), scales: scales.into_dispatch() }
            }
        }
    }
}

/// The backend primitives of a [`KvTensor`].
#[derive(ExtensionType)]
pub(crate) enum KvPrimitive<B: Backend> {
    Float(FloatTensor<B>),
    Bytes { words: IntTensor<B>, scales: FloatTensor<B> },
}
