//! The kernels for what is gathered and for what is stored.

use burn_cubecl::cubecl::{self, prelude::*};

use super::blocks::{UNITS, UNSEEN};
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
        merged[at as usize] = output;
        if at.is_multiple_of(head_dim) {
            merged_sums[query as usize] = logarithm;
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
