//! Every device of this build computes what the references compute in f32 on the CPU, for odd sizes and edges
//! of formats. Few cases each, because a device may be a software one.
//!
//! Tolerances: `1e-6` of the largest summand per summand for products (at least eight of them), `2e-5` for
//! norms, `3e-6` for convolutions,
//! twice that of norms for heads that are rotated then, `2e-6` and `2e-5` of the number for gates, `1e-6` for rotations, `1e-4`
//! for the delta rule, whose errors feed back and whose reference is in f64.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{DType, Device, Int, Tensor};
use firebox_kernels::convolution::{self, ConvolutionParams, convolve};
use firebox_kernels::delta::{self, DecayParams, Heads, Tokens, delta_rule};
use firebox_kernels::gate::{self, gated, gated_halves};
use firebox_kernels::linear::{self, Weight, multiply, multiply_each, multiply_grouped};
use firebox_kernels::{Grouping, norm, rope};
use proptest::prelude::*;
use support::{
    ACTIVATIONS, activations, assert_close, assert_near, bits, devices, devices_with_own, grouped, random,
    values,
};

fn products(inputs: usize, magnitude: f32) -> f32 {
    magnitude * 1e-6 * (inputs as f32).max(8.0)
}

/// A tensor of a device on the CPU.
fn home<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    tensor.to_device(&Device::flex())
}

fn check_plain(rows: usize, inputs: usize, outputs: usize, dtype: DType, seed: u64) {
    let (x, weight) = (random([rows, inputs], seed), random([outputs, inputs], seed + 7).cast(dtype));
    let expected = linear::reference::multiply(x.clone(), weight.clone());
    for device in devices() {
        if !device.supports_dtype(dtype) {
            continue;
        }
        let found = multiply(x.clone().to_device(&device), weight.clone().to_device(&device));
        assert_close(home(found), expected.clone(), products(inputs, 1.0));
    }
}

fn on_device(
    x: &Tensor<2>,
    words: &Tensor<2, Int>,
    scales: &Tensor<2>,
    grouping: Grouping,
    device: &Device,
) -> Tensor<2> {
    let scales =
        if device.supports_dtype(DType::F16) { scales.clone() } else { scales.clone().cast(DType::F32) };
    let (x, words) = (x.clone().to_device(device), words.clone().to_device(device));
    home(multiply_grouped(x, words, scales.to_device(device), grouping))
}

fn check_grouped(rows: usize, outputs: usize, grouping: Grouping, seed: u64) {
    let x = activations(rows, grouping.inputs, grouping.four_bits, seed);
    let (words, scales) = grouped(outputs, grouping, seed + 7);
    let expected = linear::reference::multiply_grouped(x.clone(), words.clone(), scales.clone(), grouping);
    let magnitude = if grouping.four_bits { 8.0 } else { 128.0 };
    for device in devices() {
        let found = on_device(&x, &words, &scales, grouping, &device);
        // The CPU rounds activations before it multiplies them with integers, to eight bits where weights have four.
        let rounded =
            if device == Device::flex() { magnitude * 4e-5 * (grouping.inputs as f32).sqrt() } else { 0.0 };
        assert_close(found, expected.clone(), products(grouping.inputs, magnitude) + rounded);
    }
}

fn some_rows() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..6, 6usize..80]
}

