//! Sixty-four bytes side by side, as a row of packed weights has them.

use super::{Integers, LANES, Portable};

/// Bytes of a vector.
pub(crate) const VECTOR_BYTES: usize = 4 * LANES;

/// Words that a quarter of a vector has, which is what processors add across fastest.
const QUARTER: usize = LANES / 4;

/// Operations on bytes that lie in the order of a row.
pub(crate) trait RowBytes: Integers {
    fn load_bytes(bytes: &[u8; VECTOR_BYTES]) -> Self::Words;
    /// The first half of the words, twice.
    fn duplicate_lower(words: Self::Words) -> Self::Words;
    /// The second half of the words, twice.
    fn duplicate_upper(words: Self::Words) -> Self::Words;
    /// Shifts the words of the first half left by so many bits, and those of the second by others.
    fn shl_halves<const LOWER: u32, const UPPER: u32>(words: Self::Words) -> Self::Words;
    /// The same to the right.
    fn shr_halves<const LOWER: u32, const UPPER: u32>(words: Self::Words) -> Self::Words;

    /// For every word the sum of the products of its four unsigned bytes, all of them below 128, with four integers.
    fn dot_bytes(bytes: Self::Words, integers: &[i8; VECTOR_BYTES]) -> Self::Words;

    /// What every four words of four vectors add up to: word `4 * quarter + vector` is that of one quarter of one vector.
    fn sums_of_quarters(vectors: [Self::Words; 4]) -> Self::Words;

    /// Signed bytes as numbers: first those of which the index is a multiple of four, then the ones behind those, and so on.
    fn from_i8_transposed(values: &[i8; LANES]) -> Self;

    /// The four integers of a [quad](Integers::quads), none of them below -127 or above 127.
    fn small_integers(quad: &[u32; 2]) -> [i8; 4];
}

impl RowBytes for Portable {
    #[inline(always)]
    fn load_bytes(bytes: &[u8; VECTOR_BYTES]) -> [u32; LANES] {
        let mut words = [0; LANES];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        words
    }

    #[inline(always)]
    fn duplicate_lower(mut words: [u32; LANES]) -> [u32; LANES] {
        words.copy_within(..LANES / 2, LANES / 2);
        words
    }

    #[inline(always)]
    fn duplicate_upper(mut words: [u32; LANES]) -> [u32; LANES] {
        words.copy_within(LANES / 2.., 0);
        words
    }

    #[inline(always)]
    fn shl_halves<const LOWER: u32, const UPPER: u32>(mut words: [u32; LANES]) -> [u32; LANES] {
        let (lower, upper) = words.split_at_mut(LANES / 2);
        lower.iter_mut().for_each(|word| *word <<= LOWER);
        upper.iter_mut().for_each(|word| *word <<= UPPER);
        words
    }

    #[inline(always)]
    fn shr_halves<const LOWER: u32, const UPPER: u32>(mut words: [u32; LANES]) -> [u32; LANES] {
        let (lower, upper) = words.split_at_mut(LANES / 2);
        lower.iter_mut().for_each(|word| *word >>= LOWER);
        upper.iter_mut().for_each(|word| *word >>= UPPER);
        words
    }

    #[inline(always)]
    fn dot_bytes(bytes: [u32; LANES], integers: &[i8; VECTOR_BYTES]) -> [u32; LANES] {
        let mut sums = [0; LANES];
        for ((sum, word), integers) in sums.iter_mut().zip(bytes).zip(integers.as_chunks::<4>().0) {
            for (byte, integer) in word.to_le_bytes().into_iter().zip(integers) {
                *sum += i32::from(byte) * i32::from(*integer);
            }
        }
        sums.map(|sum| sum as u32)
    }

    #[inline(always)]
    fn sums_of_quarters(vectors: [[u32; LANES]; 4]) -> [u32; LANES] {
        let mut sums = [0; LANES];
        for (vector, words) in vectors.iter().enumerate() {
            for (quarter, words) in words.as_chunks::<QUARTER>().0.iter().enumerate() {
                for word in words {
                    let sum = &mut sums[QUARTER * quarter + vector];
                    *sum = word.wrapping_add(*sum);
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn from_i8_transposed(values: &[i8; LANES]) -> Self {
        let mut numbers = [0.0; LANES];
        for (lane, number) in numbers.iter_mut().enumerate() {
            *number = f32::from(values[QUARTER * (lane % QUARTER) + lane / QUARTER]);
        }
        Self::from_lanes(numbers)
    }

    #[inline(always)]
    fn small_integers(quad: &[u32; 2]) -> [i8; 4] {
        small_of_pairs(quad)
    }
}

/// Small integers that lie in [pairs](super::integers::pair_quads).
#[inline(always)]
pub(super) fn small_of_pairs([even, odd]: &[u32; 2]) -> [i8; 4] {
    [*even as i8, *odd as i8, (even >> 16) as i8, (odd >> 16) as i8]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, Lanes, on_each_instruction_set};

    /// Every operation on bytes that differ, against the portable one.
    struct Check(&'static str);

    impl Kernel for Check {
        fn run<L: Lanes>(self) {
            let mut state = 0x2545_F491u32;
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                state
            };
            for _ in 0..50 {
                let name = self.0;
                let bytes: [u8; VECTOR_BYTES] = std::array::from_fn(|_| (next() >> 9) as u8 & 0x7F);
                let integers: [i8; VECTOR_BYTES] = std::array::from_fn(|_| (next() >> 9) as i8);
                let (x, a) = (L::load_bytes(&bytes), Portable::load_bytes(&bytes));
                let same = |found: L::Words, expected| assert_eq!(L::store_words(found), expected, "{name}");
                same(x, a);
                same(L::duplicate_lower(x), Portable::duplicate_lower(a));
                same(L::duplicate_upper(x), Portable::duplicate_upper(a));
                same(L::shl_halves::<4, 2>(x), Portable::shl_halves::<4, 2>(a));
                same(L::shr_halves::<0, 3>(x), Portable::shr_halves::<0, 3>(a));
                same(L::dot_bytes(x, &integers), Portable::dot_bytes(a, &integers));
                let four = [1, 5, 9, 11].map(|bits| a.map(|word| word.rotate_left(bits)));
                let vectors = four.map(|words| L::load_words(&words));
                same(L::sums_of_quarters(vectors), Portable::sums_of_quarters(four));
                let (some, _) = integers.as_chunks();
                assert_eq!(
                    L::from_i8_transposed(&some[0]).store(),
                    Portable::from_i8_transposed(&some[0]).store(),
                    "{name}"
                );
                let small: [i32; LANES] = std::array::from_fn(|_| next() as i32 % 128);
                let quads = L::quads(L::load_words(&small.map(|integer| integer as u32)));
                for (quad, small) in quads.iter().zip(small.as_chunks::<4>().0) {
                    assert_eq!(L::small_integers(quad).map(i32::from), *small, "{name}");
                }
            }
        }
    }

    #[test]
    fn bytes_are_worked_on_alike_everywhere() {
        on_each_instruction_set(Check);
    }
}
