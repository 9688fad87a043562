//! Norms: by the root mean square, and layer norms.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use firebox_kernels::linear::RowNorm;
use firebox_kernels::norm::{add_rms_norm, rms_norm};

use crate::ModelError;
use crate::config::{NormConfig, NormKind};
use crate::weights::Weights;

/// A norm of hidden states.
#[derive(Module, Debug)]
pub enum Norm {
    /// Divides by the root of the mean square.
    Rms(RmsNorm),
    /// Subtracts the mean and divides by the standard deviation.
    Layer(LayerNorm),
}

impl Norm {
    pub(crate) fn load(config: &NormConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        Ok(match config.kind {
            NormKind::Layer { bias } => {
                Self::Layer(LayerNorm::load(weights, &config.name, config.width, config.epsilon, bias)?)
            }
            NormKind::Rms | NormKind::Absent => Self::Rms(RmsNorm::load(config, weights)?),
        })
    }

    /// Builds the module unless the configuration says that there is none.
    pub(crate) fn load_present(
        config: &NormConfig,
        weights: &Weights<'_>,
    ) -> Result<Option<Self>, ModelError> {
        match config.kind {
            NormKind::Absent => Ok(None),
            NormKind::Rms | NormKind::Layer { .. } => Self::load(config, weights).map(Some),
        }
    }

    /// Returns it if kernels that fuse a norm can apply it.
    pub(crate) fn as_rms(&self) -> Option<&RmsNorm> {
        match self {
            Self::Rms(norm) => Some(norm),
            Self::Layer(_) => None,
        }
    }

    pub(crate) fn device(&self) -> Device {
        match self {
            Self::Rms(norm) => norm.weight.val().device(),
            Self::Layer(norm) => norm.weight.val().device(),
        }
    }

    /// Normalises rows.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }

    /// The sum of two tensors `[rows, width]`, and the sum normalised.
    pub fn forward_sum(&self, x: Tensor<2>, residual: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        match self {
            Self::Rms(norm) => norm.forward_sum(x, residual),
            Self::Layer(norm) => {
                let sum = residual.add(x);
                (sum.clone(), norm.forward(sum))
            }
        }
    }
}

/// Subtracts the mean, divides by the standard deviation, then multiplies by a weight and adds a bias.
#[derive(Module, Debug)]
pub struct LayerNorm {
    weight: Param<Tensor<1>>,
    bias: Option<Param<Tensor<1>>>,
    epsilon: f64,
}

impl LayerNorm {
    pub(crate) fn load(
        weights: &Weights<'_>,
        name: &str,
        width: usize,
        epsilon: f64,
        bias: bool,
    ) -> Result<Self, ModelError> {
        Ok(Self {
            weight: weights.vector(&format!("{name}.weight"), width)?,
            bias: if bias { Some(weights.vector(&format!("{name}.bias"), width)?) } else { None },
            epsilon,
        })
    }

    /// Normalises rows.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let centred = x.clone().sub(x.mean_dim(1));
        let variance = centred.clone().square().mean_dim(1);
        let scaled = centred.div(variance.add_scalar(self.epsilon).sqrt()).mul(self.weight.val().unsqueeze());
        match &self.bias {
            Some(bias) => scaled.add(bias.val().unsqueeze()),
            None => scaled,
        }
    }
}

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

/// Divides the last dimension by the root of its mean square.
pub(crate) fn without_weight<const D: usize>(x: Tensor<D>, epsilon: f64) -> Tensor<D> {
    let ones = Tensor::ones([x.dims()[D - 1]], &x.device());
    rms_norm(x, ones, epsilon, 0.0)
}
