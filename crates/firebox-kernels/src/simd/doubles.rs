//! Vectors of eight f64, for computations that f32 is too coarse for.

/// Lanes of one vector of doubles.
pub(crate) const DOUBLES: usize = 8;

/// A vector of [`DOUBLES`] numbers.
pub(crate) trait Doubles: Copy {
    fn splat(value: f64) -> Self;
    fn load(values: &[f64; DOUBLES]) -> Self;
    fn mul(self, other: Self) -> Self;
    /// `self + a * b`
    fn mul_add(self, a: Self, b: Self) -> Self;
    fn store(self, values: &mut [f64; DOUBLES]);
}

/// Portable Rust that the compiler vectorizes.
#[derive(Clone, Copy)]
pub(crate) struct PortableDoubles([f64; DOUBLES]);

impl Doubles for PortableDoubles {
    #[inline(always)]
    fn splat(value: f64) -> Self {
        Self([value; DOUBLES])
    }

    #[inline(always)]
    fn load(values: &[f64; DOUBLES]) -> Self {
        Self(*values)
    }

    #[inline(always)]
    fn mul(mut self, other: Self) -> Self {
        for lane in 0..DOUBLES {
            self.0[lane] *= other.0[lane];
        }
        self
    }

    #[inline(always)]
    fn mul_add(mut self, a: Self, b: Self) -> Self {
        // Without an FMA instruction, `mul_add` calls the C library for every lane.
        const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
        for lane in 0..DOUBLES {
            let sum = &mut self.0[lane];
            *sum = if FUSED { a.0[lane].mul_add(b.0[lane], *sum) } else { *sum + a.0[lane] * b.0[lane] };
        }
        self
    }

    #[inline(always)]
    fn store(self, values: &mut [f64; DOUBLES]) {
        *values = self.0;
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Doubles256, Doubles512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256d, __m512d, _mm256_fmadd_pd, _mm256_loadu_pd, _mm256_mul_pd, _mm256_set1_pd, _mm256_storeu_pd,
        _mm512_fmadd_pd, _mm512_loadu_pd, _mm512_mul_pd, _mm512_set1_pd, _mm512_storeu_pd,
    };

    use super::{DOUBLES, Doubles};

    const HALF: usize = DOUBLES / 2;

    /// Two 256-bit registers. Created only within `avx2::run`.
    #[derive(Clone, Copy)]
    pub(in crate::simd) struct Doubles256(__m256d, __m256d);

    /// One 512-bit register. Created only within `avx512::run`.
    #[derive(Clone, Copy)]
    pub(in crate::simd) struct Doubles512(__m512d);

    // SAFETY, for every block below: these types are reached only through their kind of lanes and so only
    // within its `run`, whose caller has checked that the processor has AVX2 and FMA, or AVX-512 F; and every
    // pointer comes from a reference to an array as long as the load or store.
    impl Doubles for Doubles256 {
        #[inline(always)]
        fn splat(value: f64) -> Self {
            // SAFETY: see above.
            unsafe { Self(_mm256_set1_pd(value), _mm256_set1_pd(value)) }
        }

        #[inline(always)]
        fn load(values: &[f64; DOUBLES]) -> Self {
            // SAFETY: see above.
            unsafe { Self(_mm256_loadu_pd(values.as_ptr()), _mm256_loadu_pd(values.as_ptr().add(HALF))) }
        }

        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            // SAFETY: see above.
            unsafe { Self(_mm256_mul_pd(self.0, other.0), _mm256_mul_pd(self.1, other.1)) }
        }

        #[inline(always)]
        fn mul_add(self, a: Self, b: Self) -> Self {
            // SAFETY: see above.
            unsafe { Self(_mm256_fmadd_pd(a.0, b.0, self.0), _mm256_fmadd_pd(a.1, b.1, self.1)) }
        }

        #[inline(always)]
        fn store(self, values: &mut [f64; DOUBLES]) {
            // SAFETY: see above.
            unsafe {
                _mm256_storeu_pd(values.as_mut_ptr(), self.0);
                _mm256_storeu_pd(values.as_mut_ptr().add(HALF), self.1);
            }
        }
    }

    impl Doubles for Doubles512 {
        #[inline(always)]
        fn splat(value: f64) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_set1_pd(value) })
        }

        #[inline(always)]
        fn load(values: &[f64; DOUBLES]) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_loadu_pd(values.as_ptr()) })
        }

        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_mul_pd(self.0, other.0) })
        }

        #[inline(always)]
        fn mul_add(self, a: Self, b: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_fmadd_pd(a.0, b.0, self.0) })
        }

        #[inline(always)]
        fn store(self, values: &mut [f64; DOUBLES]) {
            // SAFETY: see above.
            unsafe { _mm512_storeu_pd(values.as_mut_ptr(), self.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, Lanes, on_each_instruction_set};

    struct Check(&'static str);

    impl Kernel for Check {
        fn run<L: Lanes>(self) {
            let ramp: [f64; DOUBLES] = std::array::from_fn(|i| i as f64 * 0.75 - 2.0);
            let x = <L::Doubles as Doubles>::load(&ramp);
            let two = <L::Doubles as Doubles>::splat(2.0);
            let mut found = [0.0; DOUBLES];
            x.mul(x).store(&mut found);
            assert_eq!(found, ramp.map(|x| x * x), "{}", self.0);
            two.mul_add(x, x).store(&mut found);
            assert_eq!(found, ramp.map(|x| 2.0 + x * x), "{}", self.0);
        }
    }

    #[test]
    fn every_instruction_set_computes_doubles() {
        on_each_instruction_set(Check);
    }
}
