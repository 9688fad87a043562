//! The block formats of GGUF files with two to four bits a weight that are no plain integers, or have scales of half chunks.

use super::arithmetic::{Narrow, NarrowHalves, NarrowHalvesWithMinimum};
use super::blocks::{Block, four_bytes};
use super::panel::{Strip, UnpackTarget, nibbles};
use crate::simd::{Lanes, lookup_table};

/// The values of a nibble in IQ4_NL and IQ4_XS, from 127 below.
const NONLINEAR: [u8; 16] =
    lookup_table([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], 127);

/// The values of a four-bit float of one mantissa bit (E2M1), doubled, from 12 below.
const E2M1: [u8; 16] = lookup_table([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], 12);

pub(super) struct MXFP4;
pub(super) struct IQ4NL;
pub(super) struct IQ4XS;
pub(super) struct Q3K;
pub(super) struct Q2K;

impl Block for MXFP4 {
    type Arithmetic = Narrow;

    const BYTES: usize = 17;
    const CHUNKS: usize = 1;
    const ZERO: i32 = 12;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, chunks: usize, unpacked: &mut impl UnpackTarget<L>) {
        for chunk in 0..chunks {
            let at = chunk * Self::BYTES;
            unpacked.scale(chunk, 0, strip.half_powers::<L>(at));
            table_chunk::<L>(&E2M1, strip.columns::<L>(at + 1), chunk, unpacked);
        }
    }
}

impl Block for IQ4NL {
    type Arithmetic = Narrow;

    const BYTES: usize = 18;
    const CHUNKS: usize = 1;
    const ZERO: i32 = 127;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, chunks: usize, unpacked: &mut impl UnpackTarget<L>) {
        for chunk in 0..chunks {
            let at = chunk * Self::BYTES;
            unpacked.scale(chunk, 0, strip.halves::<L>(at));
            table_chunk::<L>(&NONLINEAR, strip.columns::<L>(at + 2), chunk, unpacked);
        }
    }
}

impl Block for IQ4XS {
    type Arithmetic = Narrow;

    const BYTES: usize = 136;
    const CHUNKS: usize = 8;
    const ZERO: i32 = 127;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, _: usize, unpacked: &mut impl UnpackTarget<L>) {
        // Eight scales of six bits: the high two beside the scale of the block, the low four in the next word.
        let (first, mut low) = (strip.words::<L>(0), strip.words::<L>(4));
        let (scale, _) = L::half_floats(first);
        let mut high = L::shr::<12>(first);
        let (four, two) = (L::splat_word(0x0F), L::splat_word(0x30));
        for chunk in 0..Self::CHUNKS {
            let six = L::to_floats(L::or(L::and(low, four), L::and(high, two)));
            unpacked.scale(chunk, 0, six.sub(L::splat(32.0)).mul(scale));
            (low, high) = (L::shr::<4>(low), L::shr::<2>(high));
        }
        for half in 0..2 {
            for (chunk, columns) in strip.wide_columns::<L>(8 + 64 * half).into_iter().enumerate() {
                table_chunk::<L>(&NONLINEAR, columns, 4 * half + chunk, unpacked);
            }
        }
    }
}

/// Unpacks the nibbles of sixteen bytes of every row as a chunk by a table of their values.
#[inline(always)]
fn table_chunk<L: Lanes>(
    table: &[u8; 16],
    columns: [L::Words; 4],
    chunk: usize,
    unpacked: &mut impl UnpackTarget<L>,
) {
    let (mut low, mut high) = nibbles::<L>(columns);
    for k in 0..4 {
        (low[k], high[k]) = (L::lookup(table, low[k]), L::lookup(table, high[k]));
    }
    unpacked.bytes(chunk, 0, low);
    unpacked.bytes(chunk, 1, high);
}

impl Block for Q3K {
    type Arithmetic = NarrowHalves;

    const BYTES: usize = 110;
    const CHUNKS: usize = 8;
    const ZERO: i32 = 4;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, _: usize, unpacked: &mut impl UnpackTarget<L>) {
        // Twelve bytes of scales begin in the middle of a word, and the scale of the block follows them.
        let [a, b, c, d] = strip.columns::<L>(94);
        let (_, scale) = L::half_floats(d);
        let [first, second, high] =
            [(a, b), (b, c), (c, d)].map(|(low, high)| L::or(L::shr::<16>(low), L::shl::<16>(high)));
        let (four, two) = (L::splat_word(0x0F0F_0F0F), L::splat_word(0x3030_3030));
        // Sixteen scales of six bits: the low four of all, then the high two of four at a time.
        let scales = [
            L::or(L::and(first, four), L::and(L::shl::<4>(high), two)),
            L::or(L::and(second, four), L::and(L::shl::<2>(high), two)),
            L::or(L::and(L::shr::<4>(first), four), L::and(high, two)),
            L::or(L::and(L::shr::<4>(second), four), L::and(L::shr::<2>(high), two)),
        ];
        for (k, scales) in scales.into_iter().enumerate() {
            for (at, six) in four_bytes::<L>(scales).into_iter().enumerate() {
                unpacked.scale(2 * k + at / 2, at % 2, six.sub(L::splat(32.0)).mul(scale));
            }
        }
        let (pair, one) = (L::splat_word(0x0303_0303), L::splat_word(0x0101_0101));
        for part in 0..2 {
            // Bit `chunk` of a byte is the third bit of that chunk's input.
            let mut third = strip.columns::<L>(16 * part);
            for half in 0..2 {
                let mut low = strip.columns::<L>(32 + 32 * half + 16 * part);
                for chunk in 0..4 {
                    let mut bytes = low;
                    for k in 0..4 {
                        bytes[k] = L::or(L::and(low[k], pair), L::shl::<2>(L::and(third[k], one)));
                        (low[k], third[k]) = (L::shr::<2>(low[k]), L::shr::<1>(third[k]));
                    }
                    unpacked.bytes(4 * half + chunk, part, bytes);
                }
            }
        }
    }
}

impl Block for Q2K {
    type Arithmetic = NarrowHalvesWithMinimum;

    const BYTES: usize = 84;
    const CHUNKS: usize = 8;

    #[inline(always)]
    fn unpack<L: Lanes>(strip: &Strip<'_>, _: usize, unpacked: &mut impl UnpackTarget<L>) {
        let (scale, minimum) = L::half_floats(strip.words::<L>(80));
        let negative = minimum.mul(L::splat(-1.0));
        // Sixteen bytes of a scale and a minimum, for half a chunk each.
        let (scales, minimums) = nibbles::<L>(strip.columns::<L>(0));
        for k in 0..4 {
            let (scales, minimums) = (four_bytes::<L>(scales[k]), four_bytes::<L>(minimums[k]));
            for at in 0..4 {
                unpacked.scale(2 * k + at / 2, at % 2, scales[at].mul(scale));
                unpacked.minimum(2 * k + at / 2, at % 2, minimums[at].mul(negative));
            }
        }
        let pair = L::splat_word(0x0303_0303);
        for half in 0..2 {
            for part in 0..2 {
                let mut low = strip.columns::<L>(16 + 32 * half + 16 * part);
                for chunk in 0..4 {
                    let mut bytes = low;
                    for k in 0..4 {
                        bytes[k] = L::and(low[k], pair);
                        low[k] = L::shr::<2>(low[k]);
                    }
                    unpacked.bytes(4 * half + chunk, part, bytes);
                }
            }
        }
    }
}
