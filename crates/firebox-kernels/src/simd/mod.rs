//! Vectors of sixteen f32 on the widest instruction set of the processor, chosen at run time.
//!
//! All versions compute the same operations in the same order. Results differ only in the last bit, and only
//! on processors without fused multiply-add.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_bytes;
#[cfg(target_arch = "x86_64")]
mod avx2_integers;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bytes;
#[cfg(target_arch = "x86_64")]
mod avx512_integers;
mod bytes;
mod curves;
mod doubles;
pub(crate) mod f64_math;
mod functions;
mod integers;
mod portable;

pub(crate) use bytes::{RowBytes, VECTOR_BYTES};
pub(crate) use curves::{normal_cdf, sigmoid};
pub(crate) use doubles::{DOUBLES, Doubles};
pub(crate) use functions::{exp, tanh};
pub(crate) use integers::{COLUMN_BYTES, Integers, lookup_table};
pub(crate) use portable::Portable;

/// Lanes of one vector.
pub(crate) const LANES: usize = 16;

/// A vector of [`LANES`] numbers.
pub(crate) trait Lanes: RowBytes {
    /// Vectors of f64 on the same processor.
    type Doubles: Doubles;

    /// Rows of activations whose sums fit the registers beside two vectors of outputs.
    const TILE_ROWS: usize;

    /// Whether two to four rows of activations are multiplied with an integer weight while it is unpacked, as
    /// a single row is. Otherwise they are multiplied with panels.
    const UNPACKS_FOR_ROWS: bool = true;

    /// Runs a part of a kernel as a function of its own, which is compiled once for all kernels that call it.
    fn call(part: impl Kernel);

    fn zero() -> Self;
    fn splat(value: f32) -> Self;
    fn load(values: &[f32; LANES]) -> Self;
    fn from_f16(bits: &[u16; LANES]) -> Self;
    fn from_i8(values: &[i8; LANES]) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// The larger of both; `other` if one of them is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller of both; `other` if one of them is NaN.
    fn min(self, other: Self) -> Self;
    /// Selects `yes` where `a < b`, and `no` elsewhere or if one is NaN.
    fn where_less(a: Self, b: Self, yes: Self, no: Self) -> Self;
    /// `2ⁿ` for lanes that hold `1.5 · 2²³ + n` with `n` from -126 to 127: the lowest bits of such a number
    /// are the integer `n`.
    fn power_of_two(self) -> Self;
    /// `self + a * b`
    fn mul_add(self, a: Self, b: Self) -> Self;
    fn store(self) -> [f32; LANES];

    /// Prefetches the cache line at an address, which need not be valid.
    #[inline(always)]
    fn prefetch(_address: *const u8) {}

    /// Returns the sum of all lanes, by halves: the same tree on every processor.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = self.store();
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                lanes[lane] += lanes[lane + width];
            }
            width /= 2;
        }
        lanes[0]
    }

    /// Returns the largest magnitude in two vectors, or NaN if one of them has a NaN, whose bits exceed those
    /// of infinity.
    #[inline(always)]
    fn max_magnitude(first: Self, second: Self) -> f32 {
        let (first, second) = (first.store(), second.store());
        let mut bits = [0; LANES];
        for lane in 0..LANES {
            bits[lane] = first[lane].abs().to_bits().max(second[lane].abs().to_bits());
        }
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                bits[lane] = bits[lane].max(bits[lane + width]);
            }
            width /= 2;
        }
        f32::from_bits(bits[0])
    }

    /// Returns the sums of four vectors, each by the tree of [`Lanes::sum`].
    #[inline(always)]
    fn sums(vectors: [Self; 4]) -> [f32; 4] {
        [vectors[0].sum(), vectors[1].sum(), vectors[2].sum(), vectors[3].sum()]
    }
}

/// A computation that is generic over the kind of lanes.
pub(crate) trait Kernel {
    fn run<L: Lanes>(self);
}

/// Runs a computation on the widest lanes of the processor.
pub(crate) fn dispatch(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    {
        if avx512::available() {
            // SAFETY: `available` has checked that the processor has every feature the function is compiled
            // with.
            return unsafe { avx512::run(kernel) };
        }
        if avx2::available() {
            // SAFETY: as above.
            return unsafe { avx2::run(kernel) };
        }
    }
    Portable::call(kernel);
}

/// Returns the instruction set that the CPU's operations use on this processor: `avx512`, `avx2` or
/// `portable`.
pub fn instructions() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if avx512::available() {
            return "avx512";
        }
        if avx2::available() {
            return "avx2";
        }
    }
    "portable"
}

