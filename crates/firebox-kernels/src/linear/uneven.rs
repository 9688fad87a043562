//! Weights of small integers whose groups are not whole chunks, multiplied as floats.

use super::grouping::Grouping;
use super::panel::{BLOCK, CHUNK, FloatPanel, FloatRows, OUTPUTS, Strip};
use super::plain::{F32, unpack_strip};
use crate::simd::{LANES, Lanes, f16_to_f32};

/// Bytes of a chunk of nibbles.
const NIBBLE_BYTES: usize = CHUNK / 2;

/// Contiguous rows of packed integers.
pub(super) struct UnevenRows<'a> {
    bytes: &'a [u8],
    /// Bytes between rows.
    stride: usize,
    /// `[outputs, groups]`
    scales: &'a [u16],
    grouping: Grouping,
}

impl<'a> UnevenRows<'a> {
    /// # Panics
    /// If rows are in tiles, whose groups are whole chunks, or too short.
    pub fn new(bytes: &'a [u8], stride: usize, scales: &'a [u16], grouping: Grouping) -> Self {
        assert!(!grouping.tiled, "the groups of tiles are whole chunks of {CHUNK}: {grouping:?}");
        assert!(stride >= grouping.row_words() * size_of::<u32>(), "rows of {stride} bytes for {grouping:?}");
        Self { bytes, stride, scales, grouping }
    }

    fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.stride..][..self.stride]
    }

    fn row_scales(&self, row: usize) -> &'a [u16] {
        let groups = self.grouping.groups();
        &self.scales[row * groups..][..groups]
    }

    #[inline(always)]
    fn number(&self, row: usize, input: usize) -> f32 {
        let Grouping { group, four_bits, .. } = self.grouping;
        let (bytes, scales) = (self.row(row), self.row_scales(row));
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

impl FloatRows for UnevenRows<'_> {
    #[inline(always)]
    fn unpack<L: Lanes>(&self, row: usize, block: usize, panel: &mut FloatPanel) {
        let from = block * BLOCK;
        let count = BLOCK.min(self.grouping.inputs - from);
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
            for (number, input) in numbers.iter_mut().zip(from..self.grouping.inputs) {
                *number = self.number(row, input);
            }
            sums = sums.mul_add(L::load(&numbers), L::load(x));
        }
        sums
    }
}
