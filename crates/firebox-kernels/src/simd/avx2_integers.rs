//! Integer operations with AVX2.

use std::arch::x86_64::{
    __m128i, __m256i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm256_add_epi32, _mm256_and_si256,
    _mm256_broadcastsi128_si256, _mm256_castsi128_si256, _mm256_castsi256_ps, _mm256_castsi256_si128,
    _mm256_cvtepi32_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_inserti128_si256,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_or_si256, _mm256_packus_epi32, _mm256_permute4x64_epi64,
    _mm256_set1_epi32, _mm256_shuffle_epi8, _mm256_sll_epi32, _mm256_sra_epi32, _mm256_srl_epi32,
    _mm256_storeu_si256, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi32,
    _mm256_unpacklo_epi64, _mm256_xor_si256,
};

use super::avx2::Avx2;
use super::integers::pair_quads;
use super::{COLUMN_BYTES, Integers, LANES};

/// Two 256-bit registers.
type Pair = (__m256i, __m256i);

// SAFETY, for every block below: these functions are reached only through `avx2::run`, whose caller has
// checked that the processor has AVX2, FMA and F16C; and every pointer comes from a reference to an array as
// long as the load or store.
impl Integers for Avx2 {
    type Words = Pair;

    #[inline(always)]
    fn splat_word(bits: u32) -> Pair {
        // SAFETY: see above.
        let word = unsafe { _mm256_set1_epi32(bits as i32) };
        (word, word)
    }

    #[inline(always)]
    fn load_words(words: &[u32; LANES]) -> Pair {
        let words: *const __m256i = words.as_ptr().cast();
        // SAFETY: see above.
        unsafe { (_mm256_loadu_si256(words), _mm256_loadu_si256(words.add(1))) }
    }

