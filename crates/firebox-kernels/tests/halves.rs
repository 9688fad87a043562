//! Products of f16 operands differ from those of f32 by the rounding of the operands.
//!
//! Where a device has no matrix units, the same tiles are multiplied without them.

#![cfg(any(feature = "wgpu", feature = "cuda"))]
#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{DType, Device, Tensor};
use firebox_kernels::Grouping;
use firebox_kernels::linear::{Weight, multiply_in_halves};
use support::{assert_close, bits, devices_with_own, grouped, random, values};

fn home(tensor: Tensor<2>) -> Tensor<2> {
    tensor.to_device(&Device::flex())
}

/// Accelerators of this build that multiply f16, with matrix units or without.
fn devices(matrix_units: bool) -> Vec<Device> {
    let supports = |device: &Device| {
        let [x, weight] = [1, 2].map(|seed| random([1, 32], seed).to_device(device));
        *device != Device::flex() && multiply_in_halves(x, Weight::Dense(weight), matrix_units).is_some()
    };
    let found: Vec<Device> = devices_with_own().into_iter().filter(supports).collect();
    assert!(!matrix_units || !found.is_empty(), "no device multiplies f16 with matrix units");
    found
}

/// Weights of every form, and their products with `x` in f64.
fn weights(x: &Tensor<2>, outputs: usize, device: &Device) -> Vec<(Weight, Tensor<2>)> {
    let [_, inputs] = x.dims();
    let product = |weight: Tensor<2>| {
        let product = x.clone().cast(DType::F64).matmul(weight.cast(DType::F64).transpose());
        product.cast(DType::F32)
    };
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16] {
        let weight = random([outputs, inputs], 3).cast(dtype);
        all.push((Weight::Dense(weight.clone().to_device(device)), product(weight)));
    }
    for (four_bits, group) in [(true, 32), (false, 64)] {
        let grouping = Grouping { inputs, group, four_bits, tiled: false };
        let (words, scales) = grouped(outputs, grouping, 4);
        let scales = scales.mul_scalar(if four_bits { 0.125 } else { 1.0 / 128.0 });
        let weight = firebox_kernels::linear::reference::dequantize(words.clone(), scales.clone(), grouping);
        let (words, scales) = (words.to_device(device), scales.to_device(device));
        all.push((Weight::Grouped { words, scales, grouping }, product(weight)));
    }
    all
}

fn check(matrix_units: bool) {
    for device in devices(matrix_units) {
        for (rows, inputs, outputs) in [(33, 64, 40), (70, 100, 130), (64, 1024, 64), (1, 36, 1)] {
            // Larger than f16 holds, and smaller.
            for magnitude in [1.0, 1e6, 1e-9] {
                let x = random([rows, inputs], 5).mul_scalar(magnitude);
                for (weight, expected) in weights(&x, outputs, &device) {
                    let found = multiply_in_halves(x.clone().to_device(&device), weight, matrix_units);
                    // Two roundings of 2⁻¹¹, in random directions.
                    let tolerance = magnitude * 1e-3 * (inputs as f32).sqrt();
                    assert_close(home(found.unwrap()), expected, tolerance);
                }
            }
        }
    }
}

#[test]
fn tiles_without_matrix_units_round_operands_only() {
    check(false);
}

#[test]
#[ignore = "measure: matrix units, of CUDA or of Vulkan through SPIR-V"]
fn tiles_of_matrix_units_round_operands_only() {
    check(true);
}

fn check_rows(matrix_units: bool) {
    for device in devices(matrix_units) {
        let x = random([70, 96], 2);
        for (weight, _) in weights(&x, 50, &device) {
            let of = |x: Tensor<2>| {
                home(multiply_in_halves(x.to_device(&device), weight.clone(), matrix_units).unwrap())
            };
            let whole = of(x.clone());
            let part = of(x.clone().narrow(0, 9, 40));
            assert_eq!(bits(whole.clone().narrow(0, 9, 40)), bits(part), "{device:?}");
            let spoiled = of(x.clone().slice_fill([1..2, 4..5], f32::INFINITY));
            assert!(values(spoiled.clone().narrow(0, 1, 1)).iter().all(|value| !value.is_finite()));
            assert_eq!(bits(spoiled.narrow(0, 2, 68)), bits(whole.narrow(0, 2, 68)), "{device:?}");
        }
    }
}

#[test]
fn rows_are_independent() {
    check_rows(false);
}

#[test]
#[ignore = "measure: matrix units, of CUDA or of Vulkan through SPIR-V"]
fn rows_of_matrix_units_are_independent() {
    check_rows(true);
}
