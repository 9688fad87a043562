//! Writes to stored keys and values.

use burn::tensor::DType;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::cube;
use super::flex;
use super::kv_tensor::KvTensor;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use crate::cube::is_cube;
use crate::flex::is_flex;

impl KvTensor {
    /// Overwrites the positions from `at` on, in place if the tensor is not shared. Floats are cast to the
    /// stored dtype.
    ///
    /// # Panics
    /// If one tensor holds floats and the other bytes, or shapes contradict each other. The stored values are
    /// then unchanged.
    pub fn assign(&mut self, at: usize, added: Self) {
        // Checked before `inplace`, because a panic inside it would lose the tensor.
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

    /// [`assign`](Self::assign) for keys and values of the same positions. Accelerators write float keys and
    /// values in one launch.
    ///
    /// # Panics
    /// As [`assign`](Self::assign) does.
    pub fn assign_both(sides: [&mut Self; 2], at: usize, added: [Self; 2]) {
        Self::replace_both(sides, at, added, false);
    }

    /// [`assign_both`](Self::assign_both), but accelerators write floats in place even if the tensors are shared, for keys and values
    /// whose other views show other positions: those of a page, which shares its memory with other pages.
    ///
    /// # Panics
    /// As [`assign`](Self::assign) does.
    pub fn overwrite_both(sides: [&mut Self; 2], at: usize, added: [Self; 2]) {
        Self::replace_both(sides, at, added, true);
    }

    fn replace_both(sides: [&mut Self; 2], at: usize, added: [Self; 2], _in_place: bool) {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        if let ([Self::Float(keys), Self::Float(values)], [Self::Float(new_keys), Self::Float(new_values)]) =
            (&sides, &added)
            && is_cube(&keys.device())
            && [values, new_keys, new_values].iter().all(|side| side.device() == keys.device())
            && (keys.dims(), keys.dtype()) == (values.dims(), values.dtype())
            && new_keys.dims() == new_values.dims()
        {
            return Self::assign_at_once(sides, at, added, _in_place);
        }
        for (side, added) in sides.into_iter().zip(added) {
            side.assign(at, added);
        }
    }

    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    fn assign_at_once(
        [keys, values]: [&mut Self; 2],
        at: usize,
        [new_keys, new_values]: [Self; 2],
        in_place: bool,
    ) {
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
                let [keys, values] = cube::assign_both([keys, values], at, [new_keys, new_values], in_place);
                kept = Some(keys);
                values
            });
            kept.unwrap_or_else(|| unreachable!("it has been assigned"))
        });
    }

    /// Panics unless `added` fits over the positions from `at` on.
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
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::tensor::{Device, Tensor, TensorData};

    use super::*;

    fn ramp(shape: [usize; 3]) -> Tensor<3> {
        let count: usize = shape.iter().product();
        let numbers: Vec<f32> = (0..count).map(|at| at as f32 - 7.0).collect();
        Tensor::from_data(TensorData::new(numbers, shape), &Device::flex())
    }

    #[test]
    fn a_refused_assignment_changes_nothing() {
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
