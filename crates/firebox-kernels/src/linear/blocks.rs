//! The block formats of GGUF files, unpacked in place.

use std::marker::PhantomData;

use super::arithmetic::{Arithmetic, InRowBlocks, Narrow, NarrowWithMinimum, Wide, WideWithMinimum};
use super::panel::{
    BLOCK_CHUNKS, CHUNK, IntegerRows, Strip, UnpackTarget, nibble_chunk, nibbles, prefetch_ahead,
    signed_bytes,
};
use super::row_block::RowBlock;
use crate::simd::{LANES, Lanes, VECTOR_BYTES};

/// A block format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum BlockFormat {
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
    MXFP4,
    IQ4NL,
    IQ4XS,
    Q3K,
    Q2K,
}

impl BlockFormat {
    /// Returns the inputs of a block.
    pub fn inputs(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::MXFP4 | Self::IQ4NL => 32,
            Self::Q4K | Self::Q5K | Self::Q6K | Self::IQ4XS | Self::Q3K | Self::Q2K => 256,
        }
    }

    /// Returns the bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            Self::Q8_0 => Q8_0::BYTES,
            Self::Q4_0 => Q4_0::BYTES,
            Self::Q4_1 => Q4_1::BYTES,
            Self::Q5_0 => Q5_0::BYTES,
            Self::Q5_1 => Q5_1::BYTES,
            Self::Q4K => Q4K::BYTES,
            Self::Q5K => Q5K::BYTES,
            Self::Q6K => Q6K::BYTES,
            Self::MXFP4 => 17,
            Self::IQ4NL => 18,
            Self::IQ4XS => 136,
            Self::Q3K => 110,
            Self::Q2K => 84,
        }
    }
}

/// Layout of a block format.
pub(super) trait Block: Sync {
    type Arithmetic: Arithmetic;

    const BYTES: usize;
    const CHUNKS: usize;
    const ZERO: i32 = 0;

    /// Returns one block of a row, in formats with [row blocks](Arithmetic::ROW_BLOCKS).
    #[inline(always)]
    fn row_block<L: Lanes>(_bytes: &[u8]) -> RowBlock<L> {
        RowBlock::zero()
    }

    /// Unpacks up to [`BLOCK_CHUNKS`] chunks, in whole blocks, of sixteen rows.
    fn unpack<L: Lanes>(strip: &Strip<'_>, chunks: usize, unpacked: &mut impl UnpackTarget<L>);
}

/// Rows of whole blocks.
pub(super) struct BlockRows<'a, B> {
    bytes: &'a [u8],
    inputs: usize,
    format: PhantomData<B>,
}

impl<'a, B: Block> BlockRows<'a, B> {
    pub fn new(bytes: &'a [u8], inputs: usize) -> Self {
        Self { bytes, inputs, format: PhantomData }
    }

    /// Returns the bytes of some chunks.
    #[inline(always)]
    fn bytes_of(chunks: usize) -> usize {
        chunks / B::CHUNKS * B::BYTES
    }
}

impl<B: Block> IntegerRows for BlockRows<'_, B> {
    type Arithmetic = B::Arithmetic;

    const ZERO: i32 = B::ZERO;

    fn inputs(&self) -> usize {
        self.inputs
    }

    #[inline(always)]
    fn unpack<L: Lanes, U: UnpackTarget<L>>(&self, row: usize, block: usize, unpacked: &mut U) {
        let (chunks, first) = (self.inputs / CHUNK, block * BLOCK_CHUNKS);
        let count = BLOCK_CHUNKS.min(chunks - first);
        let (stride, width) = (Self::bytes_of(chunks), Self::bytes_of(count));
        B::unpack::<L>(
            &Strip::new(self.bytes, row, stride, Self::bytes_of(first), width, U::ROWS),
            count,
            unpacked,
        );
    }

    #[inline(always)]
    fn row_block<L: Lanes>(&self, row: usize, block: usize) -> RowBlock<L> {
        let at = row * Self::bytes_of(self.inputs / CHUNK) + block * B::BYTES;
        let bytes = &self.bytes[at..][..B::BYTES];
        prefetch_ahead::<L>(bytes);
        B::row_block(bytes)
    }
}

