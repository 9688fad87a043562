//! Weights of f32, f16 and bf16.

use std::marker::PhantomData;

use super::panel::{BLOCK, FloatPanel, FloatRows, Strip, TILE_OUTPUTS};
use crate::simd::{COLUMN_BYTES, Integers, LANES, Lanes};

/// A floating-point format.
pub(super) trait Format: Sync {
    /// Numbers in a 32-bit word.
    const PER_WORD: usize;
    /// Converts a column of words to the numbers in their lower and upper halves; both are the same if a word
    /// is one number.
    fn numbers<L: Lanes>(column: L::Words) -> (L, L);
    /// Loads sixteen consecutive numbers.
    fn sixteen<L: Lanes>(bytes: &[u8]) -> L;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl Format for F32 {
    const PER_WORD: usize = 1;

    #[inline(always)]
    fn numbers<L: Lanes>(column: L::Words) -> (L, L) {
        let numbers = L::as_floats(column);
        (numbers, numbers)
    }

    #[inline(always)]
    fn sixteen<L: Lanes>(bytes: &[u8]) -> L {
        L::load(&bytemuck::pod_read_unaligned(bytes))
    }
}

impl Format for F16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    fn numbers<L: Lanes>(column: L::Words) -> (L, L) {
        L::half_floats(column)
    }

    #[inline(always)]
    fn sixteen<L: Lanes>(bytes: &[u8]) -> L {
        L::from_f16(&bytemuck::pod_read_unaligned(bytes))
    }
}

impl Format for Bf16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    fn numbers<L: Lanes>(column: L::Words) -> (L, L) {
        let upper = L::and(column, L::splat_word(0xFFFF_0000));
        (L::as_floats(L::shl::<16>(column)), L::as_floats(upper))
    }

    #[inline(always)]
    fn sixteen<L: Lanes>(bytes: &[u8]) -> L {
        L::as_floats(L::shl::<16>(L::widen(&bytemuck::pod_read_unaligned(bytes))))
    }
}

/// Bytes between a read and its prefetch: about what arrives during the latency of the memory.
const PREFETCH_DISTANCE: usize = 4096;

/// Contiguous rows of floats.
pub(super) struct PlainRows<'a, F> {
    bytes: &'a [u8],
    inputs: usize,
    format: PhantomData<F>,
}

impl<'a, F: Format> PlainRows<'a, F> {
    const SIZE: usize = size_of::<u32>() / F::PER_WORD;

    pub fn new(bytes: &'a [u8], inputs: usize) -> Self {
        Self { bytes, inputs, format: PhantomData }
    }
}

impl<F: Format> FloatRows for PlainRows<'_, F> {
    #[inline(always)]
    fn unpack<L: Lanes>(&self, row: usize, block: usize, panel: &mut FloatPanel) {
        let from = block * BLOCK;
        let count = BLOCK.min(self.inputs - from);
        let stride = self.inputs * Self::SIZE;
        let strip = Strip::new(self.bytes, row, stride, from * Self::SIZE, count * Self::SIZE, TILE_OUTPUTS);
        unpack_strip::<L, F>(&strip, count, panel);
    }

    #[inline(always)]
    fn block_sums<L: Lanes>(&self, row: usize, block: usize, x: &[[f32; LANES]]) -> L {
        let width = LANES * Self::SIZE;
        let from = block * BLOCK;
        let count = (x.len() * LANES).min(self.inputs - from);
        let bytes = &self.bytes[(row * self.inputs + from) * Self::SIZE..][..count * Self::SIZE];
        let (steps, last) = x.split_at(count / LANES);
        let mut sums = L::zero();
        for (bytes, x) in bytes.chunks_exact(width).zip(steps) {
            L::prefetch(bytes.as_ptr().wrapping_add(PREFETCH_DISTANCE));
            sums = sums.mul_add(F::sixteen(bytes), L::load(x));
        }
        let rest = bytes.chunks_exact(width).remainder();
        if let Some(x) = last.first()
            && !rest.is_empty()
        {
            let mut padded = [0; LANES * size_of::<u32>()];
            padded[..rest.len()].copy_from_slice(rest);
            sums = sums.mul_add(F::sixteen(&padded[..width]), L::load(x));
        }
        sums
    }
}

/// The rows as the right operand of a [`matrix`](crate::matrix) product.
#[cfg(feature = "autodiff")]
pub(super) struct Columns<'a, F>(PlainRows<'a, F>);

#[cfg(feature = "autodiff")]
impl<'a, F: Format> Columns<'a, F> {
    pub fn new(bytes: &'a [u8], inputs: usize) -> Self {
        Self(PlainRows::new(bytes, inputs))
    }
}

#[cfg(feature = "autodiff")]
impl<F: Format> crate::matrix::Right for Columns<'_, F> {
    #[inline(always)]
    fn sixteen<L: Lanes>(&self, row: usize, column: usize) -> L {
        let PlainRows { bytes, inputs, .. } = self.0;
        let (size, width) = (PlainRows::<F>::SIZE, LANES * PlainRows::<F>::SIZE);
        let bytes = &bytes[(row * inputs + column) * size..][..width.min((inputs - column) * size)];
        if bytes.len() == width {
            return F::sixteen(bytes);
        }
        let mut padded = [0; LANES * size_of::<u32>()];
        padded[..bytes.len()].copy_from_slice(bytes);
        F::sixteen(&padded[..width])
    }
}

/// Unpacks the first `count` inputs of a block.
#[inline(always)]
pub(super) fn unpack_strip<L: Lanes, F: Format>(strip: &Strip<'_>, count: usize, panel: &mut FloatPanel) {
    // Inputs in the bytes of a column.
    let step = 4 * F::PER_WORD;
    let whole = count / step;
    for part in 0..whole {
        unpack_columns::<L, F>(strip.columns::<L>(part * COLUMN_BYTES), part * step, panel);
    }
    if !count.is_multiple_of(step) {
        unpack_columns::<L, F>(strip.last_columns::<L>(whole * COLUMN_BYTES), whole * step, panel);
    }
    for input in count.next_multiple_of(step)..BLOCK {
        panel.set(input, L::zero());
    }
}

#[inline(always)]
fn unpack_columns<L: Lanes, F: Format>(
    columns: [<L as Integers>::Words; 4],
    first: usize,
    panel: &mut FloatPanel,
) {
    for (k, column) in columns.into_iter().enumerate() {
        let (low, high) = F::numbers::<L>(column);
        panel.set(first + k * F::PER_WORD, low);
        if F::PER_WORD == 2 {
            panel.set(first + k * F::PER_WORD + 1, high);
        }
    }
}
