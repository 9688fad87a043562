//! Lanes of one 512-bit register.

use std::arch::x86_64::{
    __m128i, __m256i, __m512, _CMP_LT_OQ, _MM_HINT_T1, _mm_cvtsi128_si32, _mm_loadu_si128, _mm_max_epu32,
    _mm_prefetch, _mm_shuffle_epi32, _mm_storeu_ps, _mm256_castsi256_si128, _mm256_extracti128_si256,
    _mm256_loadu_si256, _mm256_max_epu32, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castps512_ps128, _mm512_castsi512_ps, _mm512_castsi512_si256,
    _mm512_cmp_ps_mask, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_div_ps,
    _mm512_extracti64x4_epi64, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_blend_ps, _mm512_max_epu32,
    _mm512_max_ps, _mm512_min_ps, _mm512_mul_ps, _mm512_permute_ps, _mm512_permutexvar_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setr_epi32, _mm512_setzero_ps, _mm512_shuffle_f32x4, _mm512_slli_epi32,
    _mm512_storeu_ps, _mm512_sub_ps,
};

use super::doubles::Doubles512;
use super::{Kernel, LANES, Lanes};

/// One 512-bit register. Created only within [`run`].
#[derive(Clone, Copy)]
pub(super) struct Avx512(pub(super) __m512);

pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
}

/// Runs a computation compiled for AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
pub(super) fn run(kernel: impl Kernel) {
    kernel.run::<Avx512>();
}

// SAFETY, for every block below: these functions are reached only through `run`, whose caller has checked
// that the processor has AVX-512 F, BW, VL and VNNI; and every pointer comes from a reference to an array as
// long as the load or store.
impl Lanes for Avx512 {
    type Doubles = Doubles512;

    const TILE_ROWS: usize = 6;

    #[inline(always)]
    fn call(part: impl Kernel) {
        // SAFETY: see above.
        unsafe { run(part) }
    }

    #[inline(always)]
    fn zero() -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_setzero_ps() })
    }

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    fn load(values: &[f32; LANES]) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_loadu_ps(values.as_ptr()) })
    }

    #[inline(always)]
    fn from_f16(bits: &[u16; LANES]) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bits.as_ptr().cast::<__m256i>())) })
    }

    #[inline(always)]
    fn from_i8(values: &[i8; LANES]) -> Self {
        // SAFETY: see above.
        Self(unsafe {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(values.as_ptr().cast::<__m128i>())))
        })
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_sub_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_div_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_min_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn where_less(a: Self, b: Self, yes: Self, no: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a.0, b.0), no.0, yes.0) })
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        // SAFETY: see above.
        Self(unsafe {
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
            _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3F80_0000)))
        })
    }

    #[inline(always)]
    fn max_magnitude(first: Self, second: Self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let magnitude =
                |lanes: Self| _mm512_and_si512(_mm512_castps_si512(lanes.0), _mm512_set1_epi32(0x7FFF_FFFF));
            let all = _mm512_max_epu32(magnitude(first), magnitude(second));
            let eight = _mm256_max_epu32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
            let four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0x4E>(four));
            let one = _mm_max_epu32(two, _mm_shuffle_epi32::<0xB1>(two));
            f32::from_bits(_mm_cvtsi128_si32(one) as u32)
        }
    }

    #[inline(always)]
    fn sums(vectors: [Self; 4]) -> [f32; 4] {
        let [a, b, c, d] = vectors;
        let mut sums = [0.0; 4];
        // SAFETY: see above.
        unsafe {
            // Eight sums of `a`, then eight of `b`; likewise of `c` and `d`.
            let ab =
                _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a.0, b.0), _mm512_shuffle_f32x4::<0xEE>(a.0, b.0));
            let cd =
                _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c.0, d.0), _mm512_shuffle_f32x4::<0xEE>(c.0, d.0));
            // Four sums of each in a quarter of its own.
            let four =
                _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xDD>(ab, cd));
            let two = _mm512_add_ps(four, _mm512_permute_ps::<0x0E>(four));
            let one = _mm512_add_ps(two, _mm512_permute_ps::<0x01>(two));
            let first_of_quarters = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
            let gathered = _mm512_permutexvar_ps(first_of_quarters, one);
            _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(gathered));
        }
        sums
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
    }

    #[inline(always)]
    fn store(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), self.0) };
        lanes
    }

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // Into the L2 cache, which was faster than L1 where they differed.
        // SAFETY: a prefetch of an unmapped address does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
}