    #[inline(always)]
    fn store_words(words: Pair) -> [u32; LANES] {
        let mut stored = [0; LANES];
        let to: *mut __m256i = stored.as_mut_ptr().cast();
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_si256(to, words.0);
            _mm256_storeu_si256(to.add(1), words.1);
        }
        stored
    }

    #[inline(always)]
    fn widen(integers: &[u16; LANES]) -> Pair {
        let integers: *const __m128i = integers.as_ptr().cast();
        // SAFETY: see above.
        unsafe {
            (
                _mm256_cvtepu16_epi32(_mm_loadu_si128(integers)),
                _mm256_cvtepu16_epi32(_mm_loadu_si128(integers.add(1))),
            )
        }
    }

    #[inline(always)]
    fn columns(bytes: &[u8], stride: usize) -> [Pair; 4] {
        assert!(bytes.len() >= (LANES - 1) * stride + COLUMN_BYTES, "rows end before their columns");
        let row = |index: usize| bytes.as_ptr().wrapping_add(index * stride).cast::<__m128i>();
        // SAFETY: see above; the last row has just been seen to end within the slice, and earlier ones end before it.
        let (first, second) = unsafe {
            (
                transposed(
                    concat(_mm_loadu_si128(row(0)), _mm_loadu_si128(row(4))),
                    concat(_mm_loadu_si128(row(1)), _mm_loadu_si128(row(5))),
                    concat(_mm_loadu_si128(row(2)), _mm_loadu_si128(row(6))),
                    concat(_mm_loadu_si128(row(3)), _mm_loadu_si128(row(7))),
                ),
                transposed(
                    concat(_mm_loadu_si128(row(8)), _mm_loadu_si128(row(12))),
                    concat(_mm_loadu_si128(row(9)), _mm_loadu_si128(row(13))),
                    concat(_mm_loadu_si128(row(10)), _mm_loadu_si128(row(14))),
                    concat(_mm_loadu_si128(row(11)), _mm_loadu_si128(row(15))),
                ),
            )
        };
        [(first[0], second[0]), (first[1], second[1]), (first[2], second[2]), (first[3], second[3])]
    }

    #[inline(always)]
    fn add_words(a: Pair, b: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { (_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1)) }
    }

    #[inline(always)]
    fn and(a: Pair, b: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { (_mm256_and_si256(a.0, b.0), _mm256_and_si256(a.1, b.1)) }
    }

    #[inline(always)]
    fn or(a: Pair, b: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { (_mm256_or_si256(a.0, b.0), _mm256_or_si256(a.1, b.1)) }
    }

    #[inline(always)]
    fn xor(a: Pair, b: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { (_mm256_xor_si256(a.0, b.0), _mm256_xor_si256(a.1, b.1)) }
    }

    #[inline(always)]
    fn lookup(table: &[u8; 16], words: Pair) -> Pair {
        // SAFETY: see above.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            (_mm256_shuffle_epi8(table, words.0), _mm256_shuffle_epi8(table, words.1))
        }
    }

    #[inline(always)]
    fn shl<const BITS: u32>(words: Pair) -> Pair {
        // SAFETY: see above.
        unsafe {
            let bits = _mm_cvtsi32_si128(BITS as i32);
            (_mm256_sll_epi32(words.0, bits), _mm256_sll_epi32(words.1, bits))
        }
    }

    #[inline(always)]
    fn shr<const BITS: u32>(words: Pair) -> Pair {
        // SAFETY: see above.
        unsafe {
            let bits = _mm_cvtsi32_si128(BITS as i32);
            (_mm256_srl_epi32(words.0, bits), _mm256_srl_epi32(words.1, bits))
        }
    }

    #[inline(always)]
    fn sar<const BITS: u32>(words: Pair) -> Pair {
        // SAFETY: see above.
        unsafe {
            let bits = _mm_cvtsi32_si128(BITS as i32);
            (_mm256_sra_epi32(words.0, bits), _mm256_sra_epi32(words.1, bits))
        }
    }

    #[inline(always)]
    fn round(self) -> Pair {
        // SAFETY: see above.
        unsafe { (_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1)) }
    }

    #[inline(always)]
    fn quads(integers: Pair) -> [[u32; 2]; 4] {
        pair_quads(&Self::store_words(integers))
    }

    #[inline(always)]
    fn dot_quads([even, odd]: [Pair; 2], bytes: Pair, quad: &[u32; 2], _small: bool) -> [Pair; 2] {
        let mask = Self::splat_word(0x00FF_00FF);
        let (evens, odds) = (Self::and(bytes, mask), Self::and(Self::shr::<8>(bytes), mask));
        [add_pairs(even, evens, Self::splat_word(quad[0])), add_pairs(odd, odds, Self::splat_word(quad[1]))]
    }

    #[inline(always)]
    fn dot([even, odd]: [Pair; 2]) -> Pair {
        Self::add_words(even, odd)
    }

    #[inline(always)]
    fn to_floats(words: Pair) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_cvtepi32_ps(words.0), _mm256_cvtepi32_ps(words.1)) }
    }

    #[inline(always)]
    fn as_floats(words: Pair) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_castsi256_ps(words.0), _mm256_castsi256_ps(words.1)) }
    }

    #[inline(always)]
    fn half_floats(words: Pair) -> (Self, Self) {
        let low = Self::and(words, Self::splat_word(0xFFFF));
        let high = Self::shr::<16>(words);
        (Self(eight_halves(low.0), eight_halves(low.1)), Self(eight_halves(high.0), eight_halves(high.1)))
    }
}

/// Adds the products of 16-bit integers, two in each word.
#[inline(always)]
fn add_pairs(sum: Pair, a: Pair, b: Pair) -> Pair {
    // SAFETY: see the implementation of `Integers`.
    unsafe {
        (
            _mm256_add_epi32(sum.0, _mm256_madd_epi16(a.0, b.0)),
            _mm256_add_epi32(sum.1, _mm256_madd_epi16(a.1, b.1)),
        )
    }
}

/// Half-precision numbers, one in the low half of every word.
#[inline(always)]
fn eight_halves(words: __m256i) -> std::arch::x86_64::__m256 {
    // SAFETY: see the implementation of `Integers`.
    unsafe {
        let packed = _mm256_packus_epi32(words, words);
        let joined = _mm256_permute4x64_epi64::<0b10_00>(packed);
        _mm256_cvtph_ps(_mm256_castsi256_si128(joined))
    }
}

/// Two halves as one register.
#[inline(always)]
fn concat(low: __m128i, high: __m128i) -> __m256i {
    // SAFETY: see the implementation of `Integers`.
    unsafe { _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high) }
}

/// Transposes the words of four registers within each half: register `k` of the result has word `k` of each.
#[inline(always)]
fn transposed(a: __m256i, b: __m256i, c: __m256i, d: __m256i) -> [__m256i; 4] {
    // SAFETY: see the implementation of `Integers`.
    unsafe {
        let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab_low, cd_low),
            _mm256_unpackhi_epi64(ab_low, cd_low),
            _mm256_unpacklo_epi64(ab_high, cd_high),
            _mm256_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}
