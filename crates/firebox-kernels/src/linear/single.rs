//! A single row of activations times a weight, the case of decoding: the same sums as with several rows, to the last
//! bit, and nothing between the memory and the multiplication.

use super::activations::{Integers, Quantized};
use super::line::{LINE_CHUNKS, Line};
use super::panel::{
    BLOCK_CHUNKS, BLOCK_STEPS, FloatRows, Floats, HALF_QUADS, IntegerRows, OUTPUTS, Unpacked, Words,
};
use super::product::Place;
use crate::simd::{COLUMN_BYTES, LANES, Lanes};

/// The products of a single row, whose weights are read in the order of the memory and never unpacked.
#[inline(always)]
pub(super) fn float_row<L: Lanes, W: FloatRows>(
    x: &[f32],
    weight: &W,
    first: usize,
    weight_rows: usize,
    result: &mut [f32],
) {
    let (steps, _) = x.as_chunks::<LANES>();
    let blocks = steps.len().div_ceil(BLOCK_STEPS);
    // For every block the sums of sixteen outputs, a vector of lanes each.
    let mut sums = vec![[Floats::default(); OUTPUTS]; blocks];
    for at in (0..result.len()).step_by(OUTPUTS) {
        let place = Place::new(first, at, weight_rows);
        for output in 0..OUTPUTS {
            let blocks = steps.chunks(BLOCK_STEPS).zip(&mut sums);
            for (block, (steps, sums)) in blocks.enumerate() {
                let lanes = weight.block_sums::<L>(place.row + output, block, steps);
                sums[output] = Floats::from_lanes(lanes);
            }
        }
        for sums in &sums {
            place.add(result, across::<L>(sums));
        }
    }
}

/// The lanes of sixteen vectors added up in their order, one sum for each vector.
#[inline(always)]
fn across<L: Lanes>(vectors: &[Floats; OUTPUTS]) -> L {
    let bytes = bytemuck::bytes_of(vectors);
    let mut total = L::zero();
    for part in 0..LANES / 4 {
        for column in L::columns(&bytes[part * COLUMN_BYTES..], size_of::<Floats>()) {
            total = total.add(L::as_floats(column));
        }
    }
    total
}

/// What a single row takes from a block while it is unpacked, in place of a panel.
struct RowBlock<'a, L: Lanes> {
    x: &'a [Integers],
    dots: [[L::Words; 2]; BLOCK_CHUNKS],
    scales: [[L; 2]; BLOCK_CHUNKS],
    least: [L; BLOCK_CHUNKS],
}

impl<L: Lanes> RowBlock<'_, L> {
    /// Every chunk of a block overwrites what the one before has left.
    #[inline(always)]
    fn nothing() -> Self {
        Self {
            x: &[],
            dots: [[L::splat_word(0); 2]; BLOCK_CHUNKS],
            scales: [[L::zero(); 2]; BLOCK_CHUNKS],
            least: [L::zero(); BLOCK_CHUNKS],
        }
    }
}

impl<L: Lanes> Unpacked<L> for RowBlock<'_, L> {
    const ROWS: usize = OUTPUTS;

    #[inline(always)]
    fn bytes(&mut self, chunk: usize, half: usize, quads: [L::Words; HALF_QUADS]) {
        let mut sums = [L::splat_word(0); 2];
        let x = &self.x[chunk].quads[half * HALF_QUADS..][..HALF_QUADS];
        for (bytes, x) in quads.into_iter().zip(x) {
            sums = L::dot_quads(sums, bytes, x);
        }
        self.dots[chunk][half] = L::dot(sums);
    }

    #[inline(always)]
    fn scale(&mut self, chunk: usize, half: usize, scale: L) {
        self.scales[chunk][half] = scale;
    }

    #[inline(always)]
    fn least(&mut self, chunk: usize, least: L) {
        self.least[chunk] = least;
    }
}

