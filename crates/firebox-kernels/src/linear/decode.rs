//! Decoding packed weights to f32.

use super::arithmetic::Arithmetic;
use super::panel::{BLOCK, CHUNK, IntegerPanel, IntegerRows, OUTPUTS, UnpackPanel};
use super::place::Place;
use crate::simd::{Kernel, Lanes, dispatch};

/// Returns the values of a weight, `[outputs, inputs]`.
pub(super) fn decode<W: IntegerRows>(weight: &W, outputs: usize) -> Vec<f32> {
    let mut values = vec![0.0; outputs * weight.inputs()];
    if values.is_empty() {
        return values;
    }
    dispatch(Decode { weight, outputs, values: &mut values });
    values
}

struct Decode<'a, W> {
    weight: &'a W,
    outputs: usize,
    /// `[outputs, inputs]`
    values: &'a mut [f32],
}

impl<W: IntegerRows> Kernel for Decode<'_, W> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let inputs = self.weight.inputs();
        let mut panel = IntegerPanel::default();
        for (index, values) in self.values.chunks_mut(OUTPUTS * inputs).enumerate() {
            let place = Place::new(0, index * OUTPUTS, self.outputs.max(OUTPUTS));
            for block in 0..inputs.div_ceil(BLOCK) {
                L::call(UnpackPanel { weight: self.weight, row: place.row, block, panel: &mut panel });
                for (lane, values) in values.chunks_exact_mut(inputs).enumerate() {
                    let values = &mut values[block * BLOCK..inputs.min((block + 1) * BLOCK)];
                    for (input, value) in values.iter_mut().enumerate() {
                        *value = number::<W>(&panel, input, place.skipped + lane);
                    }
                }
            }
        }
    }
}

/// Returns the value of one integer of a panel.
fn number<W: IntegerRows>(panel: &IntegerPanel, input: usize, lane: usize) -> f32 {
    let (chunk, input) = (input / CHUNK, input % CHUNK);
    let byte = panel.quads[chunk][input / 4].0[lane].to_le_bytes()[input % 4];
    let half = if W::Arithmetic::HALF_SCALES { input / (CHUNK / 2) } else { 0 };
    let minimum = if W::Arithmetic::HAS_MINIMUM { panel.minimum[chunk][half].0[lane] } else { 0.0 };
    (i32::from(byte) - W::ZERO) as f32 * panel.scales[chunk][half].0[lane] + minimum
}
