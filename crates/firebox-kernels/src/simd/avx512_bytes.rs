//! Byte operations with AVX-512.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_loadu_si128, _mm_setr_epi8, _mm_shuffle_epi8, _mm512_add_epi32,
    _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_loadu_si512, _mm512_setr_epi32,
    _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_sllv_epi32, _mm512_srlv_epi32, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use super::LANES;
use super::avx512::Avx512;
use super::bytes::{RowBytes, VECTOR_BYTES};

// SAFETY, for every block below: these functions are reached only through `avx512::run`, whose caller has
// checked that the processor has AVX-512 F, BW, VL and VNNI; and every pointer comes from a reference to an
// array as long as the load.
impl RowBytes for Avx512 {
    #[inline(always)]
    fn load_bytes(bytes: &[u8; VECTOR_BYTES]) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn duplicate_lower(words: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_shuffle_i32x4::<0b01_00_01_00>(words, words) }
    }

    #[inline(always)]
    fn duplicate_upper(words: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_shuffle_i32x4::<0b11_10_11_10>(words, words) }
    }

    #[inline(always)]
    fn shl_halves<const LOWER: u32, const UPPER: u32>(words: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_sllv_epi32(words, halves(LOWER, UPPER)) }
    }

    #[inline(always)]
    fn shr_halves<const LOWER: u32, const UPPER: u32>(words: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_srlv_epi32(words, halves(LOWER, UPPER)) }
    }

    #[inline(always)]
    fn dot_bytes(bytes: __m512i, integers: &[i8; VECTOR_BYTES]) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let integers = _mm512_loadu_si512(integers.as_ptr().cast());
            _mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes, integers)
        }
    }

    #[inline(always)]
    fn sums_of_quarters([a, b, c, d]: [__m512i; 4]) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
        }
    }

    #[inline(always)]
    fn from_i8_transposed(values: &[i8; LANES]) -> Self {
        // SAFETY: see above.
        Self(unsafe {
            let order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let turned = _mm_shuffle_epi8(_mm_loadu_si128(values.as_ptr().cast::<__m128i>()), order);
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(turned))
        })
    }

    #[inline(always)]
    fn small_integers([_, lower]: &[u32; 2]) -> [i8; 4] {
        lower.to_le_bytes().map(|byte| byte as i8)
    }
}

#[inline(always)]
fn halves(lower: u32, upper: u32) -> __m512i {
    let (l, u) = (lower as i32, upper as i32);
    // SAFETY: see the implementation of `RowBytes`.
    unsafe { _mm512_setr_epi32(l, l, l, l, l, l, l, l, u, u, u, u, u, u, u, u) }
}
