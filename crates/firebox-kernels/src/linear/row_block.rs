//! One block of one row of a weight in memory order.

use crate::simd::Lanes;

/// Byte vectors of a block.
pub(super) const BLOCK_VECTORS: usize = 4;

/// Returns the chunk of a quarter of a vector, and which half of the chunk it is. Its sum goes to lane
/// `BLOCK_VECTORS * quarter + vector`.
#[inline(always)]
pub(super) fn half_of_quarter(vector: usize, quarter: usize) -> (usize, usize) {
    (2 * vector + quarter / 2, quarter % 2)
}

/// One block of one row.
pub(super) struct RowBlock<L: Lanes> {
    /// Unsigned bytes in order, none above 127.
    pub bytes: [L::Words; BLOCK_VECTORS],
    /// Scales by lane; see [`half_of_quarter`].
    pub scales: L,
}

impl<L: Lanes> RowBlock<L> {
    /// Returns a block of zeros.
    #[inline(always)]
    pub fn zero() -> Self {
        Self { bytes: [L::splat_word(0); BLOCK_VECTORS], scales: L::zero() }
    }
}
