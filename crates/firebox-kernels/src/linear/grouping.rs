//! The layout of weights of small integers with a scale for every group of inputs.

/// Inputs whose nibbles are stored together: byte `i` of 16 holds input `i` in its low nibble and input `i +
/// 16` in its high nibble.
pub const NIBBLE_CHUNK: usize = 32;

/// Rows of a tile of a [tiled](Grouping::tiled) weight.
pub const TILE_ROWS: usize = 16;

/// Layout of a weight of small integers: rows of packed 32-bit words, and one f16 scale for every group of
/// inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grouping {
    /// Inputs of a row; the last group may be shorter.
    pub inputs: usize,
    /// Inputs that share a scale; a multiple of [`NIBBLE_CHUNK`] in tiled weights.
    pub group: usize,
    /// Nibbles offset by eight, in whole chunks of [`NIBBLE_CHUNK`]; otherwise signed bytes.
    pub four_bits: bool,
    /// Whether rows are interleaved in tiles of [`TILE_ROWS`]: the first words of all rows of a tile, then
    /// the second ones; scales likewise. The last tile has the remaining rows. Otherwise rows are contiguous.
    ///
    /// The CPU multiplies with tiles and transposes other layouts for every product. Accelerators need
    /// contiguous rows: see [`in_rows`](super::in_rows).
    pub tiled: bool,
}

impl Grouping {
    /// Returns the least number of 32-bit words of a row.
    pub fn row_words(&self) -> usize {
        if self.four_bits {
            self.inputs.div_ceil(NIBBLE_CHUNK) * NIBBLE_CHUNK / 8
        } else {
            self.inputs.div_ceil(4)
        }
    }

    /// Returns the number of scales of a row.
    pub fn groups(&self) -> usize {
        self.inputs.div_ceil(self.group)
    }
}

/// Location of a row's elements, in a tile or contiguous; see [`Grouping::tiled`].
#[derive(Clone, Copy)]
pub(super) struct RowIndices {
    /// First row of the tile.
    first: usize,
    lane: usize,
    lanes: usize,
}

impl RowIndices {
    pub fn in_tile(index: usize, rows: usize) -> Self {
        let lane = index % TILE_ROWS;
        let first = index - lane;
        Self { first, lane, lanes: TILE_ROWS.min(rows - first) }
    }

    pub fn contiguous(index: usize) -> Self {
        Self { first: index, lane: 0, lanes: 1 }
    }

    /// Returns the indices of the row's elements, for rows of `width` elements.
    pub fn indices(self, width: usize) -> impl Iterator<Item = usize> {
        (0..width).map(move |at| self.first * width + at * self.lanes + self.lane)
    }
}
