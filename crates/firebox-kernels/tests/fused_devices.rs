//! Fused steps equal the same steps one after the other.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{DType, Device, Int, Tensor};
use firebox_kernels::attention::{HeadTransform, KvTensor, RopeAndCache};
use firebox_kernels::gate::gated;
use firebox_kernels::linear::{
    self, RowNorm, Weight, multiply, multiply_added, multiply_each, multiply_each_normed, multiply_gated,
};
use firebox_kernels::norm::rms_norm;
use firebox_kernels::rope::rotate;
use firebox_kernels::{Activation, Grouping};
use support::{assert_near, bits, devices_with_own, grouped, random};

fn home<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    tensor.to_device(&Device::flex())
}

/// Weights of every form, with the given numbers of outputs.
fn weights(outputs: &[usize], inputs: usize, device: &Device) -> Vec<Vec<Weight>> {
    let dense = |dtype: DType| {
        let weight = |(seed, &outputs): (usize, &usize)| {
            Weight::Dense(random([outputs, inputs], seed as u64).to_device(device).cast(dtype))
        };
        outputs.iter().enumerate().map(weight).collect()
    };
    let packed = |four_bits| {
        let grouping = Grouping { inputs, group: 32, four_bits, tiled: false };
        let weight = |(seed, &outputs): (usize, &usize)| {
            let (words, scales) = grouped(outputs, grouping, seed as u64);
            let scales = scales.cast(DType::F32).to_device(device);
            let scales = if device.supports_dtype(DType::F16) { scales.cast(DType::F16) } else { scales };
            Weight::Grouped { words: words.to_device(device), scales: scales.div_scalar(8.0), grouping }
        };
        outputs.iter().enumerate().map(weight).collect()
    };
    let mut forms = vec![dense(DType::F32), packed(true), packed(false)];
    if device.supports_dtype(DType::F16) {
        forms.push(dense(DType::F16));
    }
    forms
}

fn norm(inputs: usize, device: &Device) -> RowNorm {
    RowNorm { weight: random([inputs], 9).to_device(device), epsilon: 1e-5, offset: 1.0 }
}

/// Few rows, many rows, and widths that are no multiple of a vector's.
const SIZES: [(usize, usize); 7] = [(1, 96), (3, 64), (1, 1024), (13, 256), (20, 96), (2, 75), (40, 96)];

#[test]
fn normalised_rows_are_multiplied() {
    for device in devices_with_own() {
        for (rows, inputs) in SIZES {
            let x = random([rows, inputs], 5).to_device(&device);
            let normed = || {
                let RowNorm { weight, epsilon, offset } = norm(inputs, &device);
                rms_norm(x.clone(), weight, epsilon, offset)
            };
            let outputs = [40, 17, 130];
            for weights in weights(&outputs, inputs, &device) {
                let expected = multiply_each(normed(), weights.clone());
                let found = multiply_each_normed(x.clone(), norm(inputs, &device), weights.clone());
                for (found, expected) in found.into_iter().zip(expected) {
                    assert_near(home(found), home(expected), 2e-6, 2e-6 * inputs as f32);
                }
                for activation in [Activation::Silu, Activation::GeluTanh] {
                    let pair = || [weights[0].clone(), weights[0].clone()];
                    let mut products = multiply_each(normed(), pair().into());
                    let up = products.remove(1);
                    let expected = gated(products.remove(0), up, activation);
                    let found = multiply_gated(x.clone(), norm(inputs, &device), pair(), activation);
                    assert_near(home(found), home(expected), 2e-5, 4e-5 * inputs as f32);
                }
            }
        }
    }
}

#[test]
fn a_residual_is_added_to_a_product() {
    for device in devices_with_own() {
        for (rows, inputs) in SIZES {
            for outputs in [1, 40, 4104] {
                let x = random([rows, inputs], 5).to_device(&device);
                let added = random([rows, outputs], 6).to_device(&device);
                for mut weights in weights(&[outputs], inputs, &device) {
                    let weight = weights.remove(0);
                    let expected = weight.clone().multiply(x.clone()).add(added.clone());
                    let found = multiply_added(x.clone(), weight, added.clone());
                    assert_eq!(bits(home(found)), bits(home(expected)), "{rows} × {inputs} on {device:?}");
                }
            }
        }
    }
}

