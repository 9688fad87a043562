//! Rows of activations times rows of a weight.
//!
//! Every product of an activation row and a weight row is one vector accumulator that runs over the inputs in
//! order and is summed at the end by a fixed tree. How many rows are computed together, by how many threads,
//! and whether a weight is decoded once or again, changes the speed and never the result.

use std::array;

use rayon::prelude::*;

use super::rows::{CHUNK, Rows};
use crate::simd::{Kernel, LANES, Lanes, dispatch};

/// Weight rows that are worked on together: enough accumulators in flight to hide the latency of a fused
/// multiply-add, few enough streams for the prefetcher.
const TILE_OUTPUTS: usize = 4;

/// From this many activation rows on, decoding a weight once into the cache beats decoding it in registers
/// again for every few of them.
const DECODE_ONCE_ROWS: usize = 9;

/// Activation rows that stay in the second-level cache while all weights pass.
const PANEL_ROWS: usize = 64;

/// Multiplications below which a second thread costs more than it gains.
const SINGLE_THREAD_WORK: usize = 1 << 17;

/// `x · weightᵀ`: `x` is `[rows, inputs]` padded with zeros to whole chunks; the result is `[outputs, rows]`.
pub(super) fn multiply<W: Rows>(x: &[f32], rows: usize, weight: &W, outputs: usize) -> Vec<f32> {
    let mut result = vec![0.0; rows * outputs];
    if rows == 0 || outputs == 0 {
        return result;
    }
    let padded = weight.inputs().next_multiple_of(CHUNK);
    let work = rows * outputs * padded;
    let threads = if work < SINGLE_THREAD_WORK { 1 } else { rayon::current_num_threads() };
    // Several pieces for each thread, so that one which is interrupted does not hold up the others.
    let pieces = if threads == 1 { 1 } else { 4 * threads };
    let outputs_per_piece = outputs.div_ceil(pieces).next_multiple_of(TILE_OUTPUTS);
    let compute = |(piece, result): (usize, &mut [f32])| {
        let first = piece * outputs_per_piece;
        dispatch(Piece { x, rows, padded, weight, first, result });
    };
    let pieces = result.par_chunks_mut(outputs_per_piece * rows).enumerate();
    if threads == 1 {
        pieces.with_min_len(usize::MAX).for_each(compute)
    } else {
        pieces.for_each(compute)
    }
    result
}

/// The numbers of a weight, `[outputs, inputs]`; its rows are whole chunks.
pub(super) fn decode<W: Rows>(weight: &W, outputs: usize) -> Vec<f32> {
    let mut values = vec![0.0; outputs * weight.inputs()];
    dispatch(Decode { weight, values: &mut values });
    values
}

struct Decode<'a, W> {
    weight: &'a W,
    values: &'a mut [f32],
}

impl<W: Rows> Kernel for Decode<'_, W> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (row, values) in self.values.chunks_exact_mut(self.weight.inputs()).enumerate() {
            decode_row::<L, W>(self.weight, row, values);
        }
    }
}

#[inline(always)]
fn decode_row<L: Lanes, W: Rows>(weight: &W, row: usize, values: &mut [f32]) {
    for (chunk, values) in values.chunks_exact_mut(CHUNK).enumerate() {
        let (first, second) = weight.chunk::<L>(row, chunk);
        values[..LANES].copy_from_slice(&first.store());
        values[LANES..].copy_from_slice(&second.store());
    }
}

/// The products of all activation rows with some consecutive weight rows.
struct Piece<'a, W> {
    x: &'a [f32],
    rows: usize,
    padded: usize,
    weight: &'a W,
    first: usize,
    /// `[outputs of this piece, rows]`
    result: &'a mut [f32],
}

impl<W: Rows> Kernel for Piece<'_, W> {
    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let outputs = self.result.len() / self.rows;
        let mut decoded =
            vec![0.0; if self.rows < DECODE_ONCE_ROWS { 0 } else { TILE_OUTPUTS * self.padded }];
        for panel in (0..self.rows).step_by(PANEL_ROWS) {
            let panel = panel..self.rows.min(panel + PANEL_ROWS);
            for output in (0..outputs).step_by(TILE_OUTPUTS) {
                // A tile at the end computes its last output more than once rather than differently.
                let tile: [usize; TILE_OUTPUTS] = array::from_fn(|i| (output + i).min(outputs - 1));
                if decoded.is_empty() {
                    let rows = tile.map(|output| self.first + output);
                    let weight = self.weight;
                    self.tile::<L>(panel.clone(), tile, |i, chunk| weight.chunk(rows[i], chunk));
                } else {
                    self.decode::<L>(tile, &mut decoded);
                    let (decoded, padded) = (&decoded, self.padded);
                    self.tile::<L>(panel.clone(), tile, |i, chunk| load::<L>(&decoded[i * padded..], chunk));
                }
            }
        }
    }
}

impl<W: Rows> Piece<'_, W> {
    #[inline(always)]
    fn decode<L: Lanes>(&self, tile: [usize; TILE_OUTPUTS], decoded: &mut [f32]) {
        for (output, decoded) in tile.into_iter().zip(decoded.chunks_exact_mut(self.padded)) {
            decode_row::<L, W>(self.weight, self.first + output, decoded);
        }
    }

    /// All activation rows of a panel with one tile of weight rows.
    #[inline(always)]
    fn tile<L: Lanes>(
        &mut self,
        panel: std::ops::Range<usize>,
        outputs: [usize; TILE_OUTPUTS],
        weight: impl Fn(usize, usize) -> (L, L),
    ) {
        let mut row = panel.start;
        while row + 4 <= panel.end && L::TILE_ROWS >= 4 {
            self.products::<L, 4>(row, outputs, &weight);
            row += 4;
        }
        while row + 2 <= panel.end && L::TILE_ROWS >= 2 {
            self.products::<L, 2>(row, outputs, &weight);
            row += 2;
        }
        while row < panel.end {
            self.products::<L, 1>(row, outputs, &weight);
            row += 1;
        }
    }

    #[inline(always)]
    fn products<L: Lanes, const ROWS: usize>(
        &mut self,
        row: usize,
        outputs: [usize; TILE_OUTPUTS],
        weight: &impl Fn(usize, usize) -> (L, L),
    ) {
        let x: [&[f32]; ROWS] = array::from_fn(|i| &self.x[(row + i) * self.padded..][..self.padded]);
        let mut sums = [[L::zero(); TILE_OUTPUTS]; ROWS];
        for chunk in 0..self.padded / CHUNK {
            let x: [(L, L); ROWS] = array::from_fn(|i| load(x[i], chunk));
            for output in 0..TILE_OUTPUTS {
                let (first, second) = weight(output, chunk);
                for i in 0..ROWS {
                    sums[i][output] = sums[i][output].mul_add(x[i].0, first).mul_add(x[i].1, second);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (output, sum) in outputs.into_iter().zip(sums) {
                self.result[output * self.rows + row + i] = sum.sum();
            }
        }
    }
}

#[inline(always)]
fn load<L: Lanes>(values: &[f32], chunk: usize) -> (L, L) {
    let values = &values[chunk * CHUNK..][..CHUNK];
    let (first, second) = values.split_at(LANES);
    match (first.first_chunk(), second.first_chunk()) {
        (Some(first), Some(second)) => (L::load(first), L::load(second)),
        _ => unreachable!("a chunk is two vectors long"),
    }
}
