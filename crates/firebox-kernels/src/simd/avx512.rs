use std::arch::x86_64::{
    __m128i, __m256i, __m512, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_loadu_si256,
    _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_ps, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps,
    _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32,
    _mm512_srli_epi32, _mm512_storeu_ps,
};

use super::{Kernel, LANES, Lanes};

/// One 512-bit register. Made only within [`run`].
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

// SAFETY, for every block below: the only way to these functions is `run`, whose caller has made sure that the
// processor has AVX-512 F, BW, VL and VNNI; and every pointer comes from a reference to an array as long as what is
// loaded from or stored to it.
impl Lanes for Avx512 {
    const TILE_ROWS: usize = 6;

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
    fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
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
        // SAFETY: a prefetch of an address that is not mapped does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
}
