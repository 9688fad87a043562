//! The quantized layout, against a literal implementation of its definition.
#![allow(clippy::unwrap_used, reason = "a test that fails here should say so")]

use firebox_store::{Bits, Q4_CHUNK, Quantization, TILE_ROWS, Weight, quantize};
use half::f16;
use proptest::prelude::*;

/// The stored integer of each input and the scale of its group, from the definition alone.
fn expected_values(row: &[f32], quantization: Quantization) -> Vec<(i32, f16)> {
    let max = if quantization.bits == Bits::Q8 { 127.0 } else { 7.0 };
    row.chunks(quantization.group)
        .flat_map(|group| {
            let largest = group.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            let scale = f16::from_f32(largest / max);
            group.iter().map(move |x| {
                let divided = if scale.to_f32() == 0.0 { 0.0 } else { x / scale.to_f32() };
                (divided.round_ties_even().clamp(-max, max) as i32, scale)
            })
        })
        .collect()
}

/// The index of a row's element within a tiled matrix of `width` elements per row.
fn tiled_index(rows: usize, width: usize, row: usize, at: usize) -> usize {
    let first = row - row % TILE_ROWS;
    let lanes = TILE_ROWS.min(rows - first);
    first * width + at * lanes + row - first
}

/// The stored integer of an input, read from the packed data.
fn stored_integer(weight: &Weight, row: usize, input: usize, quantization: Quantization) -> i32 {
    let (rows, inputs) = (weight.shape[0], weight.shape[1]);
    let byte = |width: usize, at: usize| weight.data[4 * tiled_index(rows, width, row, at / 4) + at % 4];
    match quantization.bits {
        Bits::Q8 => i32::from(byte(inputs.div_ceil(4), input) as i8),
        Bits::Q4 => {
            let byte = byte(inputs.div_ceil(32) * 4, input / 32 * 16 + input % 16);
            let nibble = if input % 32 < 16 { byte & 15 } else { byte >> 4 };
            i32::from(nibble) - 8
        }
    }
}

proptest! {
    #[test]
    fn the_layout_is_as_defined(
        rows in 1usize..40,
        inputs in 1usize..200,
        group in prop::sample::select(vec![32usize, 64, 96, 128]),
        q8 in any::<bool>(),
        seed in prop::collection::vec(-4.0f32..4.0, 800),
    ) {
        let quantization = Quantization { bits: if q8 { Bits::Q8 } else { Bits::Q4 }, group };
        let values: Vec<f32> = (0..rows * inputs).map(|i| seed[i % 800] * ((i % 800) as f32 * 0.01).exp()).collect();
        let weight = quantize("w", &values, [rows, inputs], quantization).unwrap();
        let scales = weight.scales.clone().unwrap();
        prop_assert_eq!(scales.len(), rows * inputs.div_ceil(group) * 2);
        let decoded = weight.to_f32().unwrap();
        for (row, values) in values.chunks(inputs).enumerate() {
            for (input, (value, scale)) in expected_values(values, quantization).into_iter().enumerate() {
                prop_assert_eq!(stored_integer(&weight, row, input, quantization), value);
                let at = 2 * tiled_index(rows, inputs.div_ceil(group), row, input / group);
                prop_assert_eq!(f16::from_le_bytes([scales[at], scales[at + 1]]), scale);
                prop_assert_eq!(decoded[row * inputs + input], value as f32 * scale.to_f32());
            }
        }
    }
}

#[test]
fn padding_is_eight() {
    let quantization = Quantization { bits: Bits::Q4, group: 32 };
    let weight = quantize("w", &[7.0; 33], [1, 33], quantization).unwrap();
    assert_eq!(weight.data.len(), 2 * Q4_CHUNK / 2);
    assert_eq!(&weight.data[..16], [0xFF; 16]);
    assert_eq!(weight.data[16], 0x8F);
    assert_eq!(&weight.data[17..], [0x88; 15]);
}

#[test]
fn halves_round_to_even() {
    let quantization = Quantization { bits: Bits::Q8, group: 32 };
    let weight = quantize("w", &[127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [1, 6], quantization).unwrap();
    let values: Vec<i8> = weight.data.iter().map(|byte| *byte as i8).collect();
    assert_eq!(values[..6], [127, 0, 2, 2, 0, -2]);
    assert_eq!(values[6..], [0, 0], "a row is whole words");
}

#[test]
fn zeros_and_tiny_values_stay_finite() {
    for bits in [Bits::Q8, Bits::Q4] {
        let quantization = Quantization { bits, group: 32 };
        for tiny in [0.0, -0.0, f32::MIN_POSITIVE, 1e-45, 1e-9, 1e-7, 3e-5] {
            let weight = quantize("w", &[tiny, -tiny, 0.0, tiny / 2.0], [2, 2], quantization).unwrap();
            for (found, expected) in weight.to_f32().unwrap().iter().zip([tiny, -tiny, 0.0, tiny / 2.0]) {
                assert!((found - expected).abs() < 4e-6, "{expected} became {found}");
            }
        }
    }
}

#[test]
fn rows_without_a_finite_scale_are_refused() {
    let quantization = Quantization { bits: Bits::Q8, group: 32 };
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65520.0 * 127.0, f32::MAX] {
        let mut values = [0.0; 40];
        values[33] = value;
        let error = quantize("name", &values, [1, 40], quantization).unwrap_err().to_string();
        assert!(error.contains("\"name\"") && error.contains("row 0") && error.contains("32..40"), "{error}");
    }
    quantize("w", &[65504.0 * 127.0], [1, 1], quantization).unwrap();
    assert!(quantize("w", &[0.0; 3], [2, 2], quantization).is_err());
    assert!(quantize("w", &[], [usize::MAX, 2], quantization).is_err());
    assert!(quantize("w", &[0.0], [1, 1], Quantization { bits: Bits::Q8, group: 0 }).is_err());
    assert!(quantize("w", &[], [0, 4], quantization).unwrap().to_f32().unwrap().is_empty());
}

#[test]
fn a_weight_of_inconsistent_lengths_is_refused() {
    let quantization = Quantization { bits: Bits::Q8, group: 32 };
    let good = quantize("w", &[1.0; 64], [2, 32], quantization).unwrap();
    let mut shape = good.clone();
    shape.shape = vec![2, 33];
    let mut scales = good.clone();
    scales.scales = None;
    let mut flat = good.clone();
    flat.shape = vec![64];
    let mut huge = good;
    huge.shape = vec![usize::MAX, usize::MAX];
    for weight in [shape, scales, flat, huge] {
        assert!(weight.to_f32().is_err());
    }
}
