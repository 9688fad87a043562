//! The interface between the weight formats and the products.

use super::activations::{Activations, IntegerWidth, Quantized};
use super::panel::OUTPUTS;
#[cfg(feature = "autodiff")]
use super::place::Place;

/// A weight of any format.
pub(super) trait Multiplicand: Sync {
    /// Width of the integers that activations are rounded to, or `None` for products of floats.
    fn integer_width(&self) -> Option<IntegerWidth>;

    /// Returns the rows that a weight of `outputs` rows has in memory: at least one panel.
    fn padded_rows(&self, outputs: usize) -> usize {
        outputs.max(OUTPUTS)
    }

    /// Multiplies all rows of activations with a range of outputs.
    fn multiply(&self, x: &Input<'_>, part: Part<'_>);

    /// Decodes up to sixteen whole rows of `inputs` inputs.
    #[cfg(feature = "autodiff")]
    fn unpack(&self, place: Place, inputs: usize, values: &mut [f32]);
}

/// Activations in every form that one of the weights needs.
pub(super) struct Input<'a> {
    pub numbers: &'a Activations<'a>,
    pub as_i16: Option<Quantized>,
    pub as_i8: Option<Quantized>,
}

/// A range of outputs.
pub(super) struct Part<'a> {
    /// The first output.
    pub first: usize,
    /// Rows of the weight in memory; see [`Multiplicand::padded_rows`].
    pub weight_rows: usize,
    /// The results of these outputs for every row, initially zero.
    pub results: Vec<&'a mut [f32]>,
}
