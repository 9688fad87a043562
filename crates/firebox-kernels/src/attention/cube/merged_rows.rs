//! The kernel that merges the parts of rows.

use burn_cubecl::cubecl::{self, prelude::*};

use super::blocks::UNSEEN;
use super::part_table::ROW_WORDS;
use super::parts_of_rows::{AHEAD, How, UNITS};
use crate::cube::magnitude;

/// A cube for every head of every row: lines of units merge the row's parts one after the other, then each other's sums.
#[cube(launch)]
pub(super) fn merge_parts_of_rows<N: Size>(
    parts: &[Vector<f32, N>],
    table: &[u32],
    output: &mut [Vector<f32, N>],
    heads: u32,
    quads: u32,
    nothing: f32,
    #[comptime] how: How,
) {
    let columns = comptime!(how.columns);
    let lines = comptime!(UNITS / columns);
    let head = CUBE_POS_X;
    let of_row = 1 + CUBE_POS_Y * comptime!(ROW_WORDS as u32);
    let row = table[of_row as usize];
    let first = table[(of_row + 1) as usize];
    let count = table[(of_row + 2) as usize];
    let apart = heads * (quads + 1);
    let start = (first * heads + head) * (quads + 1);

    let mut highest = UNSEEN.runtime();
    let mut at = UNIT_POS;
    while at < count {
        let sum = parts[(start + at * apart + quads) as usize].extract(0usize);
        highest = max(highest, sum);
        at += UNITS;
    }
    let mut highs = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    let plane = comptime!(if UNITS.is_multiple_of(how.plane) { how.plane } else { 1 });
    if comptime!(plane > 1) {
        highest = plane_max(highest);
        if UNIT_POS.is_multiple_of(plane) {
            highs[(UNIT_POS / plane) as usize] = highest;
        }
    } else {
        highs[UNIT_POS as usize] = highest;
    }
    sync_cube();
    for other in 0..comptime!(UNITS / plane) {
        highest = max(highest, highs[other as usize]);
    }

    let (column, line) = (UNIT_POS % columns, UNIT_POS / columns);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut total = 0.0f32;
    let mut from = line;
    while column < quads && from < count {
        let mut numbers = Array::<Vector<f32, N>>::new(AHEAD);
        let mut logarithms = Array::<f32>::new(AHEAD);
        #[unroll]
        for ahead in 0..AHEAD {
            let record = start + min(from + ahead as u32 * lines, count - 1) * apart;
            numbers[ahead] = parts[(record + column) as usize];
            logarithms[ahead] = parts[(record + quads) as usize].extract(0usize);
        }
        #[unroll]
        for ahead in 0..AHEAD {
            // A part without weight may hold what is no number. By its bits, because one whose weight is no number has to
            // come through.
            let logarithm = logarithms[ahead];
            if from + ahead as u32 * lines < count && u32::reinterpret(logarithm) != u32::reinterpret(nothing)
            {
                let weight = (logarithm - highest).exp();
                total += weight;
                sum = fma(numbers[ahead], Vector::new(weight), sum);
            }
        }
        from += AHEAD as u32 * lines;
    }
    let mut sums = Shared::<[Vector<f32, N>]>::new_slice(comptime!(UNITS as usize));
    let mut totals = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    sums[UNIT_POS as usize] = sum;
    totals[UNIT_POS as usize] = total;
    sync_cube();
    if line == 0 && column < quads {
        for other in 1..lines {
            sum += sums[(other * columns + column) as usize];
            total += totals[(other * columns + column) as usize];
        }
        if magnitude(total) != 0u32 {
            sum /= Vector::new(total);
        }
        output[((row * heads + head) * quads + column) as usize] = sum;
    }
}
