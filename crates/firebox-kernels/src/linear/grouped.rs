//! Weights of signed bytes or nibbles with a half-precision scale for every group of inputs.

use super::Grouping;
use super::line::{self, Line, LineInput};
use super::panel::{
    BLOCK, BLOCK_CHUNKS, CHUNK, FloatPanel, FloatRows, HALF_QUADS, IntegerRows, OUTPUTS, Strip, Unpacked,
    nibble_chunk, signed_bytes,
};
use super::plain::{F32, unpack_strip};
use crate::simd::{COLUMN_BYTES, LANES, Lanes, f16_to_f32};

/// Bytes of a chunk of nibbles.
const NIBBLE_BYTES: usize = CHUNK / 2;

/// Rows of packed integers.
pub(super) struct GroupedRows<'a> {
    bytes: &'a [u8],
    /// Bytes from one row to the next.
    stride: usize,
    /// `[outputs, groups]`
    scales: &'a [u16],
    groups: usize,
    grouping: Grouping,
}

impl<'a> GroupedRows<'a> {
    pub fn new(bytes: &'a [u8], stride: usize, scales: &'a [u16], groups: usize, grouping: Grouping) -> Self {
        Self { bytes, stride, scales, groups, grouping }
    }

    fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.stride..][..self.stride]
    }

    fn row_scales(&self, row: usize) -> &'a [u16] {
        &self.scales[row * self.groups..][..self.groups]
    }
}

/// Signed bytes whose groups are whole chunks.
pub(super) struct ByteRows<'a>(pub GroupedRows<'a>);

impl IntegerRows for ByteRows<'_> {
    const ZERO: i32 = 128;
    const LINE: Option<Line> = Some(Line::Bytes);

    fn inputs(&self) -> usize {
        self.0.grouping.inputs
    }

    #[inline(always)]
    fn unpack<L: Lanes, U: Unpacked<L>>(&self, row: usize, block: usize, unpacked: &mut U) {
        let from = block * BLOCK;
        let count = BLOCK.min(self.inputs() - from);
        let strip = Strip::new(self.0.bytes, row, self.0.stride, from, count, U::ROWS);
        let whole = count / COLUMN_BYTES;
        let wide = whole / 4;
        for part in 0..wide {
            let [first, second, third, fourth] = strip.wide_columns::<L>(part * 4 * COLUMN_BYTES);
            unpacked.bytes(2 * part, 0, signed_bytes::<L>(first));
            unpacked.bytes(2 * part, 1, signed_bytes::<L>(second));
            unpacked.bytes(2 * part + 1, 0, signed_bytes::<L>(third));
            unpacked.bytes(2 * part + 1, 1, signed_bytes::<L>(fourth));
        }
        for part in 4 * wide..whole {
            let bytes = signed_bytes::<L>(strip.columns::<L>(part * COLUMN_BYTES));
            unpacked.bytes(part / 2, part % 2, bytes);
        }
        if !count.is_multiple_of(COLUMN_BYTES) {
            let bytes = signed_bytes::<L>(strip.last_columns::<L>(whole * COLUMN_BYTES));
            unpacked.bytes(whole / 2, whole % 2, bytes);
        }
        if count.div_ceil(COLUMN_BYTES) % 2 == 1 {
            // What is left of the chunk meets zeros, but has to be there.
            unpacked.bytes(count / CHUNK, 1, [L::splat_word(0); HALF_QUADS]);
        }
        unpack_scales::<L, U>(&self.0, row, block, unpacked);
    }

    #[inline(always)]
    fn line_dots<L: Lanes, const ROWS: usize>(
        &self,
        row: usize,
        line: usize,
        x: [&LineInput; ROWS],
    ) -> [L::Words; ROWS] {
        line::byte_dots::<L, ROWS>(self.0.row(row), line, x)
    }

    #[inline(always)]
    fn line_scales<L: Lanes, U: Unpacked<L>>(&self, row: usize, block: usize, unpacked: &mut U) {
        unpack_scales::<L, U>(&self.0, row, block, unpacked);
    }
}

/// Nibbles offset by eight whose groups are whole chunks.
pub(super) struct NibbleRows<'a>(pub GroupedRows<'a>);

