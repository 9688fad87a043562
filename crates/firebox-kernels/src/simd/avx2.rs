use std::arch::x86_64::{
    __m128i, __m256, _MM_HINT_T0, _mm_loadl_epi64, _mm_loadu_si128, _mm_prefetch, _mm256_add_epi32, _mm256_add_ps,
    _mm256_and_si256, _mm256_castsi256_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_srli_epi32,
    _mm256_storeu_ps,
};

use super::{Kernel, LANES, Lanes};

/// Two 256-bit registers. Made only within [`run`].
#[derive(Clone, Copy)]
pub(super) struct Avx2(pub(super) __m256, pub(super) __m256);

const HALF: usize = LANES / 2;

pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Runs a computation compiled for AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn run(kernel: impl Kernel) {
    kernel.run::<Avx2>();
}

// SAFETY, for every block below: the only way to these functions is `run`, whose caller has made sure that the
// processor has AVX2, FMA and F16C; and every pointer comes from a reference to an array as long as the two
// halves loaded from or stored to it.
impl Lanes for Avx2 {
    const TILE_ROWS: usize = 1;

    #[inline(always)]
    fn zero() -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_setzero_ps(), _mm256_setzero_ps()) }
    }

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }

    #[inline(always)]
    fn load(values: &[f32; LANES]) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values.as_ptr().add(HALF))) }
    }

    #[inline(always)]
    fn from_f16(bits: &[u16; LANES]) -> Self {
        let (first, second) = halves(bits);
        // SAFETY: see above.
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(first.as_ptr().cast::<__m128i>())),
                _mm256_cvtph_ps(_mm_loadu_si128(second.as_ptr().cast::<__m128i>())),
            )
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_fmadd_ps(a.0, b.0, self.0), _mm256_fmadd_ps(a.1, b.1, self.1)) }
    }

    #[inline(always)]
    fn store(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(lanes.as_mut_ptr(), self.0);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(HALF), self.1);
        }
        lanes
    }

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch of an address that is not mapped does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
}

#[inline(always)]
fn halves<T>(values: &[T; LANES]) -> (&[T; HALF], &[T; HALF]) {
    let (first, second) = values.split_at(HALF);
    match (first.first_chunk(), second.first_chunk()) {
        (Some(first), Some(second)) => (first, second),
        _ => unreachable!("a vector is two halves"),
    }
}
