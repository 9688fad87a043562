//! Vectors of sixteen 32-bit words: columns of packed weights, and exact products of 16-bit integers.

use super::{LANES, Lanes, Portable, f16_to_f32};

/// Bytes that [`Integers::columns`] takes from every row.
pub(crate) const COLUMN_BYTES: usize = 16;

/// Operations on words as wide as a vector of floats.
///
/// A word holds four bytes, two 16-bit integers or one 32-bit integer.
pub(crate) trait Integers: Copy {
    type Words: Copy;

    fn splat_word(bits: u32) -> Self::Words;
    fn load_words(words: &[u32; LANES]) -> Self::Words;
    fn store_words(words: Self::Words) -> [u32; LANES];
    /// Widens sixteen unsigned 16-bit integers to words.
    fn widen(integers: &[u16; LANES]) -> Self::Words;

    /// Loads four words of each of sixteen rows that start `stride` bytes apart, transposed: the first vector
    /// has the first word of every row.
    ///
    /// # Panics
    /// If `bytes` ends before the last row.
    fn columns(bytes: &[u8], stride: usize) -> [Self::Words; 4];

    /// [`columns`](Self::columns) for sixteen words of each row, which takes fewer steps than four calls.
    ///
    /// # Panics
    /// If `bytes` ends before the last row.
    #[inline(always)]
    fn wide_columns(bytes: &[u8], stride: usize) -> [[Self::Words; 4]; 4] {
        [
            Self::columns(bytes, stride),
            Self::columns(&bytes[COLUMN_BYTES..], stride),
            Self::columns(&bytes[2 * COLUMN_BYTES..], stride),
            Self::columns(&bytes[3 * COLUMN_BYTES..], stride),
        ]
    }

