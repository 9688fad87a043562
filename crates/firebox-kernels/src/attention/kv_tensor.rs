use std::ops::Range;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType};
use burn::tensor::{DType, Int, Tensor};

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::cube;
use super::{AttentionOps, flex, reference};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use crate::cube::is_cube;
use crate::flex::{DispatchBackend, has_native_ops, is_flex};

/// Bytes in a word.
const WORD: usize = 4;

/// Keys or values of consecutive positions. Strides between heads and between positions are free: a part of a
/// larger buffer is read where it lies.
#[derive(Debug, Clone)]
pub enum KvTensor {
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

impl KvTensor {
    /// The numbers `[kv_heads, positions, head_dim]` rounded to bytes: the largest magnitude of every head and
    /// position becomes 127.
    pub fn quantize(values: Tensor<3>) -> Self {
        let values = values.cast(DType::F32);
        if !has_native_ops(&values.device()) || values.shape().num_elements() == 0 {
            return reference::quantize(values);
        }
        let (words, scales) = <DispatchBackend as AttentionOps>::quantize(values.into_dispatch());
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
    /// If one are floats and the other bytes, or shapes contradict each other. What is stored is what it was then.
    pub fn assign(&mut self, at: usize, added: Self) {
        // Only before `inplace`: a panic within it leaves nothing of what others may read.
        self.check_added(at, &added);
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
            _ => unreachable!("they have been checked"),
        }
    }

    /// The same for the keys and the values of the same positions. On accelerators both are written at once, where both are
    /// floats.
    ///
    /// # Panics
    /// Likewise.
    pub fn assign_both(sides: [&mut Self; 2], at: usize, added: [Self; 2]) {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        if let ([Self::Float(keys), Self::Float(values)], [Self::Float(new_keys), Self::Float(new_values)]) =
            (&sides, &added)
            && is_cube(&keys.device())
            && [values, new_keys, new_values].iter().all(|side| side.device() == keys.device())
            && (keys.dims(), keys.dtype()) == (values.dims(), values.dtype())
            && new_keys.dims() == new_values.dims()
        {
            return Self::assign_at_once(sides, at, added);
        }
        for (side, added) in sides.into_iter().zip(added) {
            side.assign(at, added);
        }
    }

    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    fn assign_at_once([keys, values]: [&mut Self; 2], at: usize, [new_keys, new_values]: [Self; 2]) {
        keys.check_added(at, &new_keys);
        values.check_added(at, &new_values);
        let (Self::Float(keys), Self::Float(values)) = (keys, values) else {
            unreachable!("they have been checked")
        };
        let (Self::Float(new_keys), Self::Float(new_values)) = (new_keys, new_values) else {
            unreachable!("they have been checked")
        };
        keys.inplace(|keys| {
            let mut kept = None;
            values.inplace(|values| {
                let [keys, values] = cube::assign_both([keys, values], at, [new_keys, new_values]);
                kept = Some(keys);
                values
            });
            kept.unwrap_or_else(|| unreachable!("it has been assigned"))
        });
    }

    /// Panics unless all of `added` can be written over the positions from `at` on.
    fn check_added(&self, at: usize, added: &Self) {
        let (stored, added) = match (self, added) {
            (Self::Float(values), Self::Float(added)) => {
                let dtype = values.dtype();
                assert!(
                    matches!(dtype, DType::F32 | DType::F16),
                    "keys and values are f32, f16 or bytes, not {dtype:?}"
                );
                (values.dims(), added.dims())
            }
            (Self::Bytes { words, scales }, Self::Bytes { words: added_words, scales: added_scales }) => {
                assert_eq!(
                    (words.dtype(), scales.dtype()),
                    (added_words.dtype(), added_scales.dtype()),
                    "words and scales over others"
                );
                let (stored, added) = (words.dims(), added_words.dims());
                assert_eq!(
                    (scales.dims(), added_scales.dims()),
                    ([stored[0], stored[1]], [added[0], added[1]]),
                    "scales of words"
                );
                (stored, added)
            }
            _ => panic!("floats and bytes do not mix"),
        };
        let ([heads, positions, width], [added_heads, count, added_width]) = (stored, added);
        assert!(
            (heads, width) == (added_heads, added_width) && at + count <= positions,
            "{added_heads} heads of {added_width} over {heads} of {width}, {count} of {positions} positions from {at} on"
        );
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

    pub(super) fn primitive(&self) -> KvPrimitive<Dispatch> {
        match self.clone() {
            Self::Float(values) => KvPrimitive::Float(values.into_dispatch()),
            Self::Bytes { words, scales } => {
                KvPrimitive::Bytes { words: words.into_dispatch(), scales: scales.into_dispatch() }
            }
        }
    }
}

/// [`KvTensor`] as a backend sees it.
#[derive(ExtensionType)]
pub(crate) enum KvPrimitive<B: Backend> {
    Float(FloatTensor<B>),
    Bytes { words: IntTensor<B>, scales: FloatTensor<B> },
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::tensor::{Device, TensorData};

    use super::*;

    fn ramp(shape: [usize; 3]) -> Tensor<3> {
        let count: usize = shape.iter().product();
        let numbers: Vec<f32> = (0..count).map(|at| at as f32 - 7.0).collect();
        Tensor::from_data(TensorData::new(numbers, shape), &Device::flex())
    }

    #[test]
    fn what_does_not_fit_leaves_what_is_stored() {
        let half = |values: Tensor<3>| KvTensor::Float(values.cast(DType::F16));
        let before =
            [KvTensor::Float(ramp([2, 6, 8])), half(ramp([2, 6, 8])), KvTensor::quantize(ramp([2, 6, 8]))];
        let shapes = [(4, [2, 3, 8]), (0, [3, 1, 8]), (0, [1, 1, 8]), (0, [2, 1, 12]), (0, [2, 1, 4])];
        for before in before {
            let numbers = |stored: &KvTensor| stored.dequantize(8).try_into_vec_as::<f32>().unwrap();
            let mut stored = before.clone();
            for (at, shape) in shapes {
                for added in
                    [KvTensor::Float(ramp(shape)), half(ramp(shape)), KvTensor::quantize(ramp(shape))]
                {
                    let refused = catch_unwind(AssertUnwindSafe(|| stored.assign(at, added)));
                    assert!(refused.is_err(), "{shape:?} from {at} on");
                    assert_eq!(numbers(&stored), numbers(&before));
                }
            }
        }
    }
}
