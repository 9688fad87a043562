//! Products of one row or a few rows of activations, as in decoding: the bits of [`gemm`](super::gemm),
//! without a panel between memory and multiplication.

use super::arithmetic::Arithmetic;
use super::panel::{
    BLOCK_CHUNKS, BLOCK_STEPS, FloatRows, Floats, HALF_QUADS, IntegerRows, OUTPUTS, UnpackTarget,
};
use super::place::Place;
use super::row_group::{QuantizedChunk, RowGroup};
use crate::simd::{COLUMN_BYTES, LANES, Lanes};

/// Product of a single row with a float weight, which is read in memory order and never unpacked.
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
    // For every block, one vector of partial sums for each of sixteen outputs.
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

/// Sums the lanes of each of sixteen vectors in order.
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

/// The target that a block is unpacked into: products with a few rows instead of a panel.
struct RowsBlock<'a, L: Lanes, const ROWS: usize> {
    x: &'a [[QuantizedChunk; ROWS]],
    small: bool,
    dots: [[[L::Words; ROWS]; 2]; BLOCK_CHUNKS],
    scales: [[L; 2]; BLOCK_CHUNKS],
    minimum: [[L; 2]; BLOCK_CHUNKS],
}

impl<L: Lanes, const ROWS: usize> RowsBlock<'_, L, ROWS> {
    /// Initial values; every chunk of a block is overwritten before it is read.
    #[inline(always)]
    fn nothing(small: bool) -> Self {
        Self {
            x: &[],
            small,
            dots: [[[L::splat_word(0); ROWS]; 2]; BLOCK_CHUNKS],
            scales: [[L::zero(); 2]; BLOCK_CHUNKS],
            minimum: [[L::zero(); 2]; BLOCK_CHUNKS],
        }
    }
}

impl<L: Lanes, const ROWS: usize> UnpackTarget<L> for RowsBlock<'_, L, ROWS> {
    const ROWS: usize = OUTPUTS;

    #[inline(always)]
    fn bytes(&mut self, chunk: usize, half: usize, quads: [L::Words; HALF_QUADS]) {
        let mut sums = [[L::splat_word(0); 2]; ROWS];
        for (at, bytes) in quads.into_iter().enumerate() {
            for (sums, x) in sums.iter_mut().zip(&self.x[chunk]) {
                *sums = L::dot_quads(*sums, bytes, &x.quads[half * HALF_QUADS + at], self.small);
            }
        }
        self.dots[chunk][half] = sums.map(L::dot);
    }

    #[inline(always)]
    fn scale(&mut self, chunk: usize, half: usize, scale: L) {
        self.scales[chunk][half] = scale;
    }

    #[inline(always)]
    fn minimum(&mut self, chunk: usize, half: usize, minimum: L) {
        self.minimum[chunk][half] = minimum;
    }
}

/// Products of a few rows with an integer weight, which is multiplied while it is unpacked.
#[inline(always)]
pub(super) fn integer_rows<L: Lanes, W: IntegerRows, const ROWS: usize>(
    x: RowGroup<'_>,
    weight: &W,
    first: usize,
    weight_rows: usize,
    results: &mut [&mut [f32]],
) {
    let (x, _) = x.integers.as_chunks::<ROWS>();
    let mut unpacked = RowsBlock::<L, ROWS>::nothing(W::Arithmetic::I8_ACTIVATIONS);
    for at in (0..results[0].len()).step_by(OUTPUTS) {
        let place = Place::new(first, at, weight_rows);
        for (block, x) in x.chunks(BLOCK_CHUNKS).enumerate() {
            unpacked.x = x;
            weight.unpack::<L, _>(place.row, block, &mut unpacked);
            let RowsBlock { dots, scales, minimum, .. } = &unpacked;
            for i in 0..ROWS {
                let mut sum = L::zero();
                for (chunk, x) in x.iter().enumerate() {
                    let integers = &x[i];
                    let x_scale = L::splat(integers.scale);
                    let [low, high] = [dots[chunk][0][i], dots[chunk][1][i]];
                    if W::Arithmetic::HALF_SCALES {
                        for (half, dot) in [low, high].into_iter().enumerate() {
                            let offset = L::splat_word(integers.half_offset(W::ZERO, half));
                            let dot = L::to_floats(L::add_words(offset, dot)).mul(x_scale);
                            sum = sum.mul_add(dot, scales[chunk][half]);
                        }
                    } else {
                        let offset = L::splat_word(integers.offset(W::ZERO));
                        let dot = L::add_words(offset, L::add_words(low, high));
                        sum = sum.mul_add(L::to_floats(dot).mul(x_scale), scales[chunk][0]);
                    }
                    if W::Arithmetic::HAS_MINIMUM && W::Arithmetic::HALF_SCALES {
                        for (half, x) in integers.sums.into_iter().enumerate() {
                            sum = sum.mul_add(x_scale.mul(L::splat(x as f32)), minimum[chunk][half]);
                        }
                    } else if W::Arithmetic::HAS_MINIMUM {
                        sum = sum.mul_add(x_scale.mul(L::splat(integers.sum() as f32)), minimum[chunk][0]);
                    }
                }
                place.add(results[i], sum);
            }
        }
    }
}