    /// Adds 32-bit integers.
    fn add_words(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Returns the sums of all words of two vectors. They may wrap.
    #[inline(always)]
    fn word_sums(first: Self::Words, second: Self::Words) -> [i32; 2] {
        [first, second].map(|words| {
            let mut words = Self::store_words(words);
            let mut width = LANES / 2;
            while width > 0 {
                for at in 0..width {
                    words[at] = words[at].wrapping_add(words[at + width]);
                }
                width /= 2;
            }
            words[0] as i32
        })
    }
    fn and(a: Self::Words, b: Self::Words) -> Self::Words;
    fn or(a: Self::Words, b: Self::Words) -> Self::Words;
    fn xor(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Replaces every byte, which is below 16, by that entry of a table.
    fn lookup(table: &[u8; 16], words: Self::Words) -> Self::Words;
    fn shl<const BITS: u32>(words: Self::Words) -> Self::Words;
    fn shr<const BITS: u32>(words: Self::Words) -> Self::Words;
    /// Shifts signed words right.
    fn sar<const BITS: u32>(words: Self::Words) -> Self::Words;

    /// Rounds numbers of magnitudes below 2²² to the nearest integers.
    fn round(self) -> Self::Words;

    /// Groups sixteen integers by fours for [`dot_quads`](Self::dot_quads). They are between -32,640 and
    /// 32,639.
    fn quads(integers: Self::Words) -> [[u32; 2]; 4];

    /// Adds the products of the four unsigned bytes of every word with the same four integers, in two sums
    /// that [`dot`](Self::dot) combines. If `small`, the integers are between -127 and 127.
    fn dot_quads(
        sums: [Self::Words; 2],
        bytes: Self::Words,
        quad: &[u32; 2],
        small: bool,
    ) -> [Self::Words; 2];

    /// Combines the two sums of [`dot_quads`](Self::dot_quads).
    fn dot(sums: [Self::Words; 2]) -> Self::Words;

    /// Converts signed words to floats.
    fn to_floats(words: Self::Words) -> Self;
    /// Reinterprets words as floats.
    fn as_floats(words: Self::Words) -> Self;
    /// Converts the low and the high halves of words from f16.
    fn half_floats(words: Self::Words) -> (Self, Self);
}

/// Returns the entries of a table for [`Integers::lookup`], with an offset that makes them unsigned.
pub(crate) const fn lookup_table(values: [i8; 16], offset: u8) -> [u8; 16] {
    let mut table = [0; 16];
    let mut at = 0;
    while at < table.len() {
        table[at] = offset.wrapping_add_signed(values[at]);
        at += 1;
    }
    table
}

impl Integers for Portable {
    type Words = [u32; LANES];

    #[inline(always)]
    fn splat_word(bits: u32) -> [u32; LANES] {
        [bits; LANES]
    }

    #[inline(always)]
    fn load_words(words: &[u32; LANES]) -> [u32; LANES] {
        *words
    }

    #[inline(always)]
    fn store_words(words: [u32; LANES]) -> [u32; LANES] {
        words
    }

    #[inline(always)]
    fn widen(integers: &[u16; LANES]) -> [u32; LANES] {
        integers.map(u32::from)
    }

    #[inline(always)]
    fn columns(bytes: &[u8], stride: usize) -> [[u32; LANES]; 4] {
        let mut columns = [[0; LANES]; 4];
        for lane in 0..LANES {
            let row = &bytes[lane * stride..][..COLUMN_BYTES];
            for (column, word) in columns.iter_mut().zip(row.as_chunks().0) {
                column[lane] = u32::from_le_bytes(*word);
            }
        }
        columns
    }

    #[inline(always)]
    fn add_words(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn and(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| a[i] & b[i])
    }

    #[inline(always)]
    fn or(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    fn xor(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| a[i] ^ b[i])
    }

    #[inline(always)]
    fn lookup(table: &[u8; 16], words: [u32; LANES]) -> [u32; LANES] {
        words.map(|word| u32::from_le_bytes(word.to_le_bytes().map(|byte| table[usize::from(byte & 15)])))
    }

    #[inline(always)]
    fn shl<const BITS: u32>(words: [u32; LANES]) -> [u32; LANES] {
        words.map(|word| word << BITS)
    }

    #[inline(always)]
    fn shr<const BITS: u32>(words: [u32; LANES]) -> [u32; LANES] {
        words.map(|word| word >> BITS)
    }

    #[inline(always)]
    fn sar<const BITS: u32>(words: [u32; LANES]) -> [u32; LANES] {
        words.map(|word| (word as i32 >> BITS) as u32)
    }

    #[inline(always)]
    fn round(self) -> [u32; LANES] {
        self.store().map(|number| number.round_ties_even() as i32 as u32)
    }

    #[inline(always)]
    fn quads(integers: [u32; LANES]) -> [[u32; 2]; 4] {
        pair_quads(&integers)
    }

    #[inline(always)]
    fn dot_quads(
        sums: [[u32; LANES]; 2],
        bytes: [u32; LANES],
        quad: &[u32; 2],
        _small: bool,
    ) -> [[u32; LANES]; 2] {
        let [mut even, mut odd] = sums;
        for lane in 0..LANES {
            even[lane] = even[lane].wrapping_add(dot_pair(bytes[lane], quad[0]));
            odd[lane] = odd[lane].wrapping_add(dot_pair(bytes[lane] >> 8, quad[1]));
        }
        [even, odd]
    }

    #[inline(always)]
    fn dot([even, odd]: [[u32; LANES]; 2]) -> [u32; LANES] {
        Self::add_words(even, odd)
    }

    #[inline(always)]
    fn to_floats(words: [u32; LANES]) -> Self {
        Self::from_lanes(words.map(|word| word as i32 as f32))
    }

    #[inline(always)]
    fn as_floats(words: [u32; LANES]) -> Self {
        Self::from_lanes(words.map(f32::from_bits))
    }

    #[inline(always)]
    fn half_floats(words: [u32; LANES]) -> (Self, Self) {
        (
            Self::from_lanes(words.map(|word| f16_to_f32(word as u16))),
            Self::from_lanes(words.map(|word| f16_to_f32((word >> 16) as u16))),
        )
    }
}

/// Packs the first and third of every four integers into one word, and the second and fourth into another:
/// bytes widened to 16 bits separate into even and odd ones likewise.
#[inline(always)]
pub(super) fn pair_quads(integers: &[u32; LANES]) -> [[u32; 2]; 4] {
    let mut quads = [[0; 2]; 4];
    for (quad, [a, b, c, d]) in quads.iter_mut().zip(integers.as_chunks().0) {
        *quad = [(a & 0xFFFF) | c << 16, (b & 0xFFFF) | d << 16];
    }
    quads
}

/// Returns the sum of the products of bytes 0 and 2 with two 16-bit integers.
#[inline(always)]
fn dot_pair(bytes: u32, pair: u32) -> u32 {
    let (low, high) = (bytes & 0xFF, bytes >> 16 & 0xFF);
    let low = (low as i32).wrapping_mul(i32::from(pair as i16));
    low.wrapping_add((high as i32).wrapping_mul(i32::from((pair >> 16) as i16))) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, on_each_instruction_set};

    /// Compares every operation with the portable one.
    struct Check(&'static str);

    impl Kernel for Check {
        fn run<L: Lanes>(self) {
            let mut state = 0x9E37_79B9u32;
            let mut words = || {
                std::array::from_fn::<u32, LANES, _>(|_| {
                    state ^= state << 13;
                    state ^= state >> 17;
                    state ^= state << 5;
                    state
                })
            };
            for _ in 0..50 {
                let (a, b, c) = (words(), words(), words());
                let [x, y, z] = [L::load_words(&a), L::load_words(&b), L::load_words(&c)];
                let name = self.0;
                assert_eq!(L::store_words(L::add_words(x, y)), Portable::add_words(a, b), "{name}");
                assert_eq!(L::store_words(L::and(x, y)), Portable::and(a, b), "{name}");
                assert_eq!(L::store_words(L::or(x, y)), Portable::or(a, b), "{name}");
                assert_eq!(L::store_words(L::xor(x, y)), Portable::xor(a, b), "{name}");
                assert_eq!(L::store_words(L::shl::<7>(x)), Portable::shl::<7>(a), "{name}");
                let table = lookup_table(std::array::from_fn(|i| i as i8 * 8 - 100), 100);
                let nibbles = a.map(|a| a & 0x0F0F_0F0F);
                let found = L::store_words(L::lookup(&table, L::load_words(&nibbles)));
                assert_eq!(found, Portable::lookup(&table, nibbles), "{name}");
                assert_eq!(L::store_words(L::shr::<9>(x)), Portable::shr::<9>(a), "{name}");
                assert_eq!(L::store_words(L::sar::<12>(x)), Portable::sar::<12>(a), "{name}");
                assert_eq!(L::word_sums(x, y), Portable::word_sums(a, b), "{name}");
                let sum = a.iter().fold(0u32, |sum, word| sum.wrapping_add(*word));
                assert_eq!(L::word_sums(x, y)[0] as u32, sum, "{name}");
                let halves = a.map(|a| a as u16);
                assert_eq!(L::store_words(L::widen(&halves)), halves.map(u32::from), "{name}");
                assert_eq!(L::store_words(L::splat_word(a[3])), [a[3]; LANES], "{name}");
                for (small, limit) in [(false, 32_640), (true, 128)] {
                    let integers = b.map(|b| b as i32 % limit);
                    let quads = L::quads(L::load_words(&integers.map(|integer| integer as u32)));
                    // Small enough to be shifted as the upper part of a sum.
                    let sums = [L::splat_word(0), L::sar::<8>(z)];
                    for (quad, integers) in quads.iter().zip(integers.as_chunks::<4>().0) {
                        let dots = L::store_words(L::dot(L::dot_quads(sums, x, quad, small)));
                        for lane in 0..LANES {
                            let products = a[lane].to_le_bytes().into_iter().zip(integers);
                            let sum: i32 = products.map(|(byte, integer)| i32::from(byte) * integer).sum();
                            assert_eq!(dots[lane] as i32, sum + (c[lane] as i32 >> 8), "{name}");
                        }
                    }
                }
                let numbers = a.map(|a| a as i32 as f32 / 1024.0 + 0.5);
                let rounded = L::store_words(L::load(&numbers).round());
                assert_eq!(rounded, numbers.map(|x| x.round_ties_even() as i32 as u32), "{name}");
                assert_eq!(L::to_floats(x).store(), Portable::to_floats(a).store(), "{name}");
                assert_eq!(
                    L::as_floats(x).store().map(f32::to_bits),
                    Portable::as_floats(a).store().map(f32::to_bits),
                    "{name}"
                );
                let (low, high) = L::half_floats(x);
                let (low_expected, high_expected) = Portable::half_floats(a);
                for (found, expected) in [(low, low_expected), (high, high_expected)] {
                    for (found, expected) in found.store().iter().zip(expected.store()) {
                        let same = found.to_bits() == expected.to_bits();
                        assert!(same || (found.is_nan() && expected.is_nan()), "{name}");
                    }
                }
                for stride in [64, 70, 210] {
                    let bytes: Vec<u8> =
                        (0..15 * stride + 64).map(|i| (b[i % LANES] >> (i % 23)) as u8).collect();
                    let found = L::wide_columns(&bytes, stride).into_iter().flatten();
                    let expected = Portable::wide_columns(&bytes, stride).into_iter().flatten();
                    for (found, expected) in found.zip(expected) {
                        assert_eq!(L::store_words(found), expected, "{name}");
                    }
                }
                for stride in [16, 18, 210] {
                    let bytes: Vec<u8> =
                        (0..15 * stride + 16).map(|i| (a[i % LANES] >> (i % 25)) as u8).collect();
                    let columns = L::columns(&bytes, stride);
                    for (found, expected) in columns.into_iter().zip(Portable::columns(&bytes, stride)) {
                        assert_eq!(L::store_words(found), expected, "{name}");
                    }
                }
            }
        }
    }

    #[test]
    fn integer_operations_match_the_portable_ones() {
        on_each_instruction_set(Check);
    }
}
