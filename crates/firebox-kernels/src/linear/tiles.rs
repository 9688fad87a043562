//! Rows of activations times rows of a weight.
//!
//! Every product of an activation row and a weight row is one vector accumulator that runs over the inputs in
//! order and is summed at the end by a fixed tree. How many rows are computed together, by how many threads,
//! and whether a weight is decoded once or again, changes the speed and never the result.

use rayon::prelude::*;

use super::rows::{CHUNK, Rows, halves};
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
        let x = x.chunks_exact(padded).map(|row| row.as_chunks().0).collect();
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
    /// The chunks of every row.
    x: Vec<&'a [[f32; CHUNK]]>,
    rows: usize,
    padded: usize,
    weight: &'a W,
    first: usize,
    /// `[outputs of this piece, rows]`
    result: &'a mut [f32],
}

/// Where a tile's weight rows are read from.
///
/// A trait rather than a closure: only what is inlined into a function compiled for the processor's features is
/// compiled for them itself, and closures stay functions of their own.
trait TileRows {
    fn chunk<L: Lanes>(&self, row: usize, chunk: usize) -> (L, L);
}

/// Rows decoded whenever they are read.
struct Encoded<'a, W> {
    weight: &'a W,
    rows: [usize; TILE_OUTPUTS],
}

impl<W: Rows> TileRows for Encoded<'_, W> {
    #[inline(always)]
    fn chunk<L: Lanes>(&self, row: usize, chunk: usize) -> (L, L) {
        // The rows of the next tile follow those of this one, but a row is too short for the processor to notice.
        L::prefetch(self.weight.address(self.rows[row] + TILE_OUTPUTS, chunk));
        self.weight.chunk(self.rows[row], chunk)
    }
}

/// Rows decoded before.
struct Decoded<'a> {
    /// The chunks of all rows, one row after the other.
    chunks: &'a [[f32; CHUNK]],
    chunks_per_row: usize,
}

impl TileRows for Decoded<'_> {
    #[inline(always)]
    fn chunk<L: Lanes>(&self, row: usize, chunk: usize) -> (L, L) {
        load(&self.chunks[row * self.chunks_per_row + chunk])
    }
}

impl<W: Rows> Kernel for Piece<'_, W> {
    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let outputs = self.result.len() / self.rows;
        let mut decoded =
            vec![0.0; if self.rows < DECODE_ONCE_ROWS { 0 } else { TILE_OUTPUTS * self.padded }];
        let mut panel = 0;
        while panel < self.rows {
            let panel_end = self.rows.min(panel + PANEL_ROWS);
            let mut output = 0;
            while output < outputs {
                // A tile at the end computes its last output more than once rather than differently.
                let mut tile = [0; TILE_OUTPUTS];
                let mut rows = [0; TILE_OUTPUTS];
                for i in 0..TILE_OUTPUTS {
                    tile[i] = (output + i).min(outputs - 1);
                    rows[i] = self.first + tile[i];
                }
                if decoded.is_empty() {
                    let source = Encoded { weight: self.weight, rows };
                    self.tile::<L, _>(panel, panel_end, tile, &source);
                } else {
                    for (row, values) in rows.into_iter().zip(decoded.chunks_exact_mut(self.padded)) {
                        decode_row::<L, W>(self.weight, row, values);
                    }
                    let chunks_per_row = self.padded / CHUNK;
                    let source = Decoded { chunks: decoded.as_chunks().0, chunks_per_row };
                    self.tile::<L, _>(panel, panel_end, tile, &source);
                }
                output += TILE_OUTPUTS;
            }
            panel = panel_end;
        }
    }
}

