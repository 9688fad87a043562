//! Sigmoid and normal distribution.

use super::{Lanes, exp};

/// `1 / (1 + e⁻ˣ)` within four units in the last place; zero below -87.3.
#[inline(always)]
pub(crate) fn sigmoid<L: Lanes>(x: L) -> L {
    let one = L::splat(1.0);
    // The exponential of a non-positive number: a large exponential would cancel the 1.
    let small = exp(L::zero().sub(x).min(x));
    L::where_less(x, L::zero(), small, one).div(one.add(small))
}

/// Cumulative distribution function of the standard normal distribution, within 2e-7.
#[inline(always)]
pub(crate) fn normal_cdf<L: Lanes>(x: L) -> L {
    /// The smaller tail divided by the density and by `outward`, as a polynomial in `outward` scaled to -1 to
    /// 1: Chebyshev interpolation for distances up to 14.7.
    const RATIO: [f32; 11] = [
        5.597_093e-6,
        6.542_44e-6,
        -6.994_992e-5,
        8.853_068e-6,
        6.193_561e-4,
        -6.640_024e-4,
        -6.293_639e-3,
        6.240_689e-3,
        0.103_232_09,
        0.327_002_9,
        0.569_911_56,
    ];
    /// Distance beyond which the tail is zero.
    const FARTHEST: f32 = 14.5;
    let one = L::splat(1.0);
    let size = L::splat(FARTHEST).min(L::zero().sub(x).max(x));
    let density = exp(L::splat(-0.5).mul(size).mul(size));
    let outward = one.div(one.mul_add(size, L::splat(0.5 * std::f32::consts::FRAC_1_SQRT_2)));
    let place = L::splat(-1.384_615_4).mul_add(outward, L::splat(2.384_615_4));
    let mut ratio = L::zero();
    for coefficient in RATIO {
        ratio = L::splat(coefficient).mul_add(ratio, place);
    }
    let smaller = L::splat(0.5).mul(density).mul(outward).mul(ratio);
    L::where_less(x, L::zero(), smaller, one.sub(smaller))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, on_each_instruction_set};

    struct CheckSigmoid(&'static str);

    impl Kernel for CheckSigmoid {
        fn run<L: Lanes>(self) {
            for step in -87_000..200_000 {
                let x = step as f32 * 1e-3;
                let expected = 1.0 / (1.0 + f64::from(-x).exp());
                let found = f64::from(sigmoid(L::splat(x)).store()[step as usize % 16]);
                assert!((found - expected).abs() <= 2.4e-7 * expected, "{}: {found} for {x}", self.0);
            }
            let special = |x: f32| sigmoid(L::splat(x)).store()[3];
            assert_eq!((special(f32::NEG_INFINITY), special(f32::INFINITY)), (0.0, 1.0));
            assert!(special(f32::NAN).is_nan());
        }
    }

    #[test]
    fn every_instruction_set_has_sigmoids() {
        on_each_instruction_set(CheckSigmoid);
    }

    /// Compares with Simpson's rule over the density, from where it vanishes upwards.
    struct CheckShare(&'static str);

    impl Kernel for CheckShare {
        fn run<L: Lanes>(self) {
            const STEPS_PER_UNIT: usize = 512;
            let density = |x: f64| (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            let width = 1.0 / STEPS_PER_UNIT as f64;
            let mut share = 0.0;
            for step in 0..15 * STEPS_PER_UNIT {
                let x = step as f64 * width - 15.0;
                share += width / 6.0 * (density(x) + 4.0 * density(x + width / 2.0) + density(x + width));
                let x = (x + width) as f32;
                let below = f64::from(normal_cdf(L::splat(x)).store()[step % 16]);
                // The rounding error of the square grows with the exponent of the density.
                let relative = 5e-7 + 1.2e-7 * f64::from(x * x / 2.0);
                let tolerance = relative * share + f64::from(f32::MIN_POSITIVE);
                assert!((below - share).abs() <= tolerance, "{}: {below} for {x}", self.0);
                let above = f64::from(normal_cdf(L::splat(-x)).store()[step % 16]);
                assert!((above - (1.0 - share)).abs() <= 2e-7, "{}: {above} for {}", self.0, -x);
            }
            let special = |x: f32| normal_cdf(L::splat(x)).store()[3];
            assert_eq!((special(f32::NEG_INFINITY), special(f32::INFINITY)), (0.0, 1.0));
            assert!(special(f32::NAN).is_nan());
        }
    }

    #[test]
    fn every_instruction_set_has_normal_shares() {
        on_each_instruction_set(CheckShare);
    }
}
