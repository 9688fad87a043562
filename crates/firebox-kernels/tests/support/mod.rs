//! Random tensors and comparisons.

#![allow(dead_code, clippy::unwrap_used)]

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use firebox_kernels::linear::BlockFormat;
use firebox_kernels::{Activation, Grouping};

pub const ACTIVATIONS: [Activation; 7] = [
    Activation::Silu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::GeluQuick,
    Activation::Relu,
    Activation::ReluSquared,
    Activation::Tanh,
];

/// Devices of this build with native operations, which promise less than Burn's.
pub fn devices_with_own() -> Vec<Device> {
    vec![
        Device::flex(),
        #[cfg(feature = "wgpu")]
        Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
    ]
}

/// Devices of this build.
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

/// Returns random packed integers and scales in a layout.
pub fn grouped(outputs: usize, grouping: Grouping, seed: u64) -> (Tensor<2, Int>, Tensor<2>) {
    let words = grouping.row_words();
    let bits: Vec<i32> = numbers(outputs * words, seed)
        .iter()
        .map(|x| (x.to_bits() as i32).wrapping_mul(0x2C1B_3C6D))
        .collect();
    let device = Device::flex();
    let words = Tensor::from_data(TensorData::new(bits, [outputs, words]), (&device, DType::I32));
    (words, random([outputs, grouping.groups()], seed + 1).cast(DType::F16))
}

/// Returns numbers between -1 and 1 that repeat for a seed.
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

/// Changes activations so that their 8-bit integers represent them exactly: their products with 4-bit weights
/// are then as exact as with wider integers.
pub fn in_eight_bits(mut numbers: Vec<f32>, inputs: usize) -> Vec<f32> {
    for chunk in numbers.chunks_mut(inputs).flat_map(|row| row.chunks_mut(32)) {
        let peak = chunk.iter().fold(0f32, |peak, number| peak.max(number.abs()));
        // The scale is a power of two and the largest integer 127, so no division rounds.
        let step = (peak / 127.0).log2().floor().exp2();
        for number in chunk.iter_mut() {
            *number = (*number / step).round_ties_even().clamp(-127.0, 127.0) * step;
        }
        chunk[0] = 127.0 * step;
    }
    numbers
}

/// Returns random activations that are exact at the integer width of the weights.
pub fn activations(rows: usize, inputs: usize, four_bits: bool, seed: u64) -> Tensor<2> {
    let exact = if four_bits { in_eight_bits } else { |numbers, _| numbers };
    let numbers = exact(numbers(rows * inputs, seed), inputs);
    Tensor::from_data(TensorData::new(numbers, [rows, inputs]), &Device::flex())
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
    assert_near(found, expected, 0.0, tolerance);
}

/// With a relative and an absolute tolerance.
pub fn assert_near<const D: usize>(found: Tensor<D>, expected: Tensor<D>, relative: f32, tolerance: f32) {
    assert_eq!(found.dims(), expected.dims());
    for (index, (found, expected)) in values(found).into_iter().zip(values(expected)).enumerate() {
        let tolerance = tolerance + relative * expected.abs();
        assert!((found - expected).abs() <= tolerance, "element {index}: {found} instead of {expected}");
    }
}

/// Returns random blocks, with small numbers in place of their f16 scales (at these offsets).
pub fn random_blocks(format: BlockFormat, count: usize) -> Vec<u8> {
    let scales_at: &[usize] = match format {
        BlockFormat::Q8_0
        | BlockFormat::Q4_0
        | BlockFormat::Q5_0
        | BlockFormat::IQ4NL
        | BlockFormat::IQ4XS => &[0],
        BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4K | BlockFormat::Q5K => &[0, 2],
        BlockFormat::Q6K => &[208],
        BlockFormat::Q3K => &[108],
        BlockFormat::Q2K => &[80, 82],
        BlockFormat::MXFP4 => &[],
    };
    let mut state = 0x1234_5678_9ABC_DEFFu64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes: Vec<u8> = (0..count * format.bytes()).map(|_| (next() >> 32) as u8).collect();
    for block in bytes.chunks_exact_mut(format.bytes()) {
        if format == BlockFormat::MXFP4 {
            // An exponent of -7 to 4.
            block[0] = 120 + (next() % 12) as u8;
        }
        for &at in scales_at {
            let scale = half::f16::from_f32((next() % 2000) as f32 / 1000.0 - 1.0);
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    bytes
}
