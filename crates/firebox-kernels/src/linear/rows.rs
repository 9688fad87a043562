//! The rows of a weight, decoded [`CHUNK`] inputs at a time.

use crate::simd::{LANES, Lanes, f16_to_f32};

/// How many inputs are decoded together: two vectors, and the smallest group that a scale applies to.
pub(super) const CHUNK: usize = 2 * LANES;

/// A weight of `[outputs, inputs]` that can be read in chunks.
///
/// A row's last chunk may be short; what lies beyond the inputs reads as zero.
pub(super) trait Rows: Sync {
    fn inputs(&self) -> usize;
    fn chunk<L: Lanes>(&self, row: usize, chunk: usize) -> (L, L);
    /// Where a chunk lies in memory; for rows beyond the last, where it would lie.
    fn address(&self, row: usize, chunk: usize) -> *const u8;
}

/// Elements that can stand in a weight without a scale.
pub(super) trait Plain: Copy + Default + Sync {
    fn lanes<L: Lanes>(values: &[Self; LANES]) -> L;
}

impl Plain for f32 {
    #[inline(always)]
    fn lanes<L: Lanes>(values: &[Self; LANES]) -> L {
        L::load(values)
    }
}

/// The bits of a half-precision number.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(super) struct F16(u16);

/// The bits of a bfloat16.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(super) struct Bf16(u16);

// SAFETY: transparent over u16, which may hold any bits.
unsafe impl bytemuck::Zeroable for F16 {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for F16 {}
// SAFETY: as above.
unsafe impl bytemuck::Zeroable for Bf16 {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Bf16 {}

impl Plain for F16 {
    #[inline(always)]
    fn lanes<L: Lanes>(values: &[Self; LANES]) -> L {
        L::from_f16(bytemuck::cast_ref(values))
    }
}

impl Plain for Bf16 {
    #[inline(always)]
    fn lanes<L: Lanes>(values: &[Self; LANES]) -> L {
        L::from_bf16(bytemuck::cast_ref(values))
    }
}

/// Numbers without scales.
pub(super) struct PlainRows<'a, T> {
    values: &'a [T],
    inputs: usize,
}

impl<'a, T: Plain> PlainRows<'a, T> {
    pub fn new(values: &'a [T], inputs: usize) -> Self {
        Self { values, inputs }
    }
}

impl<T: Plain> Rows for PlainRows<'_, T> {
    fn inputs(&self) -> usize {
        self.inputs
    }

    #[inline(always)]
    fn chunk<L: Lanes>(&self, row: usize, chunk: usize) -> (L, L) {
        let row = &self.values[row * self.inputs..][..self.inputs];
        let rest = &row[chunk * CHUNK..];
        if let Some(whole) = rest.first_chunk::<CHUNK>() {
            let (first, second) = halves(whole);
            (T::lanes(first), T::lanes(second))
        } else {
            let mut padded = [T::default(); CHUNK];
            padded[..rest.len()].copy_from_slice(rest);
            let (first, second) = halves(&padded);
            (T::lanes(first), T::lanes(second))
        }
    }

    #[inline(always)]
    fn address(&self, row: usize, chunk: usize) -> *const u8 {
        self.values.as_ptr().wrapping_add(row * self.inputs + chunk * CHUNK).cast()
    }
}

/// Signed bytes with scales.
pub(super) struct ByteRows<'a> {
    pub values: &'a [i8],
    /// Bytes from one row to the next.
    pub stride: usize,
    pub scales: Scales<'a>,
    pub inputs: usize,
}