fn config() -> ProptestConfig {
    ProptestConfig { max_shrink_iters: 16, ..ProptestConfig::with_cases(24) }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn plain_weights(
        rows in some_rows(), inputs in 1usize..300, outputs in 1usize..140, seed in 0u64..1000,
        dtype in prop_oneof![Just(DType::F32), Just(DType::F16)],
    ) {
        check_plain(rows, inputs, outputs, dtype, seed);
    }

    #[test]
    fn grouped_weights(
        rows in some_rows(), outputs in 1usize..140, inputs in 1usize..300,
        group in prop_oneof![Just(32usize), Just(128), Just(96), Just(48)], four_bits: bool, tiled: bool,
        seed in 0u64..1000,
    ) {
        let tiled = tiled && group.is_multiple_of(32);
        check_grouped(rows, outputs, Grouping { inputs, group, four_bits, tiled }, seed);
    }

    #[test]
    fn root_mean_square(rows in 1usize..10, width in 1usize..600, offset in 0f32..2.0, seed in 0u64..1000) {
        let (x, weight) = (random([rows, width], seed), random([width], seed + 1));
        let expected = norm::reference::rms_norm(x.clone(), weight.clone(), 1e-5, offset);
        for device in devices() {
            let (x, weight) = (x.clone().to_device(&device), weight.clone().to_device(&device));
            assert_close(home(norm::rms_norm(x, weight, 1e-5, offset)), expected.clone(), 2e-5);
        }
        let residual = random([rows, width], seed + 2);
        let sum = x.clone().add(residual.clone());
        let expected = norm::reference::rms_norm(sum.clone(), weight.clone(), 1e-5, offset);
        for device in devices() {
            let [x, residual] = [&x, &residual].map(|tensor| tensor.clone().to_device(&device));
            let weight = weight.clone().to_device(&device);
            let (found, normed) = norm::add_rms_norm(x, residual, weight, 1e-5, offset);
            assert_close(home(found), sum.clone(), 1e-6);
            assert_close(home(normed), expected.clone(), 2e-5);
        }
    }

    #[test]
    fn gates(rows in 0usize..5, width in 1usize..300, seed in 0u64..1000) {
        // Where exponentials overflow too.
        let gate = random([rows, width], seed).mul_scalar(200.0).mul(random([rows, width], seed + 1).powi_scalar(2));
        let up = random([rows, width], seed + 2);
        let both = Tensor::cat(vec![gate.clone(), up.clone()], 1);
        for activation in ACTIVATIONS {
            let expected = gate::reference(gate.clone(), up.clone(), activation);
            for device in devices_with_own() {
                let [gate, up, both] = [&gate, &up, &both].map(|tensor| tensor.clone().to_device(&device));
                for found in [gated(gate, up, activation), gated_halves(both, activation)] {
                    assert_near(home(found), expected.clone(), 2e-5, 2e-6);
                }
            }
        }
    }

    #[test]
    fn convolutions(
        count in 0usize..12, channels in 1usize..90, kernel in 1usize..6, silu: bool, follows: bool, seed in 0u64..1000,
    ) {
        let (x, taps) = (random([count, channels], seed), random([channels, kernel], seed + 1));
        let earlier = (follows && kernel > 1).then(|| random([kernel - 1, channels], seed + 2));
        let before = earlier.clone().unwrap_or_else(|| Tensor::zeros([kernel - 1, channels], &Device::flex()));
        let params = ConvolutionParams { exact: false, silu };
        let (expected, kept) = convolution::reference(x.clone(), before, taps.clone(), params);
        for device in devices_with_own() {
            let there = |tensor: &Tensor<2>| tensor.clone().to_device(&device);
            let earlier = earlier.as_ref().map(there);
            let (found, after) = convolve(there(&x), earlier, there(&taps), params);
            assert_close(home(found), expected.clone(), 3e-6);
            assert_eq!(bits(home(after)), bits(kept.clone()));
        }
    }

    #[test]
    fn rotation(
        rows in 1usize..10, heads in 1usize..5, pairs in 1usize..20, beyond in 0usize..9,
        interleaved: bool, seed in 0u64..1000,
    ) {
        let x = random([rows, heads, 2 * pairs + beyond], seed);
        let (cos, sin) = (random([rows, 1, pairs], seed + 1), random([rows, 1, pairs], seed + 2));
        let expected = rope::reference::rotate(x.clone(), cos.clone(), sin.clone(), interleaved);
        for device in devices() {
            let [x, cos, sin] = [&x, &cos, &sin].map(|tensor| tensor.clone().to_device(&device));
            assert_close(home(rope::rotate(x, cos, sin, interleaved)), expected.clone(), 1e-6);
        }
        let weight = random([2 * pairs + beyond], seed + 3);
        let normed = norm::rms_norm(x.clone(), weight.clone(), 1e-5, 0.5);
        let expected = rope::reference::rotate(normed, cos.clone(), sin.clone(), interleaved);
        for device in devices() {
            let [x, cos, sin] = [&x, &cos, &sin].map(|tensor| tensor.clone().to_device(&device));
            let weight = weight.clone().to_device(&device);
            let found = rope::rotate_normed(x, weight, 1e-5, 0.5, [cos, sin], interleaved);
            assert_close(home(found), expected.clone(), 4e-5);
        }
        let (cos, sin) = (random([pairs], seed + 1), random([pairs], seed + 2));
        let expected = rope::reference::rotate_by(x.clone(), cos.clone(), sin.clone(), interleaved);
        for device in devices() {
            let [cos, sin] = [&cos, &sin].map(|tensor| tensor.clone().to_device(&device));
            let found = rope::rotate_by(x.clone().to_device(&device), cos, sin, interleaved);
            assert_close(home(found), expected.clone(), 1e-6);
        }
    }

    #[test]
    fn the_delta_rule(
        key_heads in 1usize..3, sharing in 1usize..4, tiled: bool, logarithmic: bool, remembered: bool,
        count in 0usize..12, key in prop_oneof![1usize..20, Just(128), Just(250)], value in 1usize..40,
        seed in 0u64..1000,
    ) {
        let value_heads = key_heads * sharing;
        let heads = Heads { key_heads, value_heads, key_width: key, value_width: value, tiled };
        check_delta(heads, count, logarithmic, remembered, seed);
    }
}

