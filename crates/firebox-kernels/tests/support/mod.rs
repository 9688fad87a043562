//! Random tensors and comparisons.

#![allow(dead_code, clippy::unwrap_used)]

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use firebox_kernels::Grouping;
use firebox_kernels::linear::NIBBLE_CHUNK;

/// The devices of this build on which operations are not those of Burn alone, which promise less.
pub fn devices_with_own() -> Vec<Device> {
    vec![
        Device::flex(),
        #[cfg(feature = "wgpu")]
        Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
    ]
}

/// The devices of this build.
#[allow(deprecated)] // ndarray is kept as the third opinion in tests of backends.
pub fn devices() -> Vec<Device> {
    vec![
        Device::flex(),
        #[cfg(feature = "ndarray")]
        Device::ndarray(),
        #[cfg(feature = "wgpu")]
        Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
    ]
}

/// Random packed integers and scales of a layout.
pub fn grouped(outputs: usize, grouping: Grouping, seed: u64) -> (Tensor<2, Int>, Tensor<2>) {
    let row_bytes = if grouping.four_bits {
        grouping.inputs.div_ceil(NIBBLE_CHUNK) * NIBBLE_CHUNK / 2
    } else {
        grouping.inputs.next_multiple_of(4)
    };
    let words = row_bytes / 4;
    let bits: Vec<i32> = numbers(outputs * words, seed)
        .iter()
        .map(|x| (x.to_bits() as i32).wrapping_mul(0x2C1B_3C6D))
        .collect();
    let device = Device::flex();
    let words = Tensor::from_data(TensorData::new(bits, [outputs, words]), (&device, DType::I32));
    let groups = grouping.inputs.div_ceil(grouping.group);
    (words, random([outputs, groups], seed + 1).cast(DType::F16))
}

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