impl Rows for ByteRows<'_> {
    fn inputs(&self) -> usize {
        self.inputs
    }

    #[inline(always)]
    fn chunk<L: Lanes>(&self, row: usize, chunk: usize) -> (L, L) {
        let scales = self.scales.chunk::<L>(row, chunk);
        let values = &self.values[row * self.stride..][..self.inputs];
        let rest = &values[chunk * CHUNK..];
        let (first, second) = if let Some(whole) = rest.first_chunk::<CHUNK>() {
            let (first, second) = halves(whole);
            (L::from_i8(first), L::from_i8(second))
        } else {
            let mut padded = [0; CHUNK];
            padded[..rest.len()].copy_from_slice(rest);
            let (first, second) = halves(&padded);
            (L::from_i8(first), L::from_i8(second))
        };
        (first.mul(scales.0), second.mul(scales.1))
    }

    #[inline(always)]
    fn address(&self, row: usize, chunk: usize) -> *const u8 {
        self.values.as_ptr().wrapping_add(row * self.stride + chunk * CHUNK).cast()
    }
}

/// Nibbles offset by eight, with scales: byte `i` of a chunk holds input `i` low and input `i + 16` high.
pub(super) struct NibbleRows<'a> {
    pub bytes: &'a [u8],
    pub scales: Scales<'a>,
    pub inputs: usize,
}

impl Rows for NibbleRows<'_> {
    fn inputs(&self) -> usize {
        self.inputs
    }

    #[inline(always)]
    fn chunk<L: Lanes>(&self, row: usize, chunk: usize) -> (L, L) {
        let scales = self.scales.chunk::<L>(row, chunk);
        let chunks = self.inputs.div_ceil(CHUNK);
        let start = (row * chunks + chunk) * LANES;
        let Some(bytes) = self.bytes[start..].first_chunk::<LANES>() else {
            return (L::zero(), L::zero());
        };
        // Rows are stored in whole chunks, and what pads the last one stands for zero.
        let (low, high) = L::from_nibbles(bytes);
        (low.mul(scales.0), high.mul(scales.1))
    }

    #[inline(always)]
    fn address(&self, row: usize, chunk: usize) -> *const u8 {
        let chunks = self.inputs.div_ceil(CHUNK);
        self.bytes.as_ptr().wrapping_add((row * chunks + chunk) * LANES)
    }
}

/// Half-precision scales, `[outputs, groups]`.
pub(super) struct Scales<'a> {
    bits: &'a [u16],
    groups: usize,
    group: usize,
    /// Where a chunk has one scale, the logarithm of how many chunks share it: a division for every chunk would
    /// take longer than multiplying it.
    chunks_per_group_log: Option<u32>,
}

impl<'a> Scales<'a> {
    /// Scales that `group` inputs share.
    pub fn new(bits: &'a [u16], groups: usize, group: usize) -> Self {
        let chunks_per_group = group / CHUNK;
        let whole = group.is_multiple_of(CHUNK) && chunks_per_group.is_power_of_two();
        Self { bits, groups, group, chunks_per_group_log: whole.then(|| chunks_per_group.trailing_zeros()) }
    }
}

impl Scales<'_> {
    /// The scales of a chunk's inputs.
    #[inline(always)]
    fn chunk<L: Lanes>(&self, row: usize, chunk: usize) -> (L, L) {
        let bits = &self.bits[row * self.groups..][..self.groups];
        if let Some(log) = self.chunks_per_group_log {
            let scale = L::splat(f16_to_f32(bits[chunk >> log]));
            return (scale, scale);
        }
        let start = chunk * CHUNK;
        let mut scales = [0.0; CHUNK];
        for (input, scale) in scales.iter_mut().enumerate() {
            // What lies beyond the last input is zero, whatever its scale.
            if let Some(&bits) = bits.get((start + input) / self.group) {
                *scale = f16_to_f32(bits);
            }
        }
        let (first, second) = halves(&scales);
        (L::load(first), L::load(second))
    }
}

#[inline(always)]
pub(super) fn halves<T>(chunk: &[T; CHUNK]) -> (&[T; LANES], &[T; LANES]) {
    let (first, second) = chunk.split_at(LANES);
    // A chunk is two vectors long.
    match (first.first_chunk(), second.first_chunk()) {
        (Some(first), Some(second)) => (first, second),
        _ => unreachable!("a chunk is two vectors long"),
    }
}
