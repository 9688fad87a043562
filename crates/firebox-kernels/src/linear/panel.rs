//! Sixteen outputs of a weight, unpacked for multiplication. Lanes are outputs, so an activation meets
//! sixteen of them at once and no sum runs across lanes.

use super::arithmetic::Arithmetic;
use super::row_block::RowBlock;
use crate::simd::{COLUMN_BYTES, Integers, Kernel, LANES, Lanes};

/// Outputs of a panel.
pub(super) const OUTPUTS: usize = LANES;

/// Outputs that are multiplied together: two panels, so that each loaded activation is used twice.
pub(super) const TILE_OUTPUTS: usize = 2 * OUTPUTS;

/// Inputs that are unpacked at a time: two panels of them stay in the L1 cache.
pub(super) const BLOCK: usize = 256;

/// Inputs that share a scale of the activations; packed weights come in whole chunks.
pub(super) const CHUNK: usize = 32;

/// Chunks of a block.
pub(super) const BLOCK_CHUNKS: usize = BLOCK / CHUNK;

/// Vectors of consecutive inputs in a block.
pub(super) const BLOCK_STEPS: usize = BLOCK / LANES;

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Groups of four inputs in a chunk, one word of bytes each.
pub(super) const QUADS: usize = CHUNK / 4;

/// Groups of four inputs in half a chunk.
pub(super) const HALF_QUADS: usize = QUADS / 2;

/// Sixteen floats, aligned to a cache line.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Floats(pub [f32; LANES]);

/// Four bytes for each of sixteen outputs.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Words(pub [u32; LANES]);

/// The floats of one block of inputs for sixteen outputs.
///
/// Inputs are interleaved: `inputs[lane][step]` is input `16 * step + lane`. A vector of consecutive inputs
/// adds them up in the same order, lane by lane, so a single row multiplied without a panel gives the same
/// bits. Interleaving also keeps chains of additions short.
#[derive(Clone)]
pub(super) struct FloatPanel {
    pub inputs: [[Floats; BLOCK_STEPS]; LANES],
}

impl Default for FloatPanel {
    fn default() -> Self {
        Self { inputs: [[Floats::default(); BLOCK_STEPS]; LANES] }
    }
}

/// The integers of one block of inputs for sixteen outputs, with their scales.
#[derive(Clone)]
pub(super) struct IntegerPanel {
    /// Unsigned bytes.
    pub quads: [[Words; QUADS]; BLOCK_CHUNKS],
    /// Scales of the two halves of every chunk; only the first is used if a chunk has one scale.
    pub scales: [[Floats; 2]; BLOCK_CHUNKS],
    /// Minimums that are added to every number, in formats that have them: for the same parts as scales.
    pub minimum: [[Floats; 2]; BLOCK_CHUNKS],
}

impl Default for IntegerPanel {
    fn default() -> Self {
        Self {
            quads: [[Words::default(); QUADS]; BLOCK_CHUNKS],
            scales: [[Floats::default(); 2]; BLOCK_CHUNKS],
            minimum: [[Floats::default(); 2]; BLOCK_CHUNKS],
        }
    }
}

impl FloatPanel {
    #[inline(always)]
    pub fn set<L: Lanes>(&mut self, input: usize, numbers: L) {
        self.inputs[input % LANES][input / LANES] = Floats::from_lanes(numbers);
    }
}

/// A range of bytes of sixteen consecutive rows.
#[derive(Clone, Copy)]
pub(super) struct Strip<'a> {
    bytes: &'a [u8],
    stride: usize,
    width: usize,
    ahead: *const u8,
}

impl<'a> Strip<'a> {
    /// Takes `width` bytes from `offset` on, of sixteen rows of `stride` bytes. The next tile starts `next`
    /// rows further on and is prefetched.
    #[inline(always)]
    pub fn new(rows: &'a [u8], row: usize, stride: usize, offset: usize, width: usize, next: usize) -> Self {
        let start = row * stride + offset;
        Self {
            bytes: &rows[start..][..(OUTPUTS - 1) * stride + width],
            stride,
            width,
            ahead: rows.as_ptr().wrapping_add((row + next) * stride + OUTPUTS * offset),
        }
    }

