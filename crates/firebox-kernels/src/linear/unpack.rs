//! Decoding weights to rows of f32, for gradients.

use std::marker::PhantomData;

use super::arithmetic::Arithmetic;
use super::panel::{
    BLOCK, BLOCK_STEPS, CHUNK, FloatPanel, FloatRows, Floats, HALF_QUADS, IntegerPanel, IntegerRows, OUTPUTS,
    UnpackPanel,
};
use super::place::Place;
use crate::simd::{Kernel, LANES, Lanes};

/// Bytes between two inputs of a panel.
const STRIDE: usize = BLOCK_STEPS * size_of::<Floats>();

/// Up to sixteen whole rows of a weight, and the destination of their values.
pub(super) struct Unpack<'a, W> {
    pub weight: &'a W,
    pub place: Place,
    pub inputs: usize,
    /// `[rows, inputs]`
    pub values: &'a mut [f32],
}

/// [`Unpack`] for a weight of integers.
pub(super) struct UnpackIntegers<'a, W>(pub Unpack<'a, W>);

impl<W: FloatRows> Kernel for Unpack<'_, W> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { weight, place, inputs, values } = self;
        let mut panel = FloatPanel::default();
        for block in 0..inputs.div_ceil(BLOCK) {
            L::call(UnpackPanel { weight, row: place.row, block, panel: &mut panel });
            L::call(Store { panel: &panel, place, block, inputs, values });
        }
    }
}

impl<W: IntegerRows> Kernel for UnpackIntegers<'_, W> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Unpack { weight, place, inputs, values } = self.0;
        let (mut integers, mut panel) = (IntegerPanel::default(), FloatPanel::default());
        for block in 0..inputs.div_ceil(BLOCK) {
            L::call(UnpackPanel { weight, row: place.row, block, panel: &mut integers });
            let arithmetic = PhantomData::<W::Arithmetic>;
            L::call(Convert { integers: &integers, zero: W::ZERO, panel: &mut panel, arithmetic });
            L::call(Store { panel: &panel, place, block, inputs, values });
        }
    }
}

/// Converts the integers of a panel to floats.
struct Convert<'a, A> {
    integers: &'a IntegerPanel,
    zero: i32,
    panel: &'a mut FloatPanel,
    arithmetic: PhantomData<A>,
}

impl<A: Arithmetic> Kernel for Convert<'_, A> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { integers, panel, .. } = self;
        let (zero, byte) = (L::splat(self.zero as f32), L::splat_word(0xFF));
        for (chunk, quads) in integers.quads.iter().enumerate() {
            for (quad, words) in quads.iter().enumerate() {
                let half = if A::HALF_SCALES { quad / HALF_QUADS } else { 0 };
                let scale = integers.scales[chunk][half].lanes::<L>();
                let minimum =
                    if A::HAS_MINIMUM { integers.minimum[chunk][half].lanes::<L>() } else { L::zero() };
                let words = words.words::<L>();
                let bytes = [
                    L::and(words, byte),
                    L::and(L::shr::<8>(words), byte),
                    L::and(L::shr::<16>(words), byte),
                    L::shr::<24>(words),
                ];
                for (at, byte) in bytes.into_iter().enumerate() {
                    let number = L::to_floats(byte).sub(zero).mul(scale).add(minimum);
                    panel.set(chunk * CHUNK + 4 * quad + at, number);
                }
            }
        }
    }
}

/// Transposes a panel into rows.
struct Store<'a> {
    panel: &'a FloatPanel,
    place: Place,
    block: usize,
    inputs: usize,
    values: &'a mut [f32],
}

impl Kernel for Store<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { panel, place, block, inputs, values } = self;
        let bytes: &[u8] = bytemuck::cast_slice(panel.inputs.as_slice());
        let from = block * BLOCK;
        for step in 0..BLOCK_STEPS.min((inputs - from).div_ceil(LANES)) {
            for four in 0..OUTPUTS / 4 {
                let at = step * size_of::<Floats>() + four * 4 * size_of::<f32>();
                for (k, inputs_of_output) in L::columns(&bytes[at..], STRIDE).into_iter().enumerate() {
                    let Some(row) = (4 * four + k).checked_sub(place.skipped) else { continue };
                    let Some(values) = values.get_mut(row * inputs + from + step * LANES..(row + 1) * inputs)
                    else {
                        continue;
                    };
                    let numbers = L::as_floats(inputs_of_output).store();
                    let count = values.len().min(LANES);
                    values[..count].copy_from_slice(&numbers[..count]);
                }
            }
        }
    }
}