/// The products of a single row, whose weights are multiplied while they are unpacked.
#[inline(always)]
pub(super) fn integer_row<L: Lanes, W: IntegerRows>(
    x: &Quantized,
    weight: &W,
    first: usize,
    weight_rows: usize,
    result: &mut [f32],
) {
    if let Some(line) = W::LINE
        && L::READS_ROWS
    {
        return line_row::<L, W>(x, weight, line, first, weight_rows, result);
    }
    let mut unpacked = RowBlock::nothing();
    for at in (0..result.len()).step_by(OUTPUTS) {
        let place = Place::new(first, at, weight_rows);
        for (block, integers) in x.integers.chunks(BLOCK_CHUNKS).enumerate() {
            unpacked.x = integers;
            weight.unpack::<L, _>(place.row, block, &mut unpacked);
            let RowBlock { dots, scales, least, .. } = &unpacked;
            let mut sum = L::zero();
            for (chunk, integers) in integers.iter().enumerate() {
                let x_scale = L::splat(x.scales[block * BLOCK_CHUNKS + chunk]);
                let [low, high] = dots[chunk];
                if W::HALVED {
                    for (half, dot) in [low, high].into_iter().enumerate() {
                        let offset = L::splat_word(integers.offset::<W>(half));
                        let dot = L::to_floats(L::add_words(offset, dot)).mul(x_scale);
                        sum = sum.mul_add(dot, scales[chunk][half]);
                    }
                } else {
                    let offset = L::splat_word(integers.offset::<W>(0));
                    let dot = L::add_words(offset, L::add_words(low, high));
                    sum = sum.mul_add(L::to_floats(dot).mul(x_scale), scales[chunk][0]);
                }
                if W::OFFSET {
                    sum = sum.mul_add(x_scale.mul(L::splat(integers.sum() as f32)), least[chunk]);
                }
            }
            place.add(result, sum);
        }
    }
}

/// The products of a single row whose weights are read row by row, in the order of the memory.
#[inline(always)]
fn line_row<L: Lanes, W: IntegerRows>(
    x: &Quantized,
    weight: &W,
    line: Line,
    first: usize,
    weight_rows: usize,
    result: &mut [f32],
) {
    let inputs = x.lines(line);
    // For every line the products of sixteen outputs, a vector of chunks each.
    let mut dots = vec![[Words::default(); OUTPUTS]; inputs.len()];
    let mut unpacked = RowBlock::nothing();
    for at in (0..result.len()).step_by(OUTPUTS) {
        let place = Place::new(first, at, weight_rows);
        for output in 0..OUTPUTS {
            for (index, (input, dots)) in inputs.iter().zip(&mut dots).enumerate() {
                dots[output] =
                    Words::from_words::<L>(weight.line_dots::<L>(place.row + output, index, input));
            }
        }
        let lines = x.integers.chunks(LINE_CHUNKS).zip(&dots);
        for (index, (integers, dots)) in lines.enumerate() {
            let columns = L::wide_columns(bytemuck::cast_slice(dots), size_of::<Words>());
            for (half, integers) in integers.chunks(BLOCK_CHUNKS).enumerate() {
                let block = index * (LINE_CHUNKS / BLOCK_CHUNKS) + half;
                weight.line_scales::<L, _>(place.row, block, &mut unpacked);
                let mut sum = L::zero();
                for (chunk, integers) in integers.iter().enumerate() {
                    let lane = line.lane(half * BLOCK_CHUNKS + chunk);
                    let x_scale = L::splat(x.scales[block * BLOCK_CHUNKS + chunk]);
                    let offset = L::splat_word(integers.offset::<W>(0));
                    let dot = L::add_words(offset, columns[lane / 4][lane % 4]);
                    sum = sum.mul_add(L::to_floats(dot).mul(x_scale), unpacked.scales[chunk][0]);
                }
                place.add(result, sum);
            }
        }
    }
}
