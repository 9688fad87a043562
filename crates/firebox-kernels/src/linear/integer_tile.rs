//! Integer products of some rows of activations with two panels.

use std::marker::PhantomData;

use super::arithmetic::Arithmetic;
use super::panel::{HALF_QUADS, IntegerPanel, QUADS};
use super::row_group::{QuantizedChunk, RowGroup};
use crate::simd::{self, Lanes};

/// Integer sums of some rows with a panel, as [`Integers::dot`](crate::simd::Integers::dot) takes them.
type Dots<L, const ROWS: usize> = [[<L as simd::Integers>::Words; 2]; ROWS];

/// One block of two integer panels.
pub(super) struct IntegerTile<'a, A> {
    pub few: RowGroup<'a>,
    pub block: usize,
    pub panels: &'a [IntegerPanel; 2],
    /// The byte that stands for zero.
    zero: i32,
    arithmetic: PhantomData<A>,
}

impl<'a, A: Arithmetic> IntegerTile<'a, A> {
    pub fn new(few: RowGroup<'a>, block: usize, panels: &'a [IntegerPanel; 2], zero: i32) -> Self {
        Self { few, block, panels, zero, arithmetic: PhantomData }
    }

    /// Returns the integer products of a chunk with both panels, or of one half of the chunk if halves have
    /// scales of their own.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // A chunk is of all rows at once.
    pub fn dots<L: Lanes, const ROWS: usize>(
        &self,
        chunk: usize,
        half: usize,
        x: &[QuantizedChunk; ROWS],
    ) -> (Dots<L, ROWS>, Dots<L, ROWS>) {
        let [panel0, panel1] = self.panels;
        let zero = L::splat_word(0);
        let (mut dots0, mut dots1) = ([[zero; 2]; ROWS], [[zero; 2]; ROWS]);
        for i in 0..ROWS {
            let offset =
                if A::HALF_SCALES { x[i].half_offset(self.zero, half) } else { x[i].offset(self.zero) };
            (dots0[i][1], dots1[i][1]) = (L::splat_word(offset), L::splat_word(offset));
        }
        let quads = if A::HALF_SCALES { HALF_QUADS } else { QUADS };
        for quad in half * quads..(half + 1) * quads {
            let weight0 = panel0.quads[chunk][quad].words::<L>();
            let weight1 = panel1.quads[chunk][quad].words::<L>();
            for i in 0..ROWS {
                let quad = &x[i].quads[quad];
                dots0[i] = L::dot_quads(dots0[i], weight0, quad, A::I8_ACTIVATIONS);
                dots1[i] = L::dot_quads(dots1[i], weight1, quad, A::I8_ACTIVATIONS);
            }
        }
        (dots0, dots1)
    }
}