fn check_delta(heads: Heads, count: usize, logarithmic: bool, remembered: bool, seed: u64) {
    let Heads { key_heads, value_heads, key_width, value_width, .. } = heads;
    let channels = 2 * key_heads * key_width + value_heads * value_width;
    let mixed = random([count, channels], seed);
    let step = random([count, value_heads], seed + 1).mul_scalar(4.0);
    let decay = random([count, value_heads], seed + 2).mul_scalar(30.0);
    let rate = random([value_heads], seed + 3);
    let rate = if logarithmic { rate.sub_scalar(2.0) } else { rate.abs().neg() };
    let bias = random([value_heads], seed + 4);
    let memory = remembered.then(|| random([value_heads, key_width, value_width], seed + 5));
    let on = |device: &Device| {
        let there = |tensor: &Tensor<2>| tensor.clone().to_device(device);
        let of_heads = |tensor: &Tensor<1>| tensor.clone().to_device(device);
        let tokens = Tokens { mixed: there(&mixed), step: there(&step), decay: there(&decay) };
        let decay_params = DecayParams { rate: of_heads(&rate), bias: of_heads(&bias), logarithmic };
        (tokens, decay_params, memory.clone().map(|memory| memory.to_device(device)))
    };
    let (tokens, decay_params, before) = on(&Device::flex());
    let before =
        before.unwrap_or_else(|| Tensor::zeros([value_heads, key_width, value_width], &Device::flex()));
    let (read, after) = delta::reference::delta_rule(tokens, decay_params, heads, before.cast(DType::F64));
    for device in devices() {
        let (tokens, decay_params, before) = on(&device);
        let (found, found_after) = delta_rule(tokens, decay_params, heads, before);
        assert_eq!(found.dtype(), DType::F32);
        assert_close(home(found), read.clone(), 1e-4);
        assert_close(home(found_after).cast(DType::F32), after.clone().cast(DType::F32), 1e-4);
    }
}