/// Groups of every size, the last of which is not full, and lines of every length.
#[test]
fn a_row_is_the_same_alone_and_among_others() {
    for device in devices_with_own() {
        for (rows, inputs) in [(2, 96), (3, 75), (5, 1024), (11, 256), (8, 3072)] {
            let x = random([rows, inputs], 5).mul_scalar(3.0).to_device(&device);
            let outputs = [21, 9, 40];
            let added = random([rows, outputs[0]], 6).to_device(&device);
            for weights in weights(&outputs, inputs, &device) {
                let products = |from: usize, count: usize| {
                    let x = x.clone().narrow(0, from, count);
                    let added = added.clone().narrow(0, from, count);
                    let norm = || norm(inputs, &device);
                    let pair = [weights[0].clone(), weights[0].clone()];
                    let mut all = multiply_each_normed(x.clone(), norm(), weights.clone());
                    all.push(multiply_gated(x.clone(), norm(), pair, Activation::Silu));
                    all.push(multiply_added(x.clone(), weights[0].clone(), added));
                    all.push(weights[2].clone().multiply(x));
                    all.into_iter().map(home).collect::<Vec<_>>()
                };
                let together = products(0, rows);
                for from in (0..rows).step_by(2) {
                    for (index, (all, alone)) in together.iter().zip(products(from, 1)).enumerate() {
                        let all = all.clone().narrow(0, from, 1);
                        let of = format!("product {index}, row {from} of {rows} × {inputs} on {device:?}");
                        assert_eq!(bits(all), bits(alone), "{of}");
                    }
                }
            }
        }
    }
}

#[test]
fn rows_of_small_integers_are_gathered() {
    for device in devices_with_own() {
        for (inputs, group, four_bits) in
            [(1024, 32, true), (96, 64, false), (100, 32, true), (37, 32, false)]
        {
            let grouping = Grouping { inputs, group, four_bits, tiled: false };
            let (words, scales) = grouped(50, grouping, 3);
            let indices = [49, 0, 7, 7];
            let on = |device: &Device| Tensor::<1, Int>::from_ints(indices, device);
            let chosen = on(&Device::flex());
            let expected = linear::reference::dequantize(
                words.clone().select(0, chosen.clone()),
                scales.clone().select(0, chosen),
                grouping,
            );
            for scales in [scales.clone(), scales.clone().cast(DType::F32)] {
                if !device.supports_dtype(scales.dtype()) {
                    continue;
                }
                let (words, scales) = (words.clone().to_device(&device), scales.to_device(&device));
                let found = linear::gather_grouped(words, scales, grouping, on(&device));
                assert_eq!(bits(home(found)), bits(expected.clone()), "{grouping:?} on {device:?}");
            }
        }
    }
}

