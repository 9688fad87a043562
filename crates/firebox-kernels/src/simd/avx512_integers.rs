//! Integer operations with AVX-512.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_cvtsi32_si128, _mm_cvtsi128_si32, _mm_loadu_si128, _mm_storeu_si128,
    _mm_unpackhi_epi32, _mm_unpacklo_epi32, _mm256_loadu_si256, _mm512_add_epi32, _mm512_and_si512,
    _mm512_broadcast_i32x4, _mm512_castsi128_si512, _mm512_castsi512_ps, _mm512_castsi512_si128,
    _mm512_cvtepi32_epi8, _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps,
    _mm512_cvtps_epi32, _mm512_dpbusd_epi32, _mm512_extracti32x4_epi32, _mm512_inserti32x4,
    _mm512_loadu_si512, _mm512_or_si512, _mm512_set1_epi32, _mm512_shuffle_epi8, _mm512_shuffle_epi32,
    _mm512_shuffle_i32x4, _mm512_sll_epi32, _mm512_sra_epi32, _mm512_srl_epi32, _mm512_storeu_si512,
    _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
    _mm512_xor_si512,
};

use super::avx512::Avx512;
use super::{COLUMN_BYTES, Integers, LANES};

// SAFETY, for every block below: these functions are reached only through `avx512::run`, whose caller has
// checked that the processor has AVX-512 F, BW, VL and VNNI; and every pointer comes from a reference to an
// array as long as the load or store.
impl Integers for Avx512 {
    type Words = __m512i;

