//! Weights in blocks of 256 inputs with a scale for every sixteen, whose rows are multiplied with a few rows of activations as they
//! lie in the memory: nothing is turned into columns but sums.
//!
//! What a block comes to is added up as [`Lanes::sums`] adds across lanes. Panels add in the same order, see [`SUM_ORDER`], so that
//! the sums are the same to the last bit.

use super::activations::{QuantizedChunk, RowGroup};
use super::gemm::IntegerTile;
use super::panel::{BLOCK_CHUNKS, CHUNK, IntegerRows};
use crate::simd::{LANES, Lanes, VECTOR_BYTES};

/// Vectors of bytes that a block is.
const BLOCK_VECTORS: usize = 4;

/// Rows of the weight whose sums across lanes are found side by side.
const WEIGHT_ROWS: usize = 4;

/// In which order quarters of vectors are added up, and then what comes of the vectors: the first two, the last two, then what
/// those have come to.
pub(super) const SUM_ORDER: [usize; BLOCK_VECTORS] = [0, 2, 1, 3];

/// What a quarter of a vector has: the chunk, and which half of it. Its sum goes to lane `BLOCK_VECTORS * quarter + vector`.
#[inline(always)]
pub(super) fn half_of_quarter(vector: usize, quarter: usize) -> (usize, usize) {
    (2 * vector + quarter / 2, quarter % 2)
}

/// One block of one row.
pub(super) struct RowBlock<L: Lanes> {
    /// Unsigned bytes in their order, none above 127.
    pub bytes: [L::Words; BLOCK_VECTORS],
    /// By lanes, see [`half_of_quarter`].
    pub scales: L,
}

impl<L: Lanes> RowBlock<L> {
    /// Zeros.
    #[inline(always)]
    pub fn zero() -> Self {
        Self { bytes: [L::splat_word(0); BLOCK_VECTORS], scales: L::zero() }
    }
}

/// A block of a row of activations, which are small.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct ActivationBlock {
    integers: [[i8; VECTOR_BYTES]; BLOCK_VECTORS],
    /// By lanes.
    scales: [f32; LANES],
    /// What a weight's zero takes away, by lanes.
    offsets: [u32; LANES],
}

/// The first block of every row, then the second ones.
pub(super) fn activation_blocks<L: Lanes, W: IntegerRows>(x: RowGroup<'_>) -> Vec<ActivationBlock> {
    let nothing = ActivationBlock {
        integers: [[0; VECTOR_BYTES]; BLOCK_VECTORS],
        scales: [0.0; LANES],
        offsets: [0; LANES],
    };
    let mut blocks = vec![nothing; x.integers.len() / BLOCK_CHUNKS];
    for (at, to) in blocks.iter_mut().enumerate() {
        let (block, row) = (at / x.rows, at % x.rows);
        let chunk = |chunk: usize| &x.integers[(block * BLOCK_CHUNKS + chunk) * x.rows + row];
        for (index, to) in to.integers.as_flattened_mut().chunks_exact_mut(CHUNK).enumerate() {
            for (quad, to) in chunk(index).quads.iter().zip(to.as_chunks_mut().0) {
                *to = L::small_integers(quad);
            }
        }
        for lane in 0..LANES {
            let (index, half) = half_of_quarter(lane % BLOCK_VECTORS, lane / BLOCK_VECTORS);
            to.scales[lane] = chunk(index).scale;
            to.offsets[lane] = chunk(index).half_offset(W::ZERO, half);
        }
    }
    blocks
}

/// The products of a few rows.
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
                // The last one again where there are fewer.
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

/// What the lanes of a block come to together, with both panels of a tile: added up as the lanes of a row's block are.
#[inline(always)]
pub(super) fn tile<L: Lanes, W: IntegerRows, const ROWS: usize>(
    tile: &IntegerTile<'_, W>,
    row: usize,
) -> [[L; ROWS]; 2] {
    let (panel0, panel1) = tile.panels;
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
            // There is one: rows are whole blocks.
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

/// What the lanes of a block come to.
#[inline(always)]
fn multiply<L: Lanes>(held: &RowBlock<L>, x: &ActivationBlock) -> L {
    let mut sums = held.bytes;
    for (sums, integers) in sums.iter_mut().zip(&x.integers) {
        *sums = L::dot_bytes(*sums, integers);
    }
    let dots = L::add_words(L::load_words(&x.offsets), L::sums_of_quarters(sums));
    L::to_floats(dots).mul(L::load(&x.scales)).mul(held.scales)
}
