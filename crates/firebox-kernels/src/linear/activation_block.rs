//! Activations in the layout of weights that are multiplied row by row.

use super::panel::{BLOCK_CHUNKS, CHUNK, IntegerRows};
use super::row_block::{BLOCK_VECTORS, half_of_quarter};
use super::row_group::RowGroup;
use crate::simd::{LANES, Lanes, VECTOR_BYTES};

/// One block of a row of 8-bit activations.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct ActivationBlock {
    pub integers: [[i8; VECTOR_BYTES]; BLOCK_VECTORS],
    /// Scales, by lane.
    pub scales: [f32; LANES],
    /// Products of the activations with the weight's zero point, negated, by lane.
    pub offsets: [u32; LANES],
}

/// Returns the first block of every row, then the second ones.
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