pub(super) struct Q8_0;
pub(super) struct Q4_0;
pub(super) struct Q4_1;
pub(super) struct Q5_0;
pub(super) struct Q5_1;
pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;

impl Block for Q8_0 {
    type Arithmetic = Wide;

    const BYTES: usize = 34;
    const CHUNKS: usize = 1;
    const ZERO: i32 = 128;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, chunks: usize, unpacked: &mut impl UnpackTarget<L>) {
        for chunk in 0..chunks {
            let at = chunk * Self::BYTES;
            unpacked.scale(chunk, 0, strip.halves::<L>(at));
            for part in 0..2 {
                let columns = strip.columns::<L>(at + 2 + 16 * part);
                unpacked.bytes(chunk, part, signed_bytes::<L>(columns));
            }
        }
    }
}

impl Block for Q4_0 {
    type Arithmetic = Narrow;

    const BYTES: usize = 18;
    const CHUNKS: usize = 1;
    const ZERO: i32 = 8;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, chunks: usize, unpacked: &mut impl UnpackTarget<L>) {
        for chunk in 0..chunks {
            let at = chunk * Self::BYTES;
            unpacked.scale(chunk, 0, strip.halves::<L>(at));
            nibble_chunk::<L>(strip.columns::<L>(at + 2), chunk, unpacked);
        }
    }
}

impl Block for Q4_1 {
    type Arithmetic = NarrowWithMinimum;

    const BYTES: usize = 20;
    const CHUNKS: usize = 1;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, chunks: usize, unpacked: &mut impl UnpackTarget<L>) {
        for chunk in 0..chunks {
            let at = chunk * Self::BYTES;
            let (scale, minimum) = L::half_floats(strip.words::<L>(at));
            unpacked.scale(chunk, 0, scale);
            unpacked.minimum(chunk, 0, minimum);
            nibble_chunk::<L>(strip.columns::<L>(at + 4), chunk, unpacked);
        }
    }
}

impl Block for Q5_0 {
    type Arithmetic = Wide;

    const BYTES: usize = 22;
    const CHUNKS: usize = 1;
    const ZERO: i32 = 16;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, chunks: usize, unpacked: &mut impl UnpackTarget<L>) {
        for chunk in 0..chunks {
            let at = chunk * Self::BYTES;
            unpacked.scale(chunk, 0, strip.halves::<L>(at));
            five_bit_chunk::<L>(strip, at + 6, strip.words::<L>(at + 2), chunk, unpacked);
        }
    }
}

impl Block for Q5_1 {
    type Arithmetic = WideWithMinimum;

    const BYTES: usize = 24;
    const CHUNKS: usize = 1;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, chunks: usize, unpacked: &mut impl UnpackTarget<L>) {
        for chunk in 0..chunks {
            let at = chunk * Self::BYTES;
            let (scale, minimum) = L::half_floats(strip.words::<L>(at));
            unpacked.scale(chunk, 0, scale);
            unpacked.minimum(chunk, 0, minimum);
            five_bit_chunk::<L>(strip, at + 8, strip.words::<L>(at + 4), chunk, unpacked);
        }
    }
}

impl Block for Q4K {
    type Arithmetic = NarrowWithMinimum;

    const BYTES: usize = 144;
    const CHUNKS: usize = 8;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, _: usize, unpacked: &mut impl UnpackTarget<L>) {
        six_bit_scales::<L>(strip, unpacked);
        for half in 0..2 {
            let [first, second, third, fourth] = strip.wide_columns::<L>(16 + 64 * half);
            shared_nibbles::<L>(first, 4 * half, 0, unpacked);
            shared_nibbles::<L>(second, 4 * half, 1, unpacked);
            shared_nibbles::<L>(third, 4 * half + 2, 0, unpacked);
            shared_nibbles::<L>(fourth, 4 * half + 2, 1, unpacked);
        }
    }
}

/// Unpacks sixteen bytes that two chunks share, the first in the low nibbles.
#[inline(always)]
fn shared_nibbles<L: Lanes>(
    columns: [L::Words; 4],
    chunk: usize,
    half: usize,
    unpacked: &mut impl UnpackTarget<L>,
) {
    let (low, high) = nibbles::<L>(columns);
    unpacked.bytes(chunk, half, low);
    unpacked.bytes(chunk + 1, half, high);
}

