//! The feed-forward network of two matrices.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::ModelError;
use crate::config::{Activation, PlainConfig};
use crate::linear::Linear;
use crate::weights::Weights;

/// `down(activation(up(x)))`
#[derive(Module, Debug)]
pub struct PlainFeedForward {
    up: Linear,
    down: Linear,
    #[module(skip)]
    activation: Activation,
}

impl PlainFeedForward {
    pub(crate) fn load(config: &PlainConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let PlainConfig { hidden_size, inner_size, activation, bias } = *config;
        Ok(Self {
            up: Linear::load(weights, "up_proj", hidden_size, inner_size, bias)?,
            down: Linear::load(weights, "down_proj", inner_size, hidden_size, bias)?,
            activation,
        })
    }

    /// Maps `[rows, hidden_size]` to the same shape.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(self.activation.forward(self.up.forward(x)))
    }
}
