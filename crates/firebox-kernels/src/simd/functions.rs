//! Lane-wise functions, built from the operations of all kinds of lanes.

use super::Lanes;

/// Adding it rounds to the nearest integer, because no bits are left for a fraction.
const ROUND: f32 = 12_582_912.0;

/// `ln 2`, split so that an integer times the high part is exact.
const LN_2_HIGH: f32 = 355.0 / 512.0;
const LN_2_LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;

/// Below it the exponential is subnormal.
const LOWEST: f32 = -87.3;

/// Above it a factor of the exponential is infinite.
const HIGHEST: f32 = 88.3;

/// `eˣ` within two units in the last place; zero below -87.3 and no larger than at 88.3; NaN for NaN.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(x: L) -> L {
    let clamped = L::splat(HIGHEST).min(L::splat(LOWEST).max(x));
    // eˣ = 2ⁿ eʳ with r between ±ln 2 / 2.
    let rounded = L::splat(ROUND).mul_add(clamped, L::splat(std::f32::consts::LOG2_E));
    let n = rounded.sub(L::splat(ROUND));
    let r = clamped.mul_add(n, L::splat(-LN_2_HIGH)).mul_add(n, L::splat(-LN_2_LOW));
    // Terms of the series that exceed the rounding error.
    let series = L::splat(1.0 / 720.0).mul_add(r, L::splat(1.0 / 5040.0));
    let series = L::splat(1.0 / 120.0).mul_add(r, series);
    let series = L::splat(1.0 / 24.0).mul_add(r, series);
    let series = L::splat(1.0 / 6.0).mul_add(r, series);
    let series = L::splat(0.5).mul_add(r, series);
    let series = L::splat(1.0).mul_add(r, series);
    let series = L::splat(1.0).mul_add(r, series);
    L::where_less(x, L::splat(LOWEST), L::zero(), series.mul(rounded.power_of_two()))
}

/// The hyperbolic tangent within a few units in the last place; NaN for NaN.
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(x: L) -> L {
    /// Below it the formula cancels, and the series needs few terms.
    const SMALL: f32 = 0.3;
    let magnitude = L::zero().sub(x).max(x);
    let square = x.mul(x);
    let series = L::splat(62.0 / 2835.0).mul_add(square, L::splat(-1382.0 / 155_925.0));
    let series = L::splat(-17.0 / 315.0).mul_add(square, series);
    let series = L::splat(2.0 / 15.0).mul_add(square, series);
    let series = L::splat(-1.0 / 3.0).mul_add(square, series);
    let small = x.mul_add(x.mul(square), series);
    let exponential = exp(magnitude.add(magnitude));
    let large = L::splat(1.0).sub(L::splat(2.0).div(exponential.add(L::splat(1.0))));
    let large = L::where_less(x, L::zero(), L::zero().sub(large), large);
    L::where_less(magnitude, L::splat(SMALL), small, large)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, LANES, on_each_instruction_set};

    struct Check(&'static str);

    impl Check {
        fn close(&self, x: f32, found: f32, expected: f64, units: f64) {
            let unit = f64::from(f32::EPSILON) * expected.abs().max(f64::from(f32::MIN_POSITIVE));
            let off = (f64::from(found) - expected).abs() / unit;
            assert!(off <= units, "{}: {found} instead of {expected} at {x}, {off} units", self.0);
        }
    }

    impl Kernel for Check {
        fn run<L: Lanes>(self) {
            for step in 0..20_000 {
                let start = -100.0 + step as f32 * 0.01;
                let x: [f32; LANES] = std::array::from_fn(|i| start + i as f32 * 0.01 / LANES as f32);
                let (powers, tangents) = (exp(L::load(&x)).store(), tanh(L::load(&x)).store());
                for lane in 0..LANES {
                    if (LOWEST..HIGHEST).contains(&x[lane]) {
                        self.close(x[lane], powers[lane], f64::from(x[lane]).exp(), 2.0);
                    }
                    self.close(x[lane], tangents[lane], f64::from(x[lane]).tanh(), 4.0);
                }
            }
            let special = |x: f32| (exp(L::splat(x)).store()[7], tanh(L::splat(x)).store()[7]);
            assert_eq!(special(0.0), (1.0, 0.0));
            assert_eq!(special(f32::NEG_INFINITY), (0.0, -1.0));
            assert_eq!(special(-88.0).0, 0.0);
            assert_eq!(special(f32::INFINITY).1, 1.0);
            assert!(special(f32::INFINITY).0 > 1e38);
            let (power, tangent) = special(f32::NAN);
            assert!(power.is_nan() && tangent.is_nan());
        }
    }

    #[test]
    fn every_instruction_set_has_exponentials() {
        on_each_instruction_set(Check);
    }
}