/// In one piece and token by token, to the last bit, with gates that are shut and open.
#[test]
fn the_delta_rule_in_pieces() {
    let heads = Heads { key_heads: 2, value_heads: 4, key_width: 40, value_width: 19, tiled: true };
    for device in devices_with_own() {
        let there = |tensor: Tensor<2>| tensor.to_device(&device);
        let tokens = Tokens {
            mixed: there(random([6, 2 * 2 * 40 + 4 * 19], 1)),
            step: there(random([6, 4], 2).slice_fill([1..2, 0..2], 1e4).slice_fill([3..4, 0..2], -1e4)),
            decay: there(random([6, 4], 3).slice_fill([2..3, 0..2], 1e4).slice_fill([4..5, 0..2], -1e4)),
        };
        let decay_params = || {
            let of_heads = |seed| random([4], seed).to_device(&device);
            DecayParams { rate: of_heads(4), bias: of_heads(5), logarithmic: true }
        };
        let (whole, whole_after) = delta_rule(tokens.clone(), decay_params(), heads, None);
        let (mut read, mut memory) = (Vec::new(), None);
        for token in 0..6 {
            let at = |tensor: &Tensor<2>| tensor.clone().narrow(0, token, 1);
            let token = Tokens { mixed: at(&tokens.mixed), step: at(&tokens.step), decay: at(&tokens.decay) };
            let (found, after) = delta_rule(token, decay_params(), heads, memory);
            read.extend(bits(found));
            memory = Some(after);
        }
        assert!(values(whole.clone()).iter().all(|value| value.is_finite()), "{device:?}");
        assert_eq!(read, bits(whole), "{device:?}");
        assert_eq!(memory.unwrap().into_data(), whole_after.into_data(), "{device:?}");
    }
}

/// A memory of which a device keeps one column at a time, the widest that it does, and one that it leaves to the
/// reference.
#[test]
fn wide_keys_of_the_delta_rule() {
    for key_width in [1600, 3072, 3073] {
        let heads = Heads { key_heads: 1, value_heads: 2, key_width, value_width: 3, tiled: false };
        check_delta(heads, 4, true, true, 1);
    }
}

/// Whole vectors, whole groups and sizes as models have them, on both sides of every limit.
#[test]
fn products_of_usual_sizes() {
    for rows in [1, 2, 8, 16, 32, 33, 65] {
        check_plain(rows, 512, 70, DType::F32, 1);
        check_plain(rows, 512, 70, DType::F16, 2);
        for four_bits in [false, true] {
            check_grouped(rows, 70, Grouping { inputs: 1024, group: 128, four_bits, tiled: true }, 3);
            check_grouped(rows, 70, Grouping { inputs: 992, group: 64, four_bits, tiled: true }, 4);
        }
    }
}

/// With several weights at once as with each alone, to the last bit, though they have other numbers of outputs.
#[test]
fn several_weights_at_once() {
    let four = Grouping { inputs: 96, group: 32, four_bits: true, tiled: false };
    for device in devices_with_own() {
        for rows in [1, 3, 20, 40] {
            let x = activations(rows, four.inputs, true, 1).to_device(&device);
            let there = |(words, scales): (Tensor<2, Int>, Tensor<2>), grouping| Weight::Grouped {
                words: words.to_device(&device),
                scales: if device.supports_dtype(DType::F16) { scales } else { scales.cast(DType::F32) }
                    .to_device(&device),
                grouping,
            };
            let mut sets: Vec<Vec<Weight>> = Vec::new();
            for outputs in [vec![33, 7], vec![128, 64, 65], vec![8, 1, 40, 16], vec![5, 0, 9]] {
                let bytes = Grouping { four_bits: false, ..four };
                for grouping in [four, bytes] {
                    let of = |&outputs: &usize| there(grouped(outputs, grouping, 8), grouping);
                    sets.push(outputs.iter().map(of).collect());
                }
                let of = |&outputs: &usize| Weight::Dense(random([outputs, 96], 5).to_device(&device));
                sets.push(outputs.iter().map(of).collect());
            }
            // Of several forms.
            sets.push(vec![sets[0][0].clone(), sets[2][0].clone(), sets[1][0].clone()]);
            for weights in sets {
                let alone: Vec<_> = weights.iter().map(|weight| weight.clone().multiply(x.clone())).collect();
                for (found, expected) in multiply_each(x.clone(), weights).into_iter().zip(alone) {
                    assert_eq!(found.dims(), expected.dims());
                    assert_eq!(bits(home(found)), bits(home(expected)), "{rows} rows on {device:?}");
                }
            }
        }
    }
}