impl Block for Q5K {
    type Arithmetic = WideWithMinimum;

    const BYTES: usize = 176;
    const CHUNKS: usize = 8;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, _: usize, unpacked: &mut impl UnpackTarget<L>) {
        six_bit_scales::<L>(strip, unpacked);
        let bits = L::splat_word(0x0101_0101);
        for part in 0..2 {
            // Bit `chunk` of a byte is the fifth bit of that chunk's input.
            let mut fifth = strip.columns::<L>(16 + 16 * part);
            for both in 0..4 {
                let (mut low, mut high) = nibbles::<L>(strip.columns::<L>(48 + 32 * both + 16 * part));
                for k in 0..4 {
                    low[k] = L::or(low[k], L::shl::<4>(L::and(fifth[k], bits)));
                    high[k] = L::or(high[k], L::shl::<4>(L::and(L::shr::<1>(fifth[k]), bits)));
                    fifth[k] = L::shr::<2>(fifth[k]);
                }
                unpacked.bytes(2 * both, part, low);
                unpacked.bytes(2 * both + 1, part, high);
            }
        }
    }
}

impl Block for Q6K {
    type Arithmetic = InRowBlocks;

    const BYTES: usize = 210;
    const CHUNKS: usize = 8;
    const ZERO: i32 = 32;

    #[inline(always)]
    fn row_block<L: Lanes>(bytes: &[u8]) -> RowBlock<L> {
        let [a, b, c, d] = row_nibbles::<L>(bytes, 0);
        let (high, pairs) = (vector::<L>(bytes, 128), L::splat_word(0x3030_3030));
        let (first, second) = (L::duplicate_lower(high), L::duplicate_upper(high));
        let (scale, _) =
            L::half_floats(L::splat_word(u32::from(u16::from_le_bytes([bytes[208], bytes[209]]))));
        let scales = match bytes[192..].first_chunk::<LANES>() {
            Some(scales) => L::from_i8_transposed(bytemuck::cast_ref(scales)),
            None => L::zero(),
        };
        let bytes = [
            L::or(a, L::and(L::shl_halves::<4, 2>(first), pairs)),
            L::or(b, L::and(L::shr_halves::<0, 2>(first), pairs)),
            L::or(c, L::and(L::shl_halves::<4, 2>(second), pairs)),
            L::or(d, L::and(L::shr_halves::<0, 2>(second), pairs)),
        ];
        RowBlock { bytes, scales: scales.mul(scale) }
    }

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, _: usize, unpacked: &mut impl UnpackTarget<L>) {
        let scale = strip.halves::<L>(208);
        // Sixteen signed bytes, two for each chunk.
        for (k, column) in strip.columns::<L>(192).into_iter().enumerate() {
            let numbers = [
                L::to_floats(L::sar::<24>(L::shl::<24>(column))),
                L::to_floats(L::sar::<24>(L::shl::<16>(column))),
                L::to_floats(L::sar::<24>(L::shl::<8>(column))),
                L::to_floats(L::sar::<24>(column)),
            ];
            for (at, number) in numbers.into_iter().enumerate() {
                unpacked.scale(2 * k + at / 2, at % 2, number.mul(scale));
            }
        }
        // Half a block has 128 inputs in four chunks: 64 bytes of low nibbles and 32 bytes of high bit pairs.
        let pairs = L::splat_word(0x3030_3030);
        for half in 0..2 {
            for part in 0..2 {
                let (mut first, mut third) = nibbles::<L>(strip.columns::<L>(64 * half + 16 * part));
                let (mut second, mut fourth) = nibbles::<L>(strip.columns::<L>(64 * half + 32 + 16 * part));
                let high = strip.columns::<L>(128 + 32 * half + 16 * part);
                for k in 0..4 {
                    first[k] = L::or(first[k], L::and(L::shl::<4>(high[k]), pairs));
                    second[k] = L::or(second[k], L::and(L::shl::<2>(high[k]), pairs));
                    third[k] = L::or(third[k], L::and(high[k], pairs));
                    fourth[k] = L::or(fourth[k], L::and(L::shr::<2>(high[k]), pairs));
                }
                unpacked.bytes(4 * half, part, first);
                unpacked.bytes(4 * half + 1, part, second);
                unpacked.bytes(4 * half + 2, part, third);
                unpacked.bytes(4 * half + 3, part, fourth);
            }
        }
    }
}

