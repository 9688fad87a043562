//! The gated feed-forward network.

use burn::module::Module;
use burn::tensor::Tensor;
use firebox_kernels::gate::{gated, gated_halves};
use firebox_kernels::linear::Weight;

use crate::ModelError;
use crate::config::{Activation, GatedConfig};
use crate::linear::Linear;
use crate::weights::Weights;

/// `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` in experts without gates.
#[derive(Module, Debug)]
pub struct GatedFeedForward {
    input: GatedInput,
    down: Linear,
    #[module(skip)]
    activation: Activation,
    #[module(skip)]
    interleaved: bool,
    #[module(skip)]
    limit: Option<f32>,
}

#[derive(Module, Debug)]
enum GatedInput {
    Separate(SeparateInput),
    Fused(Linear),
    Ungated(Linear),
}

#[derive(Module, Debug)]
struct SeparateInput {
    gate: Linear,
    up: Linear,
}

impl GatedFeedForward {
    pub(crate) fn load(config: &GatedConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let GatedConfig { hidden_size, inner_size, activation, bias, fused, interleaved, limit, ungated } =
            *config;
        let inward = |name, width| Linear::load(weights, name, hidden_size, width, bias);
        let input = if ungated {
            GatedInput::Ungated(inward("up_proj", inner_size)?)
        } else if fused {
            GatedInput::Fused(inward("gate_up_proj", 2 * inner_size)?)
        } else {
            GatedInput::Separate(SeparateInput {
                gate: inward("gate_proj", inner_size)?,
                up: inward("up_proj", inner_size)?,
            })
        };
        let down = Linear::load(weights, "down_proj", inner_size, hidden_size, bias)?;
        Ok(Self { input, down, activation, interleaved, limit })
    }

    /// Returns the weights of gate and up, of down, and the nonlinearity, if there are no biases, adapters or limits.
    pub(crate) fn plain_weights(&self) -> Option<([Weight; 2], Weight, Activation)> {
        match &self.input {
            GatedInput::Separate(SeparateInput { gate, up }) if self.limit.is_none() => Some((
                [gate.plain_weights()?, up.plain_weights()?],
                self.down.plain_weights()?,
                self.activation,
            )),
            _ => None,
        }
    }

    /// Maps `[rows, hidden_size]` to the same shape.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let inner = match &self.input {
            GatedInput::Separate(SeparateInput { gate, up }) => {
                let [gate, up] = Linear::forward_each([gate, up], x);
                self.gated(gate, up)
            }
            GatedInput::Fused(input) => {
                let both = input.forward(x);
                let [rows, width] = both.dims();
                let width = width / 2;
                if self.interleaved {
                    let pairs = both.reshape([rows, width, 2]);
                    let [gate, up] = [0, 1].map(|at| pairs.clone().narrow(2, at, 1).reshape([rows, width]));
                    self.gated(gate, up)
                } else if self.limit.is_some() {
                    self.gated(both.clone().narrow(1, 0, width), both.narrow(1, width, width))
                } else {
                    gated_halves(both, self.activation)
                }
            }
            GatedInput::Ungated(up) => self.activation.forward(up.forward(x)),
        };
        self.down.forward(inner)
    }

    fn gated(&self, gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
        match self.limit {
            Some(limit) => {
                let up = up.clamp(-limit, limit).add_scalar(1.0);
                gated(gate.clamp_max(limit), up, self.activation)
            }
            None => gated(gate, up, self.activation),
        }
    }
}
