//! The RMS norm.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use firebox_kernels::linear::RowNorm;
use firebox_kernels::norm::{add_rms_norm, rms_norm};

use crate::ModelError;
use crate::config::NormConfig;
use crate::weights::Weights;

/// Divides by the root of the mean square, then multiplies by a weight.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// As the checkpoint has it.
    pub weight: Param<Tensor<1>>,
    /// Added to the mean square.
    pub epsilon: f64,
    /// Added to the weight.
    pub weight_offset: f32,
}

impl RmsNorm {
    pub(crate) fn load(config: &NormConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            weight: weights
                .added_to(config.weight_offset)
                .vector(&format!("{}.weight", config.name), config.width)?,
            epsilon: config.epsilon,
            weight_offset: config.weight_offset,
        })
    }

    /// Returns the parameters for kernels that fuse the norm.
    pub(crate) fn row_norm(&self) -> RowNorm {
        RowNorm { weight: self.weight.val(), epsilon: self.epsilon, offset: self.weight_offset }
    }

    /// Normalises the last dimension.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        rms_norm(x, self.weight.val(), self.epsilon, self.weight_offset)
    }

    /// The sum of two tensors `[rows, width]`, and the sum normalised.
    pub fn forward_sum(&self, x: Tensor<2>, residual: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        add_rms_norm(x, residual, self.weight.val(), self.epsilon, self.weight_offset)
    }
}
