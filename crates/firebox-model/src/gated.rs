//! The gated feed-forward network.

use burn::module::Module;
use burn::tensor::Tensor;
use firebox_kernels::gate::{gated, gated_halves};
use firebox_kernels::linear::Weight;

use crate::ModelError;
use crate::config::{Activation, GatedConfig};
use crate::linear::Linear;
use crate::weights::Weights;

/// `down(activation(gate(x)) * up(x))`
#[derive(Module, Debug)]
pub struct GatedFeedForward {
    input: GatedInput,
    down: Linear,
    #[module(skip)]
    activation: Activation,
}

#[derive(Module, Debug)]
enum GatedInput {
    Separate(SeparateInput),
    Fused(Linear),
}

#[derive(Module, Debug)]
struct SeparateInput {
    gate: Linear,
    up: Linear,
}

impl GatedFeedForward {
    pub(crate) fn load(config: &GatedConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let GatedConfig { hidden_size, inner_size, activation, bias, fused } = *config;
        let inward = |name, width| Linear::load(weights, name, hidden_size, width, bias);
        let input = if fused {
            GatedInput::Fused(inward("gate_up_proj", 2 * inner_size)?)
        } else {
            GatedInput::Separate(SeparateInput {
                gate: inward("gate_proj", inner_size)?,
                up: inward("up_proj", inner_size)?,
            })
        };
        let down = Linear::load(weights, "down_proj", inner_size, hidden_size, bias)?;
        Ok(Self { input, down, activation })
    }

    /// Returns the weights of gate and up, of down, and the nonlinearity, if there are no biases or adapters.
    pub(crate) fn plain_weights(&self) -> Option<([Weight; 2], Weight, Activation)> {
        match &self.input {
            GatedInput::Separate(SeparateInput { gate, up }) => Some((
                [gate.plain_weights()?, up.plain_weights()?],
                self.down.plain_weights()?,
                self.activation,
            )),
            GatedInput::Fused(_) => None,
        }
    }

    /// Maps `[rows, hidden_size]` to the same shape.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let inner = match &self.input {
            GatedInput::Separate(SeparateInput { gate, up }) => {
                let [gate, up] = Linear::forward_each([gate, up], x);
                gated(gate, up, self.activation)
            }
            GatedInput::Fused(input) => gated_halves(input.forward(x), self.activation),
        };
        self.down.forward(inner)
    }
}