/// Few rows or many: what a row gives does not depend on the ones beside it.
#[test]
fn rows_are_independent() {
    let grouping = Grouping { inputs: 96, group: 32, four_bits: true, tiled: true };
    let (words, scales) = grouped(50, grouping, 1);
    let x = random([70, grouping.inputs], 2);
    for device in devices_with_own() {
        for (from, count, of) in [(2, 1, 4), (1, 3, 16), (9, 5, 16), (3, 17, 32), (9, 37, 70), (1, 65, 70)] {
            let some = |tensor: Tensor<2>| tensor.narrow(0, from, count);
            let all = x.clone().narrow(0, 0, of);
            let whole = on_device(&all, &words, &scales, grouping, &device);
            let part = on_device(&some(all), &words, &scales, grouping, &device);
            assert_eq!(bits(some(whole)), bits(part), "{count} rows of {of} on {device:?}");
        }
    }
}

/// Not on ndarray, whose product of no rows divides by zero.
#[test]
fn no_rows_give_no_rows() {
    let grouping = Grouping { inputs: 64, group: 32, four_bits: true, tiled: false };
    let (words, scales) = grouped(5, grouping, 1);
    for device in devices_with_own() {
        let none = Tensor::<2>::zeros([0, 64], &device);
        assert_eq!(multiply(none.clone(), random([5, 64], 1).to_device(&device)).dims(), [0, 5]);
        assert_eq!(on_device(&none, &words, &scales, grouping, &device).dims(), [0, 5]);
        assert_eq!(norm::rms_norm(none, random([64], 1).to_device(&device), 1e-5, 0.0).dims(), [0, 64]);
        let heads = Tensor::<3>::zeros([0, 2, 8], &device);
        let angles = Tensor::<3>::zeros([0, 1, 4], &device);
        assert_eq!(rope::rotate(heads, angles.clone(), angles, false).dims(), [0, 2, 8]);
    }
}

#[test]
fn nan_stays_in_its_row() {
    let grouping = Grouping { inputs: 70, group: 32, four_bits: true, tiled: true };
    let (words, scales) = grouped(33, grouping, 1);
    for rows in [3, 20, 40] {
        let clean = random([rows, 70], 2);
        for bad in [f32::NAN, f32::INFINITY] {
            let x = clean.clone().slice_fill([1..2, 4..5], bad);
            for device in devices_with_own() {
                let found = on_device(&x, &words, &scales, grouping, &device);
                let expected = on_device(&clean, &words, &scales, grouping, &device);
                let row = |tensor: &Tensor<2>, row| tensor.clone().narrow(0, row, 1);
                // An integer of zero makes NaN of infinity, and a scale makes infinity of anything.
                assert!(values(row(&found, 1)).iter().all(|value| !value.is_finite()), "{device:?}");
                for other in [0, 2] {
                    assert_eq!(bits(row(&found, other)), bits(row(&expected, other)), "{device:?}");
                }
            }
        }
    }
}

/// Asserts that there are numbers where they are expected, and nowhere else.
fn assert_numbers<const D: usize>(found: Tensor<D>, expected: Tensor<D>, of: &str) {
    assert_eq!(found.dims(), expected.dims());
    for (index, (found, expected)) in values(home(found)).into_iter().zip(values(expected)).enumerate() {
        let alike = found.is_finite() == expected.is_finite();
        assert!(alike, "element {index} of {of}: {found} instead of {expected}");
    }
}

