//! Functions of one f64, built from sums, products, comparisons and shifts.
//!
//! Loops over them vectorize, unlike loops over calls of the C library. No operation is fused, so every
//! processor computes the same bits, whatever the width of its vectors and wherever a slice ends.

/// `eˣ` within two units in the last place, including subnormal numbers, zero and infinity.
#[inline(always)]
pub(crate) fn exp(x: f64) -> f64 {
    // Adding it leaves the nearest integer in the lowest bits.
    const ROUND: f64 = 1.5 * (1u64 << 52) as f64;
    // `ln 2`, split so that an integer times the high part is exact.
    const LN_2_HIGH: f64 = 2_977_044_471.0 / 4_294_967_296.0;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_8e-10;
    const BIAS: u64 = 1023;
    // Beyond these limits the result is zero or infinite. NaN passes both comparisons.
    let x = if x < -746.0 { -746.0 } else { x };
    let x = if x > 710.0 { 710.0 } else { x };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let count = shifted - ROUND;
    let rest = (x - count * LN_2_HIGH) - count * LN_2_LOW;
    // Terms of the exponential series that matter within half a doubling.
    let tail = rest * (1.0 / 6_227_020_800.0) + 1.0 / 479_001_600.0;
    let tail = tail * rest + 1.0 / 39_916_800.0;
    let tail = tail * rest + 1.0 / 3_628_800.0;
    let tail = tail * rest + 1.0 / 362_880.0;
    let tail = tail * rest + 1.0 / 40_320.0;
    let tail = tail * rest + 1.0 / 5_040.0;
    let tail = tail * rest + 1.0 / 720.0;
    let tail = tail * rest + 1.0 / 120.0;
    let tail = tail * rest + 1.0 / 24.0;
    let tail = tail * rest + 1.0 / 6.0;
    let tail = tail * rest + 0.5;
    let power = 1.0 + (rest + rest * rest * tail);
    // Two factors, because one exponent does not reach all results.
    let exponents = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(2 * BIAS);
    let half = exponents >> 1;
    power * f64::from_bits(half << 52) * f64::from_bits(exponents.wrapping_sub(half) << 52)
}

/// `1 / (1 + e⁻ˣ)`, with full relative precision near zero.
#[inline(always)]
pub(crate) fn sigmoid(x: f64) -> f64 {
    let small = exp(-x.abs());
    (if x < 0.0 { small } else { 1.0 }) / (1.0 + small)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials() {
        for step in -7_460_000..7_097_000 {
            let x = f64::from(step) * 1e-4 + 3.3e-5;
            let (found, expected) = (exp(x), x.exp());
            let tolerance = 4.5e-16 * expected.max(f64::MIN_POSITIVE);
            assert!((found - expected).abs() <= tolerance, "exp({x}) = {found} instead of {expected}");
        }
        assert_eq!((exp(f64::NEG_INFINITY), exp(0.0), exp(f64::INFINITY)), (0.0, 1.0, f64::INFINITY));
        assert!(exp(f64::NAN).is_nan());
    }

    #[test]
    fn sigmoids() {
        for step in -7_000..7_000 {
            let x = f64::from(step) * 0.1 + 0.033;
            let expected = if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) };
            assert!((sigmoid(x) - expected).abs() <= 7e-16 * expected, "{} for {x}", sigmoid(x));
        }
        assert_eq!((sigmoid(f64::NEG_INFINITY), sigmoid(f64::INFINITY)), (0.0, 1.0));
        assert!(sigmoid(f64::NAN).is_nan());
    }
}