    /// Returns sixteen bytes of every row from `at` on, transposed to columns.
    ///
    /// Prefetches as many bytes of the next tile in memory order, which is faster than the order of
    /// unpacking.
    #[inline(always)]
    pub fn columns<L: Lanes>(&self, at: usize) -> [L::Words; 4] {
        for line in 0..OUTPUTS * COLUMN_BYTES / CACHE_LINE {
            L::prefetch(self.ahead.wrapping_add(OUTPUTS * at + line * CACHE_LINE));
        }
        L::columns(&self.bytes[at..], self.stride)
    }

    /// Returns sixty-four bytes of every row, as four times sixteen.
    #[inline(always)]
    pub fn wide_columns<L: Lanes>(&self, at: usize) -> [[L::Words; 4]; 4] {
        for line in 0..4 * OUTPUTS * COLUMN_BYTES / CACHE_LINE {
            L::prefetch(self.ahead.wrapping_add(OUTPUTS * at + line * CACHE_LINE));
        }
        L::wide_columns(&self.bytes[at..], self.stride)
    }

    /// [`columns`](Self::columns) at the end of the rows, padded with zeros.
    #[inline(always)]
    pub fn last_columns<L: Lanes>(&self, at: usize) -> [L::Words; 4] {
        let mut ends = [[0; COLUMN_BYTES]; OUTPUTS];
        for (row, end) in ends.iter_mut().enumerate() {
            let rest = &self.bytes[row * self.stride..][at..self.width];
            end[..rest.len()].copy_from_slice(rest);
        }
        L::columns(ends.as_flattened(), COLUMN_BYTES)
    }

    /// Returns an f16 of every row as floats.
    #[inline(always)]
    pub fn halves<L: Lanes>(&self, at: usize) -> L {
        let mut bits = [0; LANES];
        for (row, bits) in bits.iter_mut().enumerate() {
            let at = at + row * self.stride;
            *bits = u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]);
        }
        L::from_f16(&bits)
    }

    /// Returns a power of two of every row, halved, from its biased exponent in one byte.
    #[inline(always)]
    pub fn half_powers<L: Lanes>(&self, at: usize) -> L {
        let mut bits = [0; LANES];
        for (row, bits) in bits.iter_mut().enumerate() {
            *bits = match self.bytes[at + row * self.stride] {
                // Subnormal numbers.
                exponent @ 0..=1 => 0x0020_0000 << exponent,
                exponent => u32::from(exponent - 1) << 23,
            };
        }
        L::as_floats(L::load_words(&bits))
    }

    /// Returns a word of every row.
    #[inline(always)]
    pub fn words<L: Lanes>(&self, at: usize) -> L::Words {
        let mut words = [0; LANES];
        for (row, word) in words.iter_mut().enumerate() {
            if let Some(bytes) = self.bytes[at + row * self.stride..].first_chunk() {
                *word = u32::from_le_bytes(*bytes);
            }
        }
        L::load_words(&words)
    }
}

/// A weight of `[outputs, inputs]` that unpacks to floats.
pub(super) trait FloatRows: Sync {
    /// Unpacks one block of sixteen rows from `row` on, with zeros beyond the last input.
    fn unpack<L: Lanes>(&self, row: usize, block: usize, panel: &mut FloatPanel);

    /// Returns the lane-wise sums of products of one block of a row with `x`. Inputs beyond the last are
    /// zero.
    fn block_sums<L: Lanes>(&self, row: usize, block: usize, x: &[[f32; LANES]]) -> L;
}

/// The destination of an unpacked block of integers.
pub(super) trait UnpackTarget<L: Lanes> {
    /// Rows of a tile.
    const ROWS: usize;

    /// Takes four unsigned bytes of every output at a time, for half a chunk.
    fn bytes(&mut self, chunk: usize, half: usize, quads: [L::Words; HALF_QUADS]);
    /// Takes the scale of a chunk or of one of its halves.
    fn scale(&mut self, chunk: usize, half: usize, scale: L);
    /// Takes the minimum that is added to every number of a chunk or of one of its halves.
    fn minimum(&mut self, chunk: usize, half: usize, minimum: L);
}

impl<L: Lanes> UnpackTarget<L> for IntegerPanel {
    const ROWS: usize = TILE_OUTPUTS;

    #[inline(always)]
    fn bytes(&mut self, chunk: usize, half: usize, quads: [L::Words; HALF_QUADS]) {
        let places = &mut self.quads[chunk][half * HALF_QUADS..][..HALF_QUADS];
        for (place, quad) in places.iter_mut().zip(quads) {
            *place = Words::from_words::<L>(quad);
        }
    }

