//! Lanes in portable Rust.

use super::doubles::PortableDoubles;
use super::{Kernel, LANES, Lanes, f16_to_f32};

/// Portable Rust that the compiler vectorizes.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    pub(super) fn from_lanes(lanes: [f32; LANES]) -> Self {
        Self(lanes)
    }
}

impl Lanes for Portable {
    type Doubles = PortableDoubles;

    const TILE_ROWS: usize = 2;

    const UNPACKS_FOR_ROWS: bool = false;

    #[inline(never)]
    fn call(part: impl Kernel) {
        part.run::<Self>();
    }

    #[inline(always)]
    fn zero() -> Self {
        Self([0.0; LANES])
    }

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    fn load(values: &[f32; LANES]) -> Self {
        Self(*values)
    }

    #[inline(always)]
    fn from_f16(bits: &[u16; LANES]) -> Self {
        Self(bits.map(f16_to_f32))
    }

    #[inline(always)]
    fn from_i8(values: &[i8; LANES]) -> Self {
        Self(values.map(f32::from))
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] - other.0[i]))
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] / other.0[i]))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] }))
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| if self.0[i] < other.0[i] { self.0[i] } else { other.0[i] }))
    }

    #[inline(always)]
    fn where_less(a: Self, b: Self, yes: Self, no: Self) -> Self {
        Self(std::array::from_fn(|i| if a.0[i] < b.0[i] { yes.0[i] } else { no.0[i] }))
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        Self(self.0.map(|value| f32::from_bits((value.to_bits() << 23).wrapping_add(0x3F80_0000))))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * other.0[i]))
    }

    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // Without an FMA instruction, `mul_add` calls the C library for every lane.
        const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
        Self(std::array::from_fn(|i| {
            if FUSED { a.0[i].mul_add(b.0[i], self.0[i]) } else { self.0[i] + a.0[i] * b.0[i] }
        }))
    }

    #[inline(always)]
    fn store(self) -> [f32; LANES] {
        self.0
    }
}