/// Runs a computation on every kind of lanes that the processor has, by name.
#[cfg(test)]
pub(crate) fn on_each_instruction_set<K: Kernel>(mut kernel: impl FnMut(&'static str) -> K) {
    Portable::call(kernel("portable"));
    #[cfg(target_arch = "x86_64")]
    {
        if avx2::available() {
            // SAFETY: `available` has checked that the processor has every feature the function is compiled
            // with.
            unsafe { avx2::run(kernel("avx2")) };
        }
        if avx512::available() {
            // SAFETY: as above.
            unsafe { avx512::run(kernel("avx512")) };
        }
    }
}

/// Converts f16 bits to f32 with integer and float arithmetic only, which vectorizes without processor
/// support.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    // Shifting the exponent into place leaves it 112 too low; the multiplication corrects that, for subnormal
    // numbers too. Infinity and NaN need all exponent bits set.
    const RESCALE: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = u32::from(bits & 0x7FFF) << 13;
    let sign = u32::from(bits & 0x8000) << 16;
    let scaled = (f32::from_bits(magnitude) * RESCALE).to_bits();
    let special = if bits & 0x7C00 == 0x7C00 { 0x7F80_0000 | magnitude } else { scaled };
    f32::from_bits(special | sign)
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    struct CheckConversions;

    impl Kernel for CheckConversions {
        fn run<L: Lanes>(self) {
            let same = |found: f32, expected: f32| {
                found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan())
            };
            for start in (0..=u16::MAX).step_by(LANES) {
                let bits: [u16; LANES] = std::array::from_fn(|i| start + i as u16);
                let halves = L::from_f16(&bits).store();
                for lane in 0..LANES {
                    assert!(same(halves[lane], f16::from_bits(bits[lane]).to_f32()), "f16 {:#x}", bits[lane]);
                }
            }
            for start in (0..=255u8).step_by(LANES) {
                let signed: [i8; LANES] = std::array::from_fn(|i| (start + i as u8) as i8);
                assert_eq!(L::from_i8(&signed).store(), signed.map(f32::from));
            }
            let ramp: [f32; LANES] = std::array::from_fn(|i| i as f32);
            assert_eq!(L::load(&ramp).sum(), 120.0);
            assert_eq!(
                L::splat(2.0).mul_add(L::load(&ramp), L::splat(3.0)).store(),
                ramp.map(|x| 2.0 + 3.0 * x)
            );
        }
    }

    struct CheckArithmetic;

    impl Kernel for CheckArithmetic {
        fn run<L: Lanes>(self) {
            let a: [f32; LANES] = std::array::from_fn(|i| i as f32 * 0.75 - 5.0);
            let b: [f32; LANES] = std::array::from_fn(|i| 3.0 - (i * 5 % 7) as f32);
            let (x, y) = (L::load(&a), L::load(&b));
            let of = |f: fn(f32, f32) -> f32| -> [f32; LANES] { std::array::from_fn(|i| f(a[i], b[i])) };
            assert_eq!(x.add(y).store(), of(|a, b| a + b));
            assert_eq!(x.sub(y).store(), of(|a, b| a - b));
            assert_eq!(L::splat(2.0).div(x.mul(x)).store(), of(|a, _| 2.0 / (a * a)));
            assert_eq!(x.max(y).store(), of(f32::max));
            assert_eq!(x.min(y).store(), of(f32::min));
            let chosen = L::where_less(x, y, L::splat(1.0), L::splat(2.0));
            assert_eq!(chosen.store(), of(|a, b| if a < b { 1.0 } else { 2.0 }));
            let nan = L::splat(f32::NAN);
            assert_eq!(nan.max(x).store(), a);
            assert!(x.max(nan).store()[3].is_nan());
            assert_eq!(nan.min(x).store(), a);
            assert!(x.min(nan).store()[3].is_nan());
            assert_eq!(L::where_less(nan, x, y, x).store(), a);
            for n in -126..=127 {
                assert_eq!(L::splat(12_582_912.0 + n as f32).power_of_two().store()[5], 2f32.powi(n));
            }
            // Sums that depend on the order of additions.
            let vectors: [[f32; LANES]; 4] =
                std::array::from_fn(|k| std::array::from_fn(|i| 1.0 / (1 + i * i + 3 * k) as f32));
            let vectors = vectors.map(|vector| L::load(&vector));
            assert_eq!(L::sums(vectors), vectors.map(L::sum));
            for (lane, value) in [(0, -9.5), (5, f32::INFINITY), (11, 1e-40), (15, 7.0)] {
                let (mut one, other) = ([0.0; LANES], [-1e-41; LANES]);
                one[lane] = value;
                let (one, other) = (L::load(&one), L::load(&other));
                assert_eq!(
                    (L::max_magnitude(one, other), L::max_magnitude(other, one)),
                    (value.abs(), value.abs())
                );
                assert!(L::max_magnitude(one, nan).is_nan() && L::max_magnitude(nan, one).is_nan());
            }
        }
    }

    #[test]
    fn lanes_calculate() {
        on_each_instruction_set(|_| CheckArithmetic);
    }

    #[test]
    fn lanes_convert_every_value() {
        on_each_instruction_set(|_| CheckConversions);
    }

    #[test]
    fn f16_bits_convert_to_f32() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
            assert!(
                found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
                "{bits:#x}"
            );
        }
    }
}
