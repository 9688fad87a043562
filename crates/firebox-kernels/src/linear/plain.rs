//! Weights of f32, f16 and bf16.

use std::marker::PhantomData;

use super::panel::{BLOCK, FloatPanel, FloatRows, Strip};
use crate::simd::{COLUMN_BYTES, Integers, LANES, Lanes};

/// A floating-point format.
pub(super) trait Format: Sync {
    /// Numbers in a 32-bit word.
    const PER_WORD: usize;
    /// A column of words as the numbers in its lower and upper half; the same twice where a word is one number.
    fn numbers<L: Lanes>(column: L::Words) -> (L, L);
    /// Sixteen consecutive numbers.
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
        let (numbers, _) = bytes.as_chunks();
        let mut bits = [0; LANES];
        for (bits, number) in bits.iter_mut().zip(numbers) {
            *bits = u32::from_le_bytes(*number);
        }
        L::as_floats(L::load_words(&bits))
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
        L::from_f16(&halves(bytes))
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
        L::as_floats(L::shl::<16>(L::widen(&halves(bytes))))
    }
}

#[inline(always)]
fn halves(bytes: &[u8]) -> [u16; LANES] {
    let mut bits = [0; LANES];
    for (bits, number) in bits.iter_mut().zip(bytes.as_chunks().0) {
        *bits = u16::from_le_bytes(*number);
    }
    bits
}

/// Bytes between what is read and what is asked for: about what arrives while the memory answers.
const BYTES_AHEAD: usize = 4096;

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

    #[inline(always)]
    fn sixteen<L: Lanes>(&self, row: usize, from: usize) -> L {
        let start = (row * self.inputs + from) * Self::SIZE;
        let width = LANES * Self::SIZE;
        if from + LANES <= self.inputs {
            let bytes = &self.bytes[start..][..width];
            L::prefetch(bytes.as_ptr().wrapping_add(BYTES_AHEAD));
            return F::sixteen(bytes);
        }
        if from >= self.inputs {
            // Activations are padded to whole chunks, which are two of these.
            return L::zero();
        }
        let mut end = [0; LANES * size_of::<u32>()];
        let rest = (self.inputs - from) * Self::SIZE;
        end[..rest].copy_from_slice(&self.bytes[start..][..rest]);
        F::sixteen(&end[..width])
    }
}

/// The first `count` inputs of a block.
#[inline(always)]
pub(super) fn unpack_strip<L: Lanes, F: Format>(strip: &Strip<'_>, count: usize, panel: &mut FloatPanel) {
    // Inputs in a column's bytes.
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
    for k in 0..4 {
        let (low, high) = F::numbers::<L>(columns[k]);
        panel.set(first + k * F::PER_WORD, low);
        if F::PER_WORD == 2 {
            panel.set(first + k * F::PER_WORD + 1, high);
        }
    }
}
