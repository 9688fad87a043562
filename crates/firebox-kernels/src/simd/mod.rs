//! Sixteen f32 lanes on whatever the processor has, chosen when the program runs.
//!
//! All versions compute the same operations in the same order. They differ in the last bit only where the
//! processor has no fused multiply-add.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_integers;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_integers;
mod integers;
mod portable;

pub(crate) use integers::{COLUMN_BYTES, Integers};
pub(crate) use portable::Portable;

/// Lanes of one vector.
pub(crate) const LANES: usize = 16;

/// A vector of [`LANES`] numbers.
pub(crate) trait Lanes: Integers {
    /// Rows of activations whose sums fit the registers beside those of two vectors of outputs.
    const TILE_ROWS: usize;

    fn zero() -> Self;
    fn splat(value: f32) -> Self;
    fn load(values: &[f32; LANES]) -> Self;
    fn from_f16(bits: &[u16; LANES]) -> Self;
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// `self + a * b`
    fn mul_add(self, a: Self, b: Self) -> Self;
    fn store(self) -> [f32; LANES];

    /// Asks for the cache line at an address, which need not be valid.
    #[inline(always)]
    fn prefetch(_address: *const u8) {}

    /// The sum of all lanes, by halves: the same tree on every processor.
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
}

/// A computation that can run on any kind of lanes.
pub(crate) trait Kernel {
    fn run<L: Lanes>(self);
}

/// Runs a computation on the widest lanes of this processor.
pub(crate) fn dispatch(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    {
        if avx512::available() {
            // SAFETY: `available` has just asked the processor for every feature the function is compiled with.
            return unsafe { avx512::run(kernel) };
        }
        if avx2::available() {
            // SAFETY: as above.
            return unsafe { avx2::run(kernel) };
        }
    }
    kernel.run::<Portable>();
}

/// Runs a computation on every kind of lanes that this processor has, handing each its name.
#[cfg(test)]
pub(crate) fn on_each_kind<K: Kernel>(mut kernel: impl FnMut(&'static str) -> K) {
    kernel("portable").run::<Portable>();
    #[cfg(target_arch = "x86_64")]
    {
        if avx2::available() {
            // SAFETY: `available` has just asked the processor for every feature the function is compiled with.
            unsafe { avx2::run(kernel("avx2")) };
        }
        if avx512::available() {
            // SAFETY: as above.
            unsafe { avx512::run(kernel("avx512")) };
        }
    }
}

/// The number that half-precision bits stand for. Written with integer and float arithmetic only, so that it
/// vectorizes and needs no processor support.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    // Shifting the exponent into place leaves it 112 too low; the multiplication mends that, for subnormal
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
            let ramp: [f32; LANES] = std::array::from_fn(|i| i as f32);
            assert_eq!(L::load(&ramp).sum(), 120.0);
            assert_eq!(
                L::splat(2.0).mul_add(L::load(&ramp), L::splat(3.0)).store(),
                ramp.map(|x| 2.0 + 3.0 * x)
            );
        }
    }

    #[test]
    fn lanes_convert_every_value() {
        on_each_kind(|_| CheckConversions);
    }

    #[test]
    fn half_precision_bits_become_their_number() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
            assert!(
                found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
                "{bits:#x}"
            );
        }
    }
}
