//! A few outputs of a weight, unpacked for the multiplication: lanes are outputs, so that an activation meets
//! sixteen of them at once and no sum ever runs across lanes.

use super::q6k::RowBlock;
use crate::simd::{COLUMN_BYTES, Integers, LANES, Lanes};

/// Outputs of one panel.
pub(super) const OUTPUTS: usize = LANES;

/// Outputs that are unpacked and multiplied together: two panels, so that a loaded activation is used twice.
pub(super) const TILE_OUTPUTS: usize = 2 * OUTPUTS;

/// Inputs that are unpacked together: what is unpacked for two panels stays in the first-level cache.
pub(super) const BLOCK: usize = 256;

/// Inputs that share a scale of the activations, and the unit that packed weights come in.
pub(super) const CHUNK: usize = 32;

/// Chunks of a block.
pub(super) const BLOCK_CHUNKS: usize = BLOCK / CHUNK;

/// Vectors of consecutive inputs in a block.
pub(super) const BLOCK_STEPS: usize = BLOCK / LANES;

/// Bytes that travel through the caches together.
const CACHE_LINE: usize = 64;

/// Inputs of a chunk by fours: as many bytes as a word has.
pub(super) const QUADS: usize = CHUNK / 4;

/// Those of half a chunk, which is what sixteen bytes or sixteen nibbles are.
pub(super) const HALF_QUADS: usize = QUADS / 2;

/// Sixteen numbers, where a vector load meets one line of the cache.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Floats(pub [f32; LANES]);

/// Four bytes for each of sixteen outputs.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Words(pub [u32; LANES]);

/// The numbers of one block of inputs, for sixteen outputs.
///
/// Inputs are sixteen apart: `inputs[lane][step]` is input `16 * step + lane`. That is how a vector of consecutive
/// inputs adds them up, lane by lane, so that a single row of activations can be multiplied without a panel and give the
/// same bits. It also keeps chains of additions short.
#[derive(Clone)]
pub(super) struct FloatPanel {
    pub inputs: [[Floats; BLOCK_STEPS]; LANES],
}

impl Default for FloatPanel {
    fn default() -> Self {
        Self { inputs: [[Floats::default(); BLOCK_STEPS]; LANES] }
    }
}

/// The integers of one block of inputs and their scales, for sixteen outputs.
#[derive(Clone)]
pub(super) struct IntegerPanel {
    /// Unsigned bytes.
    pub quads: [[Words; QUADS]; BLOCK_CHUNKS],
    /// Of the first and the second half of every chunk; only the first where a chunk has one scale.
    pub scales: [[Floats; 2]; BLOCK_CHUNKS],
    /// Added to every number, in formats that have it.
    pub minimum: [Floats; BLOCK_CHUNKS],
}

impl Default for IntegerPanel {
    fn default() -> Self {
        Self {
            quads: [[Words::default(); QUADS]; BLOCK_CHUNKS],
            scales: [[Floats::default(); 2]; BLOCK_CHUNKS],
            minimum: [Floats::default(); BLOCK_CHUNKS],
        }
    }
}

impl FloatPanel {
    #[inline(always)]
    pub fn set<L: Lanes>(&mut self, input: usize, numbers: L) {
        self.inputs[input % LANES][input / LANES] = Floats::from_lanes(numbers);
    }
}

/// Some bytes of sixteen consecutive rows.
#[derive(Clone, Copy)]
pub(super) struct Strip<'a> {
    bytes: &'a [u8],
    stride: usize,
    width: usize,
    ahead: *const u8,
}

impl<'a> Strip<'a> {
    /// `width` bytes of sixteen rows of `stride` bytes, each from `offset` on. `next` is how many rows further on the
    /// tile begins that comes next.
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

    /// Sixteen bytes of every row from `at` on, turned into columns.
    ///
    /// Asks for as many bytes of the rows that come next, in the order of the memory rather than that of the
    /// unpacking: memory is fastest that way, and what has arrived in a cache can be read in any order.
    #[inline(always)]
    pub fn columns<L: Lanes>(&self, at: usize) -> [L::Words; 4] {
        for line in 0..OUTPUTS * COLUMN_BYTES / CACHE_LINE {
            L::prefetch(self.ahead.wrapping_add(OUTPUTS * at + line * CACHE_LINE));
        }
        L::columns(&self.bytes[at..], self.stride)
    }

    /// Sixty-four bytes of every row, as four times sixteen.
    #[inline(always)]
    pub fn wide_columns<L: Lanes>(&self, at: usize) -> [[L::Words; 4]; 4] {
        for line in 0..4 * OUTPUTS * COLUMN_BYTES / CACHE_LINE {
            L::prefetch(self.ahead.wrapping_add(OUTPUTS * at + line * CACHE_LINE));
        }
        L::wide_columns(&self.bytes[at..], self.stride)
    }

