//! Byte operations with AVX2.

use std::arch::x86_64::{
    __m128i, __m256i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm_setr_epi8, _mm_shuffle_epi8,
    _mm_unpackhi_epi64, _mm256_add_epi32, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_loadu_si256,
    _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_set1_epi16, _mm256_sll_epi32, _mm256_srl_epi32,
    _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
};

use super::LANES;
use super::avx2::Avx2;
use super::bytes::{RowBytes, VECTOR_BYTES, small_of_pairs};

/// Two 256-bit registers.
type Pair = (__m256i, __m256i);

// SAFETY, for every block below: these functions are reached only through `avx2::run`, whose caller has
// checked that the processor has AVX2, FMA and F16C; and every pointer comes from a reference to an array as
// long as the load.
impl RowBytes for Avx2 {
    #[inline(always)]
    fn load_bytes(bytes: &[u8; VECTOR_BYTES]) -> Pair {
        let bytes: *const __m256i = bytes.as_ptr().cast();
        // SAFETY: see above.
        unsafe { (_mm256_loadu_si256(bytes), _mm256_loadu_si256(bytes.add(1))) }
    }

    #[inline(always)]
    fn duplicate_lower((lower, _): Pair) -> Pair {
        (lower, lower)
    }

    #[inline(always)]
    fn duplicate_upper((_, upper): Pair) -> Pair {
        (upper, upper)
    }

    #[inline(always)]
    fn shl_halves<const LOWER: u32, const UPPER: u32>(words: Pair) -> Pair {
        // SAFETY: see above.
        unsafe {
            (
                _mm256_sll_epi32(words.0, _mm_cvtsi32_si128(LOWER as i32)),
                _mm256_sll_epi32(words.1, _mm_cvtsi32_si128(UPPER as i32)),
            )
        }
    }

    #[inline(always)]
    fn shr_halves<const LOWER: u32, const UPPER: u32>(words: Pair) -> Pair {
        // SAFETY: see above.
        unsafe {
            (
                _mm256_srl_epi32(words.0, _mm_cvtsi32_si128(LOWER as i32)),
                _mm256_srl_epi32(words.1, _mm_cvtsi32_si128(UPPER as i32)),
            )
        }
    }

    /// Two products of such bytes fit 16 bits.
    #[inline(always)]
    fn dot_bytes(bytes: Pair, integers: &[i8; VECTOR_BYTES]) -> Pair {
        let integers: *const __m256i = integers.as_ptr().cast();
        // SAFETY: see above.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            (
                _mm256_madd_epi16(_mm256_maddubs_epi16(bytes.0, _mm256_loadu_si256(integers)), ones),
                _mm256_madd_epi16(_mm256_maddubs_epi16(bytes.1, _mm256_loadu_si256(integers.add(1))), ones),
            )
        }
    }

    #[inline(always)]
    fn sums_of_quarters([a, b, c, d]: [Pair; 4]) -> Pair {
        (sums_of_half(a.0, b.0, c.0, d.0), sums_of_half(a.1, b.1, c.1, d.1))
    }

    #[inline(always)]
    fn from_i8_transposed(values: &[i8; LANES]) -> Self {
        // SAFETY: see above.
        unsafe {
            let order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let turned = _mm_shuffle_epi8(_mm_loadu_si128(values.as_ptr().cast::<__m128i>()), order);
            Self(
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(turned)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(turned, turned))),
            )
        }
    }

    #[inline(always)]
    fn small_integers(quad: &[u32; 2]) -> [i8; 4] {
        small_of_pairs(quad)
    }
}

#[inline(always)]
fn sums_of_half(a: __m256i, b: __m256i, c: __m256i, d: __m256i) -> __m256i {
    // SAFETY: see the implementation of `RowBytes`.
    unsafe {
        let ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd))
    }
}