impl IntegerRows for NibbleRows<'_> {
    const ZERO: i32 = 8;
    const COARSE: bool = true;
    const LINE: Option<Line> = Some(Line::Nibbles);

    fn inputs(&self) -> usize {
        self.0.grouping.inputs
    }

    #[inline(always)]
    fn unpack<L: Lanes, U: Unpacked<L>>(&self, row: usize, block: usize, unpacked: &mut U) {
        // Rows are stored in whole chunks.
        let chunks = BLOCK_CHUNKS.min((self.inputs() - block * BLOCK).div_ceil(CHUNK));
        let offset = block * BLOCK / 2;
        let strip = Strip::new(self.0.bytes, row, self.0.stride, offset, chunks * NIBBLE_BYTES, U::ROWS);
        let wide = chunks / 4;
        for part in 0..wide {
            let [first, second, third, fourth] = strip.wide_columns::<L>(part * 4 * NIBBLE_BYTES);
            nibble_chunk::<L>(first, 4 * part, unpacked);
            nibble_chunk::<L>(second, 4 * part + 1, unpacked);
            nibble_chunk::<L>(third, 4 * part + 2, unpacked);
            nibble_chunk::<L>(fourth, 4 * part + 3, unpacked);
        }
        for chunk in 4 * wide..chunks {
            nibble_chunk::<L>(strip.columns::<L>(chunk * NIBBLE_BYTES), chunk, unpacked);
        }
        unpack_scales::<L, U>(&self.0, row, block, unpacked);
    }

    #[inline(always)]
    fn line_dots<L: Lanes, const ROWS: usize>(
        &self,
        row: usize,
        line: usize,
        x: [&LineInput; ROWS],
    ) -> [L::Words; ROWS] {
        line::nibble_dots::<L, ROWS>(self.0.row(row), line, x)
    }

    #[inline(always)]
    fn line_scales<L: Lanes, U: Unpacked<L>>(&self, row: usize, block: usize, unpacked: &mut U) {
        unpack_scales::<L, U>(&self.0, row, block, unpacked);
    }
}

/// The scales of a block's chunks, each of which has one.
#[inline(always)]
fn unpack_scales<L: Lanes, U: Unpacked<L>>(
    weight: &GroupedRows<'_>,
    row: usize,
    block: usize,
    unpacked: &mut U,
) {
    let chunks = BLOCK_CHUNKS.min((weight.grouping.inputs - block * BLOCK).div_ceil(CHUNK));
    let chunks_per_group = weight.grouping.group / CHUNK;
    if chunks_per_group == 1 && chunks == BLOCK_CHUNKS {
        // Eight scales of a row are sixteen bytes.
        let stride = weight.groups * size_of::<u16>();
        let bytes = bytemuck::cast_slice(weight.scales);
        let strip = Strip::new(bytes, row, stride, block * COLUMN_BYTES, COLUMN_BYTES, U::ROWS);
        for (k, column) in strip.columns::<L>(0).into_iter().enumerate() {
            let (even, odd) = L::half_floats(column);
            unpacked.scale(2 * k, 0, even);
            unpacked.scale(2 * k + 1, 0, odd);
        }
        return;
    }
    let (mut last, mut scales) = (None, L::zero());
    for chunk in 0..chunks {
        let group = (block * BLOCK_CHUNKS + chunk) / chunks_per_group;
        if last != Some(group) {
            let mut bits = [0; LANES];
            for (lane, bits) in bits.iter_mut().enumerate() {
                *bits = weight.row_scales(row + lane)[group];
            }
            scales = L::from_f16(&bits);
            last = Some(group);
        }
        unpacked.scale(chunk, 0, scales);
    }
}

/// Integers whose groups are not whole chunks, as the numbers they stand for.
pub(super) struct UnevenRows<'a>(pub GroupedRows<'a>);

impl FloatRows for UnevenRows<'_> {
    #[inline(always)]
    fn unpack<L: Lanes>(&self, row: usize, block: usize, panel: &mut FloatPanel) {
        let from = block * BLOCK;
        let count = BLOCK.min(self.0.grouping.inputs - from);
        let mut numbers = [[0f32; BLOCK]; OUTPUTS];
        for (lane, numbers) in numbers.iter_mut().enumerate() {
            for (number, input) in numbers[..count].iter_mut().zip(from..) {
                *number = self.number(row + lane, input);
            }
        }
        let bytes = bytemuck::cast_slice(numbers.as_flattened());
        let strip = Strip::new(bytes, 0, BLOCK * size_of::<f32>(), 0, count * size_of::<f32>(), 0);
        unpack_strip::<L, F32>(&strip, count, panel);
    }

    #[inline(always)]
    fn block_sums<L: Lanes>(&self, row: usize, block: usize, x: &[[f32; LANES]]) -> L {
        let mut sums = L::zero();
        for (step, x) in x.iter().enumerate() {
            let mut numbers = [0f32; LANES];
            let from = block * BLOCK + step * LANES;
            for (number, input) in numbers.iter_mut().zip(from..self.0.grouping.inputs) {
                *number = self.number(row, input);
            }
            sums = sums.mul_add(L::load(&numbers), L::load(x));
        }
        sums
    }
}

impl UnevenRows<'_> {
    #[inline(always)]
    fn number(&self, row: usize, input: usize) -> f32 {
        let Grouping { group, four_bits, .. } = self.0.grouping;
        let (bytes, scales) = (self.0.row(row), self.0.row_scales(row));
        let integer = if four_bits {
            let (chunk, at) = (input / CHUNK, input % CHUNK);
            let byte = bytes[chunk * NIBBLE_BYTES + at % NIBBLE_BYTES];
            let nibble = if at < NIBBLE_BYTES { byte & 0x0F } else { byte >> 4 };
            nibble as i8 - 8
        } else {
            bytes[input] as i8
        };
        f32::from(integer) * f16_to_f32(scales[input / group])
    }
}