    /// The same where rows have fewer bytes left: zeros follow those.
    #[inline(always)]
    pub fn last_columns<L: Lanes>(&self, at: usize) -> [L::Words; 4] {
        let mut ends = [[0; COLUMN_BYTES]; OUTPUTS];
        for (row, end) in ends.iter_mut().enumerate() {
            let rest = &self.bytes[row * self.stride..][at..self.width];
            end[..rest.len()].copy_from_slice(rest);
        }
        L::columns(ends.as_flattened(), COLUMN_BYTES)
    }

    /// A half-precision number of every row.
    #[inline(always)]
    pub fn halves<L: Lanes>(&self, at: usize) -> L {
        let mut bits = [0; LANES];
        for (row, bits) in bits.iter_mut().enumerate() {
            let at = at + row * self.stride;
            *bits = u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]);
        }
        L::from_f16(&bits)
    }

    /// A word of every row.
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

/// A weight of `[outputs, inputs]` that unpacks to floating-point numbers.
pub(super) trait FloatRows: Sync {
    /// Unpacks one block of inputs of sixteen rows from `row` on; what lies beyond the last input becomes zero.
    fn unpack<L: Lanes>(&self, row: usize, block: usize, panel: &mut FloatPanel);

    /// The products of one block of a row with so many steps of activations, summed lane by lane. What lies beyond the
    /// last input is zero.
    fn block_sums<L: Lanes>(&self, row: usize, block: usize, x: &[[f32; LANES]]) -> L;
}

/// Where the integers of a block go.
pub(super) trait UnpackTarget<L: Lanes> {
    /// Rows of a tile.
    const ROWS: usize;

    /// Four unsigned bytes of every output at a time, the first or the second half of a chunk's sixteen.
    fn bytes(&mut self, chunk: usize, half: usize, quads: [L::Words; HALF_QUADS]);
    /// The scale of a chunk, or of one of its halves.
    fn scale(&mut self, chunk: usize, half: usize, scale: L);
    /// What is added to every number of a chunk.
    fn minimum(&mut self, chunk: usize, minimum: L);
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
    fn minimum(&mut self, chunk: usize, minimum: L) {
        self.minimum[chunk] = Floats::from_lanes(minimum);
    }
}

/// Bytes between what is read and what is asked for: about what arrives while the memory answers.
pub(super) const PREFETCH_DISTANCE: usize = 8192;

/// Asks for what lies as far behind some bytes as memory takes to answer.
#[inline(always)]
pub(super) fn prefetch_ahead<L: Lanes>(bytes: &[u8]) {
    for line in 0..bytes.len().div_ceil(CACHE_LINE) {
        L::prefetch(bytes.as_ptr().wrapping_add(PREFETCH_DISTANCE + line * CACHE_LINE));
    }
}

/// A weight of `[outputs, inputs]` that unpacks to small integers with scales.
pub(super) trait IntegerRows: Sync {
    /// Whether the halves of a chunk have scales of their own.
    const HALF_SCALES: bool = false;
    /// The byte that stands for zero, or for `minimum` where there is one.
    const ZERO: i32;
    /// Whether something is added to every number.
    const HAS_MINIMUM: bool = false;
    /// Whether it meets small integers, see [`IntegerWidth`](super::activations::IntegerWidth).
    const I8_ACTIVATIONS: bool = false;
    /// Whether a few rows of activations are multiplied with it row by row, see [`q6k`](super::q6k). Such
    /// weights meet small integers, have scales for halves of chunks, and nothing is added to their numbers.
    const ROW_BLOCKS: bool = false;

    fn inputs(&self) -> usize;

    /// One block of a row, where it is `ROW_BLOCKS`.
    #[inline(always)]
    fn row_block<L: Lanes>(&self, _row: usize, _block: usize) -> RowBlock<L> {
        RowBlock::zero()
    }

    /// Unpacks one block of inputs of sixteen rows from `row` on. What lies beyond the last input may be any integer:
    /// activations are zero there.
    fn unpack<L: Lanes, U: UnpackTarget<L>>(&self, row: usize, block: usize, unpacked: &mut U);
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

/// The low and the high nibbles of every byte.
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

/// The nibbles of sixteen bytes of every row as a chunk: low nibbles are its first sixteen inputs.
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

/// Signed bytes, made unsigned by adding 128.
#[inline(always)]
pub(super) fn signed_bytes<L: Lanes>(columns: [L::Words; 4]) -> [L::Words; 4] {
    let turn = L::splat_word(0x8080_8080);
    let mut bytes = columns;
    for k in 0..4 {
        bytes[k] = L::xor(columns[k], turn);
    }
    bytes
}