#[test]
fn nan_spreads_as_in_the_references() {
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let spoiled = random([3, 40], 1).slice_fill([1..2, 4..5], special);
        let (other, weight, taps) = (random([3, 40], 2), random([40], 3), random([40, 2], 4));
        let (heads, angles) = (spoiled.clone().reshape([3, 4, 10]), random([3, 1, 5], 5));
        for device in devices_with_own() {
            let there = |tensor: &Tensor<2>| tensor.clone().to_device(&device);
            for activation in ACTIVATIONS {
                let expected = gate::reference(spoiled.clone(), other.clone(), activation);
                let found = gated(there(&spoiled), there(&other), activation);
                assert_numbers(found, expected, &format!("{activation:?} of {special} on {device:?}"));
            }
            let normed = |x: &Tensor<2>| {
                let weight = weight.clone().to_device(&device);
                let added = norm::add_rms_norm(there(x), there(&other), weight.clone(), 1e-6, 0.0).1;
                [norm::rms_norm(there(x), weight, 1e-6, 0.0), added].map(|normed| values(home(normed)))
            };
            for (found, clean) in normed(&spoiled).into_iter().zip(normed(&random([3, 40], 1))) {
                assert!(!found[44].is_finite(), "norm of {special} on {device:?}: {found:?}");
                assert_eq!((&found[..40], &found[80..]), (&clean[..40], &clean[80..]), "{device:?}");
            }
            let [turned, by] = [&heads, &angles].map(|tensor| tensor.clone().to_device(&device));
            let expected = rope::reference::rotate(heads.clone(), angles.clone(), angles.clone(), false);
            let found = rope::rotate(turned, by.clone(), by, false);
            assert_numbers(found, expected, &format!("rotated {special} on {device:?}"));
            let params = ConvolutionParams { exact: false, silu: true };
            let (expected, _) = convolve(spoiled.clone(), None, taps.clone(), params);
            let (found, _) = convolve(there(&spoiled), None, there(&taps), params);
            assert_numbers(found, expected, &format!("convolved {special} on {device:?}"));
        }
    }
}

/// In a query, a key, a value, a step or a decay of the second of three tokens.
#[test]
fn nan_spreads_in_the_delta_rule_as_in_the_reference() {
    let heads = Heads { key_heads: 1, value_heads: 1, key_width: 10, value_width: 20, tiled: false };
    for (part, at) in [(0, 4), (0, 14), (0, 24), (1, 0), (2, 0)] {
        let mut parts = [random([3, 40], 1), random([3, 1], 2), random([3, 1], 3)];
        parts[part] = parts[part].clone().slice_fill([1..2, at..at + 1], f32::NAN);
        let on = |device: &Device| {
            let [mixed, step, decay] = parts.each_ref().map(|part| part.clone().to_device(device));
            let [rate, bias] = [5, 6].map(|seed| random([1], seed).to_device(device));
            (Tokens { mixed, step, decay }, DecayParams { rate, bias, logarithmic: true })
        };
        let (tokens, decay_params) = on(&Device::flex());
        let before = Tensor::zeros([1, 10, 20], (&Device::flex(), DType::F64));
        let (read, after) = delta::reference::delta_rule(tokens, decay_params, heads, before);
        assert!(values(read.clone()).iter().any(|value| value.is_nan()));
        for device in devices_with_own() {
            let (tokens, decay_params) = on(&device);
            let (found, found_after) = delta_rule(tokens, decay_params, heads, None);
            let of = format!("number {at} of part {part} on {device:?}");
            assert_numbers(found, read.clone(), &of);
            assert_numbers(home(found_after).cast(DType::F32), after.clone().cast(DType::F32), &of);
        }
    }
}

#[test]
fn strided_tensors_are_supported() {
    let (x, weight) = (random([40, 6], 1), random([64, 40], 2));
    let expected = linear::reference::multiply(x.clone().transpose(), weight.clone().narrow(0, 8, 20));
    for device in devices() {
        let (x, weight) = (x.clone().to_device(&device), weight.clone().to_device(&device));
        let found = multiply(x.transpose(), weight.narrow(0, 8, 20));
        assert_close(home(found), expected.clone(), products(40, 1.0));
    }
}