    #[inline(always)]
    fn splat_word(bits: u32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(bits as i32) }
    }

    #[inline(always)]
    fn load_words(words: &[u32; LANES]) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_words(words: __m512i) -> [u32; LANES] {
        let mut stored = [0; LANES];
        // SAFETY: see above.
        unsafe { _mm512_storeu_si512(stored.as_mut_ptr().cast(), words) };
        stored
    }

    #[inline(always)]
    fn widen(integers: &[u16; LANES]) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(integers.as_ptr().cast())) }
    }

    #[inline(always)]
    fn columns(bytes: &[u8], stride: usize) -> [__m512i; 4] {
        assert!(bytes.len() >= (LANES - 1) * stride + COLUMN_BYTES, "rows end before their columns");
        let row = |index: usize| bytes.as_ptr().wrapping_add(index * stride).cast::<__m128i>();
        // SAFETY: see above; the last row has just been seen to end within the slice, and earlier ones end before it.
        unsafe {
            transposed(
                concat(
                    _mm_loadu_si128(row(0)),
                    _mm_loadu_si128(row(4)),
                    _mm_loadu_si128(row(8)),
                    _mm_loadu_si128(row(12)),
                ),
                concat(
                    _mm_loadu_si128(row(1)),
                    _mm_loadu_si128(row(5)),
                    _mm_loadu_si128(row(9)),
                    _mm_loadu_si128(row(13)),
                ),
                concat(
                    _mm_loadu_si128(row(2)),
                    _mm_loadu_si128(row(6)),
                    _mm_loadu_si128(row(10)),
                    _mm_loadu_si128(row(14)),
                ),
                concat(
                    _mm_loadu_si128(row(3)),
                    _mm_loadu_si128(row(7)),
                    _mm_loadu_si128(row(11)),
                    _mm_loadu_si128(row(15)),
                ),
            )
        }
    }

    #[inline(always)]
    fn wide_columns(bytes: &[u8], stride: usize) -> [[__m512i; 4]; 4] {
        assert!(bytes.len() >= (LANES - 1) * stride + 4 * COLUMN_BYTES, "rows end before their columns");
        let row = |index: usize| bytes.as_ptr().wrapping_add(index * stride).cast::<__m512i>();
        // SAFETY: see above; the last row has just been seen to end within the slice, and earlier ones end before it.
        let [a, b, c, d] = unsafe {
            [
                transposed(
                    _mm512_loadu_si512(row(0)),
                    _mm512_loadu_si512(row(1)),
                    _mm512_loadu_si512(row(2)),
                    _mm512_loadu_si512(row(3)),
                ),
                transposed(
                    _mm512_loadu_si512(row(4)),
                    _mm512_loadu_si512(row(5)),
                    _mm512_loadu_si512(row(6)),
                    _mm512_loadu_si512(row(7)),
                ),
                transposed(
                    _mm512_loadu_si512(row(8)),
                    _mm512_loadu_si512(row(9)),
                    _mm512_loadu_si512(row(10)),
                    _mm512_loadu_si512(row(11)),
                ),
                transposed(
                    _mm512_loadu_si512(row(12)),
                    _mm512_loadu_si512(row(13)),
                    _mm512_loadu_si512(row(14)),
                    _mm512_loadu_si512(row(15)),
                ),
            ]
        };
        let [a0, a1, a2, a3] = across(a[0], b[0], c[0], d[0]);
        let [b0, b1, b2, b3] = across(a[1], b[1], c[1], d[1]);
        let [c0, c1, c2, c3] = across(a[2], b[2], c[2], d[2]);
        let [d0, d1, d2, d3] = across(a[3], b[3], c[3], d[3]);
        [[a0, b0, c0, d0], [a1, b1, c1, d1], [a2, b2, c2, d2], [a3, b3, c3, d3]]
    }

    #[inline(always)]
    fn add_words(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn word_sums(first: __m512i, second: __m512i) -> [i32; 2] {
        // SAFETY: see above.
        unsafe {
            // Eight sums of the first, then eight of the second; then their sum in every word of a quarter.
            let lower = _mm512_shuffle_i32x4::<0x44>(first, second);
            let eights = _mm512_add_epi32(lower, _mm512_shuffle_i32x4::<0xEE>(first, second));
            let fours = _mm512_add_epi32(eights, _mm512_shuffle_i32x4::<0xB1>(eights, eights));
            let twos = _mm512_add_epi32(fours, _mm512_shuffle_epi32::<0x4E>(fours));
            let sums = _mm512_add_epi32(twos, _mm512_shuffle_epi32::<0xB1>(twos));
            [
                _mm_cvtsi128_si32(_mm512_castsi512_si128(sums)),
                _mm_cvtsi128_si32(_mm512_extracti32x4_epi32::<2>(sums)),
            ]
        }
    }

    #[inline(always)]
    fn and(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    fn or(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn xor(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_xor_si512(a, b) }
    }

    #[inline(always)]
    fn lookup(table: &[u8; 16], words: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, words)
        }
    }

    #[inline(always)]
    fn shl<const BITS: u32>(words: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_sll_epi32(words, _mm_cvtsi32_si128(BITS as i32)) }
    }

    #[inline(always)]
    fn shr<const BITS: u32>(words: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_srl_epi32(words, _mm_cvtsi32_si128(BITS as i32)) }
    }

    #[inline(always)]
    fn sar<const BITS: u32>(words: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_sra_epi32(words, _mm_cvtsi32_si128(BITS as i32)) }
    }

    #[inline(always)]
    fn round(self) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_cvtps_epi32(self.0) }
    }

    /// Upper bytes and lower bytes, both signed.
    #[inline(always)]
    fn quads(integers: __m512i) -> [[u32; 2]; 4] {
        let mut quads = [[0; 2]; 4];
        let to: *mut __m128i = quads.as_mut_ptr().cast();
        // SAFETY: see above.
        unsafe {
            let upper = Self::add_words(integers, Self::splat_word(128));
            let upper = _mm512_cvtepi32_epi8(Self::sar::<8>(upper));
            let lower = _mm512_cvtepi32_epi8(integers);
            _mm_storeu_si128(to, _mm_unpacklo_epi32(upper, lower));
            _mm_storeu_si128(to.add(1), _mm_unpackhi_epi32(upper, lower));
        }
        quads
    }

    #[inline(always)]
    fn dot_quads([upper, lower]: [__m512i; 2], bytes: __m512i, quad: &[u32; 2], small: bool) -> [__m512i; 2] {
        // SAFETY: see above.
        unsafe {
            [
                // The upper bytes of small integers are zero.
                if small { upper } else { _mm512_dpbusd_epi32(upper, bytes, Self::splat_word(quad[0])) },
                _mm512_dpbusd_epi32(lower, bytes, Self::splat_word(quad[1])),
            ]
        }
    }

    #[inline(always)]
    fn dot([upper, lower]: [__m512i; 2]) -> __m512i {
        Self::add_words(Self::shl::<8>(upper), lower)
    }

    #[inline(always)]
    fn to_floats(words: __m512i) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_cvtepi32_ps(words) })
    }

    #[inline(always)]
    fn as_floats(words: __m512i) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_castsi512_ps(words) })
    }

    #[inline(always)]
    fn half_floats(words: __m512i) -> (Self, Self) {
        let high = Self::shr::<16>(words);
        // SAFETY: see above.
        unsafe {
            (
                Self(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))),
                Self(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(high))),
            )
        }
    }
}

/// Joins four quarters to a vector.
#[inline(always)]
fn concat(first: __m128i, second: __m128i, third: __m128i, fourth: __m128i) -> __m512i {
    // SAFETY: see the implementation of `Integers`.
    unsafe {
        let joined = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(first), second);
        _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(joined, third), fourth)
    }
}

/// Transposes the words of four vectors within each quarter: vector `k` of the result has word `k` of each.
#[inline(always)]
fn transposed(a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> [__m512i; 4] {
    // SAFETY: see the implementation of `Integers`.
    unsafe {
        let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(ab_low, cd_low),
            _mm512_unpackhi_epi64(ab_low, cd_low),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}

/// Transposes the quarters of four vectors: the first vector of the result has the first quarter of each.
#[inline(always)]
fn across(a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> [__m512i; 4] {
    // SAFETY: see the implementation of `Integers`.
    unsafe {
        let (ab_low, ab_high) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0xEE>(a, b));
        let (cd_low, cd_high) = (_mm512_shuffle_i32x4::<0x44>(c, d), _mm512_shuffle_i32x4::<0xEE>(c, d));
        [
            _mm512_shuffle_i32x4::<0x88>(ab_low, cd_low),
            _mm512_shuffle_i32x4::<0xDD>(ab_low, cd_low),
            _mm512_shuffle_i32x4::<0x88>(ab_high, cd_high),
            _mm512_shuffle_i32x4::<0xDD>(ab_high, cd_high),
        ]
    }
}