impl<W: Rows> Piece<'_, W> {
    /// The activation rows of a panel with one tile of weight rows.
    #[inline(always)]
    fn tile<L: Lanes, S: TileRows>(
        &mut self,
        from: usize,
        to: usize,
        outputs: [usize; TILE_OUTPUTS],
        source: &S,
    ) {
        let mut row = from;
        while L::TILE_ROWS >= 4 && row + 4 <= to {
            self.products::<L, S, 4>(row, outputs, source);
            row += 4;
        }
        while L::TILE_ROWS >= 2 && row + 2 <= to {
            self.products::<L, S, 2>(row, outputs, source);
            row += 2;
        }
        while row < to {
            self.products::<L, S, 1>(row, outputs, source);
            row += 1;
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A chunk is of all rows at once.
    fn products<L: Lanes, S: TileRows, const ROWS: usize>(
        &mut self,
        row: usize,
        outputs: [usize; TILE_OUTPUTS],
        source: &S,
    ) {
        let mut x: [&[[f32; CHUNK]]; ROWS] = [&[]; ROWS];
        for (i, x) in x.iter_mut().enumerate() {
            *x = self.x[row + i];
        }
        // Four arrays rather than one of arrays: the compiler keeps these in registers.
        let mut sums0 = [L::zero(); ROWS];
        let mut sums1 = [L::zero(); ROWS];
        let mut sums2 = [L::zero(); ROWS];
        let mut sums3 = [L::zero(); ROWS];
        for chunk in 0..self.padded / CHUNK {
            let weight0 = source.chunk::<L>(0, chunk);
            let weight1 = source.chunk::<L>(1, chunk);
            let weight2 = source.chunk::<L>(2, chunk);
            let weight3 = source.chunk::<L>(3, chunk);
            for i in 0..ROWS {
                let (first, second) = load::<L>(&x[i][chunk]);
                sums0[i] = sums0[i].mul_add(first, weight0.0).mul_add(second, weight0.1);
                sums1[i] = sums1[i].mul_add(first, weight1.0).mul_add(second, weight1.1);
                sums2[i] = sums2[i].mul_add(first, weight2.0).mul_add(second, weight2.1);
                sums3[i] = sums3[i].mul_add(first, weight3.0).mul_add(second, weight3.1);
            }
        }
        for (output, sums) in outputs.into_iter().zip([sums0, sums1, sums2, sums3]) {
            for (i, sum) in sums.into_iter().enumerate() {
                self.result[output * self.rows + row + i] = sum.sum();
            }
        }
    }
}

#[inline(always)]
fn load<L: Lanes>(values: &[f32; CHUNK]) -> (L, L) {
    let (first, second) = halves(values);
    (L::load(first), L::load(second))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::rows::PlainRows;
    use crate::simd::on_each_kind;

    struct Check<'a> {
        x: &'a [f32],
        rows: usize,
        weight: &'a [f32],
        inputs: usize,
        outputs: usize,
        name: &'static str,
    }

    impl Kernel for Check<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let Check { x, rows, weight, inputs, outputs, name } = self;
            let mut result = vec![0.0; rows * outputs];
            Piece {
                x: x.chunks_exact(inputs).map(|row| row.as_chunks().0).collect(),
                rows,
                padded: inputs,
                weight: &PlainRows::new(weight, inputs),
                first: 0,
                result: &mut result,
            }
            .run::<L>();
            for output in 0..outputs {
                for row in 0..rows {
                    let terms = x[row * inputs..].iter().zip(&weight[output * inputs..]).take(inputs);
                    let expected: f64 = terms.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    let found = f64::from(result[output * rows + row]);
                    assert!(
                        (found - expected).abs() < 1e-4,
                        "{name}, {rows} rows: {found} instead of {expected}"
                    );
                }
            }
        }
    }

    /// The processor of a test machine takes the widest lanes; others have to be right too.
    #[test]
    fn every_kind_of_lanes_multiplies() {
        let (inputs, outputs) = (96, 7);
        let ramp = |count: usize, step: usize| -> Vec<f32> {
            (0..count).map(|i| (i * step % 23) as f32 / 11.0 - 1.0).collect()
        };
        let weight = ramp(outputs * inputs, 5);
        for rows in [1, 2, 3, 4, 5, 9, 70] {
            let x = ramp(rows * inputs, 7);
            on_each_kind(|name| Check { x: &x, rows, weight: &weight, inputs, outputs, name });
        }
    }
}
