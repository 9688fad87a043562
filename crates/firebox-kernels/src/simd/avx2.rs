//! Lanes of two 256-bit registers.

use std::arch::x86_64::{
    __m128i, __m256, _CMP_LT_OQ, _MM_HINT_T0, _mm_add_ps, _mm_loadl_epi64, _mm_loadu_si128, _mm_movehl_ps,
    _mm_movelh_ps, _mm_prefetch, _mm_shuffle_ps, _mm_storeu_ps, _mm256_add_epi32, _mm256_add_ps,
    _mm256_blendv_ps, _mm256_castps_si256, _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cmp_ps,
    _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtph_ps, _mm256_div_ps, _mm256_extractf128_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_permute2f128_ps,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm256_sub_ps,
};

use super::doubles::Doubles256;
use super::{Kernel, LANES, Lanes};

/// Two 256-bit registers. Created only within [`run`].
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

// SAFETY, for every block below: these functions are reached only through `run`, whose caller has checked
// that the processor has AVX2, FMA and F16C; and every pointer comes from a reference to an array as long as
// the two halves loaded or stored.
impl Lanes for Avx2 {
    type Doubles = Doubles256;

    const TILE_ROWS: usize = 1;

    #[inline(always)]
    fn call(part: impl Kernel) {
        // SAFETY: see above.
        unsafe { run(part) }
    }

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
    fn from_i8(values: &[i8; LANES]) -> Self {
        let (first, second) = halves(values);
        // SAFETY: see above.
        unsafe {
            Self(
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(first.as_ptr().cast::<__m128i>()))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(second.as_ptr().cast::<__m128i>()))),
            )
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_min_ps(self.0, other.0), _mm256_min_ps(self.1, other.1)) }
    }

    #[inline(always)]
    fn where_less(a: Self, b: Self, yes: Self, no: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            Self(
                _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)),
                _mm256_blendv_ps(no.1, yes.1, _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)),
            )
        }
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        Self(eight_powers_of_two(self.0), eight_powers_of_two(self.1))
    }

    #[inline(always)]
    fn sums(vectors: [Self; 4]) -> [f32; 4] {
        let [a, b, c, d] = vectors;
        let mut sums = [0.0; 4];
        // SAFETY: see above.
        unsafe {
            let (a, b) = (_mm256_add_ps(a.0, a.1), _mm256_add_ps(b.0, b.1));
            let (c, d) = (_mm256_add_ps(c.0, c.1), _mm256_add_ps(d.0, d.1));
            // Four sums of `a`, then four of `b`; likewise of `c` and `d`.
            let ab =
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            let cd =
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(c, d), _mm256_permute2f128_ps::<0x31>(c, d));
            let (a, b) = (_mm256_castps256_ps128(ab), _mm256_extractf128_ps::<1>(ab));
            let (c, d) = (_mm256_castps256_ps128(cd), _mm256_extractf128_ps::<1>(cd));
            // Two sums of `a`, then two of `b`; likewise of `c` and `d`.
            let ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
            let cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
            let all = _mm_add_ps(_mm_shuffle_ps::<0x88>(ab, cd), _mm_shuffle_ps::<0xDD>(ab, cd));
            _mm_storeu_ps(sums.as_mut_ptr(), all);
        }
        sums
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
        // SAFETY: a prefetch of an unmapped address does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
}

#[inline(always)]
fn eight_powers_of_two(shifted: __m256) -> __m256 {
    // SAFETY: see the implementation of `Lanes`.
    unsafe {
        let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
        _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3F80_0000)))
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
