use burn::module::{Module, Param};
use burn::tensor::Tensor;

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
            weight: weights.vector(&format!("{}.weight", config.name), config.width)?,
            epsilon: config.epsilon,
            weight_offset: config.weight_offset,
        })
    }

    /// Normalises the last dimension.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let mean_square = x.clone().square().mean_dim(D - 1);
        let weight = self.weight.val();
        let weight = if self.weight_offset == 0.0 { weight } else { weight.add_scalar(self.weight_offset) };
        x.div(mean_square.add_scalar(self.epsilon).sqrt()).mul(weight.unsqueeze())
    }
}
