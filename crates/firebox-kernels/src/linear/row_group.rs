//! Groups of rows of integer activations that are multiplied together.

use super::panel::QUADS;

/// Rows of all groups but the last: as many as two panels meet at once on AVX-512.
const GROUP_ROWS: usize = 6;

/// Most rows of the last or only group: as many as a tile meets at once.
pub(super) const MAX_GROUP_ROWS: usize = 8;

/// Rows of activations that are multiplied together. The chunks of different rows that meet the same weights
/// are adjacent, because there are too few registers for a pointer to every row.
#[derive(Clone, Copy)]
pub(super) struct RowGroup<'a> {
    /// The first row.
    pub first: usize,
    pub rows: usize,
    /// The first chunk of every row, then the second ones.
    pub integers: &'a [QuantizedChunk],
}

/// One chunk of a row, rounded to integers.
#[derive(Clone, Copy, Default)]
pub(super) struct QuantizedChunk {
    /// The integers, in the layout of [`Integers::quads`](crate::simd::Integers::quads).
    pub quads: [[u32; 2]; QUADS],
    /// Sums of both halves, by which a zero point of the weights is multiplied.
    pub sums: [i32; 2],
    /// NaN if an activation is infinite or NaN.
    pub scale: f32,
}

impl QuantizedChunk {
    /// Returns the sum of both halves. It may wrap if an activation is NaN, which the scale then says.
    #[inline(always)]
    pub fn sum(&self) -> i32 {
        self.sums[0].wrapping_add(self.sums[1])
    }

    /// Returns the products with a weight's zero point, negated.
    #[inline(always)]
    pub fn offset(&self, zero: i32) -> u32 {
        self.sum().wrapping_mul(-zero) as u32
    }

    /// [`offset`](Self::offset) of half a chunk.
    #[inline(always)]
    pub fn half_offset(&self, zero: i32, half: usize) -> u32 {
        self.sums[half].wrapping_mul(-zero) as u32
    }
}

impl<'a> RowGroup<'a> {
    /// Returns the chunks of `ROWS` rows from `row` on, starting at chunk `from`.
    #[inline(always)]
    pub fn chunks<const ROWS: usize>(
        self,
        row: usize,
        from: usize,
    ) -> impl Iterator<Item = &'a [QuantizedChunk; ROWS]> {
        let chunks = self.integers.get(from * self.rows..).unwrap_or_default();
        chunks.chunks_exact(self.rows).map_while(move |chunk| chunk[row..].first_chunk())
    }
}

/// Returns the first row and the number of rows of every group.
pub(super) fn row_groups(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let whole = rows.saturating_sub(MAX_GROUP_ROWS).div_ceil(GROUP_ROWS);
    let last = rows - whole * GROUP_ROWS;
    (0..whole)
        .map(|few| (few * GROUP_ROWS, GROUP_ROWS))
        .chain((last > 0).then_some((whole * GROUP_ROWS, last)))
}
