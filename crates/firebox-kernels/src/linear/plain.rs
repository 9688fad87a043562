//! Weights of f32, f16 and bf16.

use std::marker::PhantomData;

use super::panel::{BLOCK, FloatPanel, FloatRows, Floats, Strip};
use crate::simd::{COLUMN_BYTES, Integers, Lanes};

/// A floating-point format.
pub(super) trait Format: Sync {
    /// Numbers in a 32-bit word.
    const PER_WORD: usize;
    /// A column of words as the numbers in its lower and upper half; the same twice where a word is one number.
    fn numbers<L: Lanes>(column: L::Words) -> (L, L);
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
}

impl Format for F16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    fn numbers<L: Lanes>(column: L::Words) -> (L, L) {
        L::half_floats(column)
    }
}

impl Format for Bf16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    fn numbers<L: Lanes>(column: L::Words) -> (L, L) {
        let upper = L::and(column, L::splat_word(0xFFFF_0000));
        (L::as_floats(L::shl::<16>(column)), L::as_floats(upper))
    }
}

/// Rows of numbers, one after the other.
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
        let strip = Strip::new(self.bytes, row, stride, from * Self::SIZE, count * Self::SIZE);
        unpack_strip::<L, F>(&strip, count, panel);
    }
}

/// The first `count` inputs of a block.
#[inline(always)]
pub(super) fn unpack_strip<L: Lanes, F: Format>(strip: &Strip<'_>, count: usize, panel: &mut FloatPanel) {
    // Inputs in a column's bytes.
    let step = 4 * F::PER_WORD;
    let whole = count / step;
    for part in 0..whole {
        unpack_columns::<L, F>(strip.columns::<L>(part * COLUMN_BYTES), &mut panel.inputs[part * step..][..step]);
    }
    if !count.is_multiple_of(step) {
        let columns = strip.last_columns::<L>(whole * COLUMN_BYTES);
        unpack_columns::<L, F>(columns, &mut panel.inputs[whole * step..][..step]);
    }
    for input in &mut panel.inputs[count.next_multiple_of(step)..] {
        *input = Floats::default();
    }
}

#[inline(always)]
fn unpack_columns<L: Lanes, F: Format>(columns: [<L as Integers>::Words; 4], inputs: &mut [Floats]) {
    for k in 0..4 {
        let (low, high) = F::numbers::<L>(columns[k]);
        inputs[k * F::PER_WORD] = Floats::from_lanes(low);
        if F::PER_WORD == 2 {
            inputs[k * F::PER_WORD + 1] = Floats::from_lanes(high);
        }
    }
}