    #[inline(always)]
    fn scale(&mut self, chunk: usize, half: usize, scale: L) {
        self.scales[chunk][half] = Floats::from_lanes(scale);
    }

    #[inline(always)]
    fn minimum(&mut self, chunk: usize, half: usize, minimum: L) {
        self.minimum[chunk][half] = Floats::from_lanes(minimum);
    }
}

/// Bytes between a read and its prefetch: about what arrives during the latency of the memory.
pub(super) const PREFETCH_DISTANCE: usize = 8192;

/// Prefetches as many bytes, [`PREFETCH_DISTANCE`] further on.
#[inline(always)]
pub(super) fn prefetch_ahead<L: Lanes>(bytes: &[u8]) {
    for line in 0..bytes.len().div_ceil(CACHE_LINE) {
        L::prefetch(bytes.as_ptr().wrapping_add(PREFETCH_DISTANCE + line * CACHE_LINE));
    }
}

/// A weight of `[outputs, inputs]` that unpacks to small integers with scales.
pub(super) trait IntegerRows: Sync {
    type Arithmetic: Arithmetic;

    /// The byte that stands for zero, or for the minimum if there is one.
    const ZERO: i32;

    fn inputs(&self) -> usize;

    /// Returns one block of a row, in formats with [row blocks](Arithmetic::ROW_BLOCKS).
    #[inline(always)]
    fn row_block<L: Lanes>(&self, _row: usize, _block: usize) -> RowBlock<L> {
        RowBlock::zero()
    }

    /// Unpacks one block of sixteen rows from `row` on. Integers beyond the last input may be anything,
    /// because the activations there are zero.
    fn unpack<L: Lanes, U: UnpackTarget<L>>(&self, row: usize, block: usize, unpacked: &mut U);
}

/// Unpacks one block of sixteen rows to a panel.
pub(super) struct UnpackPanel<'a, W, P> {
    pub weight: &'a W,
    pub row: usize,
    pub block: usize,
    pub panel: &'a mut P,
}

impl<W: FloatRows> Kernel for UnpackPanel<'_, W, FloatPanel> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.weight.unpack::<L>(self.row, self.block, self.panel);
    }
}

impl<W: IntegerRows> Kernel for UnpackPanel<'_, W, IntegerPanel> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.weight.unpack::<L, _>(self.row, self.block, self.panel);
    }
}

impl Floats {
    #[inline(always)]
    pub fn from_lanes<L: Lanes>(lanes: L) -> Self {
        Self(lanes.store())
    }

    #[inline(always)]
    pub fn lanes<L: Lanes>(&self) -> L {
        L::load(&self.0)
    }
}

impl Words {
    #[inline(always)]
    pub fn from_words<L: Integers>(words: L::Words) -> Self {
        Self(L::store_words(words))
    }

    #[inline(always)]
    pub fn words<L: Integers>(&self) -> L::Words {
        L::load_words(&self.0)
    }
}

/// Returns the low and the high nibbles of every byte.
#[inline(always)]
pub(super) fn nibbles<L: Lanes>(columns: [L::Words; 4]) -> ([L::Words; 4], [L::Words; 4]) {
    let mask = L::splat_word(0x0F0F_0F0F);
    let (mut low, mut high) = (columns, columns);
    for k in 0..4 {
        low[k] = L::and(columns[k], mask);
        high[k] = L::and(L::shr::<4>(columns[k]), mask);
    }
    (low, high)
}

/// Unpacks the nibbles of sixteen bytes of every row as a chunk: low nibbles are its first sixteen inputs.
#[inline(always)]
pub(super) fn nibble_chunk<L: Lanes>(
    columns: [L::Words; 4],
    chunk: usize,
    unpacked: &mut impl UnpackTarget<L>,
) {
    let (low, high) = nibbles::<L>(columns);
    unpacked.bytes(chunk, 0, low);
    unpacked.bytes(chunk, 1, high);
}

/// Converts signed bytes to unsigned ones by adding 128.
#[inline(always)]
pub(super) fn signed_bytes<L: Lanes>(columns: [L::Words; 4]) -> [L::Words; 4] {
    let turn = L::splat_word(0x8080_8080);
    let mut bytes = columns;
    for k in 0..4 {
        bytes[k] = L::xor(columns[k], turn);
    }
    bytes
}