/// Loads a vector of bytes from a block.
#[inline(always)]
fn vector<L: Lanes>(bytes: &[u8], at: usize) -> L::Words {
    match bytes[at..].first_chunk::<VECTOR_BYTES>() {
        Some(bytes) => L::load_bytes(bytes),
        None => L::splat_word(0),
    }
}

/// Returns the low and high nibbles of 64 bytes, then those of the next 64.
#[inline(always)]
fn row_nibbles<L: Lanes>(bytes: &[u8], at: usize) -> [L::Words; 4] {
    let mask = L::splat_word(0x0F0F_0F0F);
    let (first, second) = (vector::<L>(bytes, at), vector::<L>(bytes, at + VECTOR_BYTES));
    [
        L::and(first, mask),
        L::and(L::shr::<4>(first), mask),
        L::and(second, mask),
        L::and(L::shr::<4>(second), mask),
    ]
}

/// Unpacks sixteen bytes of nibbles with a fifth bit each, low nibbles first.
#[inline(always)]
fn five_bit_chunk<L: Lanes>(
    strip: &Strip<'_>,
    at: usize,
    mut fifth: L::Words,
    chunk: usize,
    unpacked: &mut impl UnpackTarget<L>,
) {
    let (mut low, mut high) = nibbles::<L>(strip.columns::<L>(at));
    for half in [&mut low, &mut high] {
        for nibbles in half {
            *nibbles = L::or(*nibbles, spread_fifth_bits::<L>(fifth));
            fifth = L::shr::<4>(fifth);
        }
    }
    unpacked.bytes(chunk, 0, low);
    unpacked.bytes(chunk, 1, high);
}

/// Moves the lowest four bits of each word to the fifth bit of its four bytes.
#[inline(always)]
fn spread_fifth_bits<L: Lanes>(words: L::Words) -> L::Words {
    let words = L::and(words, L::splat_word(0x0F));
    let apart = L::or(L::or(words, L::shl::<7>(words)), L::or(L::shl::<14>(words), L::shl::<21>(words)));
    L::shl::<4>(L::and(apart, L::splat_word(0x0101_0101)))
}

/// Unpacks the scales and minimums of a Q4_K or Q5_K block: eight of each in twelve bytes, six bits each, the
/// upper bits of the later ones stored in the earlier bytes.
#[inline(always)]
fn six_bit_scales<L: Lanes>(strip: &Strip<'_>, unpacked: &mut impl UnpackTarget<L>) {
    let [halves, first, second, third] = strip.columns::<L>(0);
    let (scale, minimum) = L::half_floats(halves);
    let negative = minimum.mul(L::splat(-1.0));
    let (six, four, two) =
        (L::splat_word(0x3F3F_3F3F), L::splat_word(0x0F0F_0F0F), L::splat_word(0x3030_3030));
    let scales = [L::and(first, six), L::or(L::and(third, four), L::and(L::shr::<2>(first), two))];
    let minimum =
        [L::and(second, six), L::or(L::and(L::shr::<4>(third), four), L::and(L::shr::<2>(second), two))];
    for half in 0..2 {
        let scales = four_bytes::<L>(scales[half]);
        let minimum = four_bytes::<L>(minimum[half]);
        for k in 0..4 {
            unpacked.scale(4 * half + k, 0, scales[k].mul(scale));
            unpacked.minimum(4 * half + k, 0, minimum[k].mul(negative));
        }
    }
}

/// Converts the unsigned bytes of every word to floats.
#[inline(always)]
pub(super) fn four_bytes<L: Lanes>(words: L::Words) -> [L; 4] {
    let mask = L::splat_word(0xFF);
    [
        L::to_floats(L::and(words, mask)),
        L::to_floats(L::and(L::shr::<8>(words), mask)),
        L::to_floats(L::and(L::shr::<16>(words), mask)),
        L::to_floats(L::shr::<24>(words)),
    ]
}
