//! Products with blocks of 256 inputs that have a scale for every sixteen (Q6_K). A few rows of activations
//! are multiplied with the rows of the weight in memory order; only the sums are transposed.
//!
//! The sums of a block are added across lanes by [`Lanes::sums`]. Panels add in the same order, see
//! [`SUM_ORDER`], so both give the same bits.

use super::activation_block::ActivationBlock;
use super::arithmetic::Arithmetic;
use super::integer_tile::IntegerTile;
use super::panel::{BLOCK_CHUNKS, IntegerRows};
use super::row_block::{BLOCK_VECTORS, RowBlock, half_of_quarter};
use super::row_group::QuantizedChunk;
use crate::simd::Lanes;

/// Rows of the weight whose sums across lanes are computed together.
const WEIGHT_ROWS: usize = 4;

/// Order in which the quarters of a vector are added, and then the vectors: the first two, the last two, then
/// both sums.
pub(super) const SUM_ORDER: [usize; BLOCK_VECTORS] = [0, 2, 1, 3];

/// Products of a few rows.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // A row of the weight meets all rows.
pub(super) fn rows<L: Lanes, W: IntegerRows, const ROWS: usize>(
    x: &[ActivationBlock],
    weight: &W,
    first: usize,
    results: &mut [&mut [f32]],
) {
    let outputs = results[0].len();
    for at in (0..outputs).step_by(WEIGHT_ROWS) {
        let count = WEIGHT_ROWS.min(outputs - at);
        let mut totals = [[0.0; WEIGHT_ROWS]; ROWS];
        for (block, x) in x.as_chunks::<ROWS>().0.iter().enumerate() {
            let mut products = [[L::zero(); WEIGHT_ROWS]; ROWS];
            for together in 0..WEIGHT_ROWS {
                // Past the last row, the last one is repeated.
                let held = weight.row_block::<L>(first + at + together.min(count - 1), block);
                for i in 0..ROWS {
                    products[i][together] = multiply::<L>(&held, &x[i]);
                }
            }
            for i in 0..ROWS {
                let sums = L::sums(products[i]);
                for together in 0..WEIGHT_ROWS {
                    totals[i][together] += sums[together];
                }
            }
        }
        for (results, totals) in results.iter_mut().zip(totals) {
            for (result, total) in results[at..at + count].iter_mut().zip(totals) {
                *result += total;
            }
        }
    }
}

/// Returns the sums of a block with both panels of a tile, added in the order of [`rows`].
#[inline(always)]
pub(super) fn tile<L: Lanes, A: Arithmetic, const ROWS: usize>(
    tile: &IntegerTile<'_, A>,
    row: usize,
) -> [[L; ROWS]; 2] {
    let [panel0, panel1] = tile.panels;
    let mut chunks = tile.few.chunks::<ROWS>(row, tile.block * BLOCK_CHUNKS);
    let mut x: [Option<&[QuantizedChunk; ROWS]>; BLOCK_CHUNKS] = [None; BLOCK_CHUNKS];
    for chunk in &mut x {
        *chunk = chunks.next();
    }
    let mut of_vectors = [[[L::zero(); ROWS]; 2]; 2];
    for (at, vector) in SUM_ORDER.into_iter().enumerate() {
        let mut of_quarters = [[[L::zero(); ROWS]; 2]; 2];
        for (at, quarter) in SUM_ORDER.into_iter().enumerate() {
            let (chunk, half) = half_of_quarter(vector, quarter);
            // Always present, because rows are whole blocks.
            let Some(x) = x[chunk] else { continue };
            let (dots0, dots1) = tile.dots::<L, ROWS>(chunk, half, x);
            let scale0 = panel0.scales[chunk][half].lanes::<L>();
            let scale1 = panel1.scales[chunk][half].lanes::<L>();
            let [sums0, sums1] = &mut of_quarters[at / 2];
            for i in 0..ROWS {
                let scale = L::splat(x[i].scale);
                sums0[i] = sums0[i].add(L::to_floats(L::dot(dots0[i])).mul(scale).mul(scale0));
                sums1[i] = sums1[i].add(L::to_floats(L::dot(dots1[i])).mul(scale).mul(scale1));
            }
        }
        let [mut whole, second] = of_quarters;
        add(&mut whole, second);
        add(&mut of_vectors[at / 2], whole);
    }
    let [mut whole, second] = of_vectors;
    add(&mut whole, second);
    whole
}

#[inline(always)]
fn add<L: Lanes, const ROWS: usize>(sums: &mut [[L; ROWS]; 2], added: [[L; ROWS]; 2]) {
    for (sums, added) in sums.iter_mut().zip(added) {
        for (sum, added) in sums.iter_mut().zip(added) {
            *sum = sum.add(added);
        }
    }
}

/// Returns the products of a block by lane, before they are added across lanes.
#[inline(always)]
fn multiply<L: Lanes>(held: &RowBlock<L>, x: &ActivationBlock) -> L {
    let mut sums = held.bytes;
    for (sums, integers) in sums.iter_mut().zip(&x.integers) {
        *sums = L::dot_bytes(*sums, integers);
    }
    let dots = L::add_words(L::load_words(&x.offsets), L::sums_of_quarters(sums));
    L::to_floats(dots).mul(L::load(&x.scales)).mul(held.scales)
}