#[test]
fn heads_are_placed() {
    const POSITIONS: usize = 12;
    for device in devices_with_own() {
        for (heads, kv_heads, head_dim, pairs) in
            [(4, 2, 32, 16), (3, 1, 20, 5), (8, 8, 64, 0), (6, 2, 130, 65)]
        {
            for (rows, at, interleaved, normed, dtype) in [
                (1, 0, false, true, DType::F32),
                (5, 7, true, true, DType::F32),
                (3, 2, false, false, DType::F32),
                (2, 5, false, true, DType::F16),
            ] {
                if !device.supports_dtype(dtype) {
                    continue;
                }
                let of = |count, seed| random([rows + 2, count, head_dim], seed).to_device(&device);
                let (query, key, value) = (of(heads, 1), of(kv_heads, 2), of(kv_heads, 3));
                let angles = [4, 5].map(|seed| random([rows + 2, 1, pairs], seed).to_device(&device));
                let head_norm = |seed: u64| {
                    normed.then(|| RowNorm {
                        weight: random([head_dim], seed).to_device(&device),
                        epsilon: 1e-6,
                        offset: seed as f32 - 6.0,
                    })
                };
                let placed = |heads: Tensor<3>, norm: Option<RowNorm>| {
                    let heads = match norm {
                        Some(norm) => rms_norm(heads, norm.weight, norm.epsilon, norm.offset),
                        None => heads,
                    };
                    let [cos, sin] = angles.clone();
                    if pairs == 0 { heads } else { rotate(heads, cos, sin, interleaved) }
                };
                let room = |seed| {
                    let shape = [kv_heads, POSITIONS, head_dim];
                    KvTensor::Float(random(shape, seed).to_device(&device).cast(dtype))
                };
                let part = |heads: Tensor<3>| KvTensor::Float(heads.narrow(0, 1, rows).swap_dims(0, 1));
                let (mut expected_keys, mut expected_values) = (room(7), room(8));
                let expected_query = placed(query.clone(), head_norm(6));
                KvTensor::assign_both(
                    [&mut expected_keys, &mut expected_values],
                    at,
                    [part(placed(key.clone(), head_norm(7))), part(value.clone())],
                );

                let transform = HeadTransform {
                    steps: None,
                    query_norm: head_norm(6),
                    key_norm: head_norm(7),
                    angles: (pairs > 0).then(|| angles.clone()),
                    interleaved,
                };
                let heads_cache = RopeAndCache::new([query, key, value], transform);
                let (mut keys, mut values) = (room(7), room(8));
                heads_cache.write(1..rows + 1, [&mut keys, &mut values], at);
                let (mut rest_keys, mut rest_values) = (room(7), room(8));
                heads_cache.write(0..1, [&mut rest_keys, &mut rest_values], 0);
                heads_cache.write(rows + 1..rows + 2, [&mut rest_keys, &mut rest_values], 1);
                assert_near(home(heads_cache.query()), home(expected_query), 1e-5, 4e-6);
                // Rounding to f16 may differ by one step.
                let step = if dtype == DType::F16 { 1e-3 } else { 1e-5 };
                for (found, expected) in [(keys, expected_keys), (values, expected_values)] {
                    let numbers = |stored: KvTensor| home(stored.dequantize(head_dim));
                    assert_near(numbers(found), numbers(expected), step, 4e-6);
                }
            }
        }
    }
}

/// On devices without bf16, kernels read two such numbers from a word.
#[test]
fn packed_bf16_weights_equal_widened_ones() {
    for device in devices_with_own() {
        for inputs in [96, 1024, 70, 6] {
            if device.supports_dtype(DType::BF16) || !linear::supports_weight(&device, DType::BF16, inputs) {
                continue;
            }
            let rounded = random([33, inputs], 4).mul_scalar(1e3).cast(DType::BF16);
            let packed = Tensor::<2>::from_data(rounded.clone().into_data(), (&device, DType::BF16));
            let widened = rounded.cast(DType::F32).to_device(&device);
            for rows in [1, 3, 8, 20, 40, 70] {
                let x = random([rows, inputs], 5).to_device(&device);
                let products = [packed.clone(), widened.clone()].map(|weight| multiply(x.clone(), weight));
                let [found, expected] = products.map(|product| bits(home(product)));
                assert_eq!(found, expected, "{rows} × {inputs} on {device:?}");
                let three = |weight: &Tensor<2>| vec![Weight::Dense(weight.clone()); 3];
                let of = |weight| multiply_each_normed(x.clone(), norm(inputs, &device), three(weight));
                for (found, expected) in of(&packed).into_iter().zip(of(&widened)) {
                    assert_eq!(bits(home(found)), bits(home(expected)), "{rows} × {inputs} on {device:?}");
                }
            }
            let chosen = || Tensor::<1, Int>::from_ints([32, 0, 5], &device);
            let [found, expected] =
                [packed, widened].map(|weight| bits(home(linear::gather(weight, chosen()))));
            assert_eq!(found, expected, "rows of {inputs} on {device:?}");
        }
    }
}
