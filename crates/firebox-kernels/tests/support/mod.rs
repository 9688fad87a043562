//! Random tensors and comparisons.

#![allow(dead_code, clippy::unwrap_used)]

use burn::tensor::{Device, Tensor, TensorData};

/// Numbers between -1 and 1 that repeat for a seed.
pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

pub fn random<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<D> {
    Tensor::from_data(TensorData::new(numbers(shape.iter().product(), seed), shape), &Device::flex())
}

pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec::<f32>().unwrap()
}

pub fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    values(tensor).into_iter().map(f32::to_bits).collect()
}

pub fn assert_close<const D: usize>(found: Tensor<D>, expected: Tensor<D>, tolerance: f32) {
    assert_eq!(found.dims(), expected.dims());
    for (index, (found, expected)) in values(found).into_iter().zip(values(expected)).enumerate() {
        assert!((found - expected).abs() <= tolerance, "element {index}: {found} instead of {expected}");
    }
}
