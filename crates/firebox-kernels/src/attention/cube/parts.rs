//! The kernels for what is gathered and for what is stored.

use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::{self, prelude::*};

use super::blocks::{Strides, UNITS, UNSEEN};
use crate::cube::{INFINITE, magnitude};

/// A unit for every element: it weighs all parts, which are few.
#[cube(launch)]
pub(super) fn merge_parts(
    outputs: &[f32],
    sums: &[f32],
    merged: &mut [f32],
    merged_sums: &mut [f32],
    elements: u32,
    head_dim: u32,
    parts: u32,
    all_sums: u32,
    // Where the results begin, in rows times heads.
    into: u32,
    nothing: f32,
) {
    let at = CUBE_POS as u32 * UNITS + UNIT_POS;
    if at < elements {
        let (query, queries) = (at / head_dim, elements / head_dim);
        let mut highest = UNSEEN.runtime();
        for part in 0..all_sums {
            highest = max(highest, sums[(part * queries + query) as usize]);
        }
        let mut total = 0.0f32;
        let mut output = 0.0f32;
        for part in 0..all_sums {
            let sum = sums[(part * queries + query) as usize];
            // A part without weight may hold what is no number. By its bits, because one whose weight is no number has
            // to come through.
            if u32::reinterpret(sum) != u32::reinterpret(nothing) {
                let weight = (sum - highest).exp();
                total += weight;
                if part < parts {
                    output += weight * outputs[(part * elements + at) as usize];
                }
            }
        }
        let mut logarithm = nothing;
        if magnitude(total) != 0u32 {
            output /= total;
            logarithm = highest + total.ln();
        }
        merged[(into * head_dim + at) as usize] = output;
        if at.is_multiple_of(head_dim) {
            merged_sums[(into + query) as usize] = logarithm;
        }
    }
}

/// A unit for every row. Bytes cannot say that there was what is no number, so the scale does.
#[cube(launch)]
pub(super) fn quantize_rows(values: &[f32], words: &mut [u32], scales: &mut [f32], rows: u32, width: u32) {
    let row = CUBE_POS as u32 * UNITS + UNIT_POS;
    if row < rows {
        let mut highest = 0u32;
        for element in 0..width {
            highest = max(highest, magnitude(values[(row * width + element) as usize]));
        }
        let finite = highest < INFINITE;
        let mut scale = f32::reinterpret(highest) / 127.0f32;
        if highest >= INFINITE {
            scale = f32::reinterpret(highest | 0x7FC0_0000u32);
        }
        scales[row as usize] = scale;
        let mut divisor = scale;
        if scale == 0.0f32 {
            divisor = 1.0f32;
        }
        let row_words = width.div_ceil(4);
        for index in 0..row_words {
            let mut word = 0u32;
            #[unroll]
            for byte in 0..4u32 {
                let element = index * 4 + byte;
                if finite && element < width {
                    let number = (values[(row * width + element) as usize] / divisor).round();
                    let number = max(min(number, 127.0f32), -127.0f32);
                    word |= (u32::cast_from(number + 128.0f32) ^ 128) << (8 * byte);
                }
            }
            words[(row * row_words + index) as usize] = word;
        }
    }
}

/// A unit for every number of a side.
#[cube(launch)]
pub(super) fn keep_rows<F: Float>(
    keys: &[f32],
    values: &[f32],
    kept_keys: &mut [F],
    kept_values: &mut [F],
    key_strides: Strides,
    value_strides: Strides,
    elements: u32,
    head_dim: u32,
    // Positions that are added, that there are, and where the added begin.
    count: u32,
    positions: u32,
    at: u32,
    #[define(F)] _kept: ElemType,
) {
    let index = CUBE_POS as u32 * UNITS + UNIT_POS;
    if index < elements {
        let (row, element) = (index / head_dim, index % head_dim);
        let (head, position) = (row / count, row % count);
        let to = ((head * positions + at + position) * head_dim + element) as usize;
        let key = head * key_strides.head + position * key_strides.position + element;
        let value = head * value_strides.head + position * value_strides.position + element;
        kept_keys[to] = F::cast_from(keys[key as usize]);
        kept_values[to] = F::cast_from(values[value as usize]);
    }
}
