//! Mamba-2 as a mixer.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use firebox_cache::RecurrentState;
use firebox_kernels::convolution::ConvolutionParams;
use firebox_kernels::gate::gated;
use firebox_kernels::state_space::{ScanParams, ScanTokens, StateSpace, scan};

use crate::ModelError;
use crate::config::{Activation, MambaConfig};
use crate::linear::Linear;
use crate::norm::{RmsNorm, without_weight};
use crate::rows::{Rows, joined};
use crate::short_convolution::convolve_with_bias;
use crate::weights::{Learned, Weights};

/// A convolution and a selective state space: one projection yields a gate, the channels of the convolution, and
/// a time step for every head.
#[derive(Module, Debug)]
pub struct Mamba {
    input: Linear,
    output: Linear,
    norm: RmsNorm,
    /// `[channels, 1, kernel]`
    convolution: Param<Tensor<3>>,
    convolution_bias: Option<Param<Tensor<1>>>,
    /// The logarithm of every head's decay.
    rate: Param<Tensor<1>>,
    step_bias: Param<Tensor<1>>,
    skip: Param<Tensor<1>>,
    #[module(skip)]
    config: MambaConfig,
}

impl Mamba {
    pub(crate) fn load(config: &MambaConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let weights = weights.within("mamba.");
        let MambaConfig { hidden_size, heads, kernel, projection_bias, convolution_bias, .. } = *config;
        let (inner, channels) = (config.inner_size(), config.channels());
        let projected = inner + channels + heads;
        let bias = if convolution_bias { Some(weights.vector("conv1d.bias", channels)?) } else { None };
        Ok(Self {
            input: Linear::load(&weights, "in_proj", hidden_size, projected, projection_bias)?,
            output: Linear::load(&weights, "out_proj", inner, hidden_size, projection_bias)?,
            norm: RmsNorm::load(&config.norm, &weights)?,
            convolution: weights.learned("conv1d.weight", [channels, 1, kernel], Learned::All)?,
            convolution_bias: bias,
            rate: match config.decay_stored {
                true => weights.vector("A_log", heads)?.map(|decay| decay.neg().log()),
                false => weights.vector("A_log", heads)?,
            },
            step_bias: weights.vector("dt_bias", heads)?,
            skip: weights.vector("D", heads)?,
            config: config.clone(),
        })
    }

    /// Maps `[rows, hidden_size]` to `[rows, hidden_size]`. `states` are those of the rows' groups, in order.
    pub(crate) fn forward<'c>(
        &self,
        x: Tensor<2>,
        rows: &Rows,
        states: impl Iterator<Item = &'c mut RecurrentState>,
    ) -> Tensor<2> {
        let (inner, channels) = (self.config.inner_size(), self.config.channels());
        let projected = self.input.forward(x);
        let gate = projected.clone().narrow(1, 0, inner);
        let mixed = projected.clone().narrow(1, inner, channels);
        let step = projected.narrow(1, inner + channels, self.config.heads);
        let parts = rows.groups.iter().zip(states).map(|(group, state)| {
            let mixed = self.convolve(group.of(&mixed), state);
            self.scan(ScanTokens { mixed, step: group.of(&step) }, state)
        });
        let read = joined(parts.collect());
        self.output.forward(self.normed(gated(gate, read, Activation::Silu)))
    }

    /// Returns each channel's causal convolution.
    fn convolve(&self, mixed: Tensor<2>, state: &mut RecurrentState) -> Tensor<2> {
        let silu = self.config.activation == Activation::Silu && self.convolution_bias.is_none();
        let params = ConvolutionParams { exact: false, silu };
        let sums =
            convolve_with_bias(mixed, &self.convolution, self.convolution_bias.as_ref(), params, state);
        if silu { sums } else { self.config.activation.forward(sums) }
    }

    /// Runs the state through some tokens. Returns `[tokens, inner_size]`.
    fn scan(&self, tokens: ScanTokens, state: &mut RecurrentState) -> Tensor<2> {
        let MambaConfig { heads, head_dim, groups, states, smallest_step, largest_step, .. } = self.config;
        let steps = [smallest_step, largest_step.unwrap_or(f32::INFINITY)];
        let space = StateSpace { heads, width: head_dim, groups, states, steps };
        let params = ScanParams { rate: self.rate.val(), bias: self.step_bias.val(), skip: self.skip.val() };
        let memory = state.memory.take().map(|memory| memory.to_device(&tokens.mixed.device()));
        let (read, memory) = scan(tokens, params, space, memory);
        state.memory = Some(memory);
        read
    }

    /// Normalises the channels of every group together.
    fn normed(&self, x: Tensor<2>) -> Tensor<2> {
        let groups = self.config.groups;
        if groups == 1 {
            return self.norm.forward(x);
        }
        let [count, inner] = x.dims();
        let normed = without_weight(x.reshape([count * groups, inner / groups]), self.norm.epsilon);
        normed.reshape([count, inner]).mul(self.norm.weight.val().unsqueeze())
    }
}

impl MambaConfig {
    /// Returns the width of all heads together.
    pub(crate) fn inner_size(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the channels of the convolution: values, and two directions of every group.
    pub(crate) fn channels(&self) -> usize {
        self.inner_size() + 2 * self.groups * self.states
    }
}
