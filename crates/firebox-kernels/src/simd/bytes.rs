//! Vectors of sixty-four bytes in the order of a row of packed weights.

use super::{Integers, LANES, Portable};

/// Bytes of a vector.
pub(crate) const VECTOR_BYTES: usize = 4 * LANES;

/// Words of a quarter of a vector, within which processors add fastest.
const QUARTER: usize = LANES / 4;

/// Operations on bytes in row order.
pub(crate) trait RowBytes: Integers {
    fn load_bytes(bytes: &[u8; VECTOR_BYTES]) -> Self::Words;
    /// Repeats the first half of the words.
    fn duplicate_lower(words: Self::Words) -> Self::Words;
    /// Repeats the second half of the words.
    fn duplicate_upper(words: Self::Words) -> Self::Words;
    /// Shifts the words of the first half left by `LOWER` bits and those of the second half by `UPPER`.
    fn shl_halves<const LOWER: u32, const UPPER: u32>(words: Self::Words) -> Self::Words;
    /// Shifts the words of the first half right by `LOWER` bits and those of the second half by `UPPER`.
    fn shr_halves<const LOWER: u32, const UPPER: u32>(words: Self::Words) -> Self::Words;

    /// Returns for every word the sum of the products of its four unsigned bytes, all below 128, with four
    /// integers.
    fn dot_bytes(bytes: Self::Words, integers: &[i8; VECTOR_BYTES]) -> Self::Words;

    /// Sums every four words of four vectors: word `4 * quarter + vector` of the result is the sum of one
    /// quarter of one vector.
    fn sums_of_quarters(vectors: [Self::Words; 4]) -> Self::Words;

    /// Converts signed bytes to floats, transposed: first those whose index is a multiple of four, then the
    /// ones after them, and so on.
    fn from_i8_transposed(values: &[i8; LANES]) -> Self;

    /// Returns the four integers of a [quad](Integers::quads), which are between -127 and 127.
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

/// Returns small integers from the layout of [`pair_quads`](super::integers::pair_quads).
#[inline(always)]
pub(super) fn small_of_pairs([even, odd]: &[u32; 2]) -> [i8; 4] {
    [*even as i8, *odd as i8, (even >> 16) as i8, (odd >> 16) as i8]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, Lanes, on_each_instruction_set};

    /// Compares every operation with the portable one.
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
    fn byte_operations_match_the_portable_ones() {
        on_each_instruction_set(Check);
    }
}
