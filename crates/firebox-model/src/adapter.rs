//! Low-rank adapters that change the product of a linear layer.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use firebox_kernels::linear::multiply;

use crate::ModelError;
use crate::adapter_plan::{INWARD, OUTWARD};
use crate::weights::Weights;

/// A change of low rank to a product: `scale · (x · inwardᵀ) · outwardᵀ`, which only latent
/// attention multiplies out.
#[derive(Module, Debug)]
pub struct Adapter {
    /// `[rank, inputs]`
    pub inward: Param<Tensor<2>>,
    /// `[outputs, rank]`
    pub outward: Param<Tensor<2>>,
    /// What the change counts.
    pub scale: f32,
}

impl Adapter {
    /// The adapter of a weight, if there is one.
    pub(crate) fn load(
        weights: &Weights<'_>,
        name: &str,
        inputs: usize,
        outputs: usize,
    ) -> Result<Option<Self>, ModelError> {
        let (inward, outward) = (format!("{name}{INWARD}"), format!("{name}{OUTWARD}"));
        let rank = match weights.adapter_rank(name, &inward) {
            Some(rank) => rank.max(1),
            // Half of one is a fault, told by what it lacks.
            None if weights.has(&outward) => 1,
            None => return Ok(None),
        };
        Ok(Some(Self {
            inward: weights.parameter(&inward, [rank, inputs])?,
            outward: weights.parameter(&outward, [outputs, rank])?,
            scale: weights.adapter_scale(),
        }))
    }

    /// What it adds to the weight, `[outputs, inputs]`.
    pub fn product(&self) -> Tensor<2> {
        multiply(self.outward.val(), self.inward.val().transpose()).mul_scalar(self.scale)
    }

    /// What it adds to the product of `x`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        multiply(multiply(x, self.inward.val()), self.outward.val()).mul_scalar(self.scale)
    }
}
