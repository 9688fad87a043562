//! The gated delta rule as a mixer.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use firebox_cache::RecurrentState;
use firebox_kernels::convolution::{ConvolutionParams, convolve};
use firebox_kernels::delta::{DecayParams, Heads, Tokens, delta_rule};
use firebox_kernels::gate::gated;
use firebox_kernels::host_device;

use crate::ModelError;
use crate::config::{Activation, DeltaNetConfig, DeltaNetProjections};
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::rows::{Rows, joined};
use crate::weights::{Learned, Weights};

/// The gated delta rule as a mixer.
///
/// The projections run on the device. The rest runs on the CPU, up to the norm in f64, and the state stays
/// there: reads are often small differences of large terms, which the norm scales up again, so f32 and a
/// shader's exponentials would show in the fourth digit of the logits.
#[derive(Module, Debug)]
pub struct GatedDeltaNet {
    input: DeltaNetInput,
    output: Linear,
    norm: RmsNorm,
    /// `[channels, 1, kernel]`
    convolution: Param<Tensor<3>>,
    /// As in the checkpoint: a logarithm, or the decay itself.
    decay_rate: Param<Tensor<1>>,
    decay_bias: Param<Tensor<1>>,
    #[module(skip)]
    config: DeltaNetConfig,
}

#[derive(Module, Debug)]
enum DeltaNetInput {
    Separate(SeparateInput),
    GroupedSteps(GroupedStepsInput),
    Grouped(GroupedInput),
}

#[derive(Module, Debug)]
struct SeparateInput {
    mixed: Linear,
    gate: Linear,
    step: Linear,
    decay: Linear,
}

#[derive(Module, Debug)]
struct GroupedStepsInput {
    mixed: Linear,
    gate: Linear,
    /// Of a key head: steps, decays.
    step_decay: Linear,
}

/// Projections whose outputs lie one key head after the other.
#[derive(Module, Debug)]
struct GroupedInput {
    /// Of a key head: query, key, values, gates.
    mixed_gate: Linear,
    /// Of a key head: steps, decays.
    step_decay: Linear,
}

impl GatedDeltaNet {
    pub(crate) fn load(config: &DeltaNetConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let weights = weights.within("linear_attn.");
        let between = weights.on(host_device(weights.device()));
        let values = config.value_heads * config.value_dim;
        let channels = config.channels();
        let inward = |name, width| Linear::load(&weights, name, config.hidden_size, width, false);
        let input = match config.projections {
            DeltaNetProjections::Separate => DeltaNetInput::Separate(SeparateInput {
                mixed: inward("in_proj_qkv", channels)?,
                gate: inward("in_proj_z", values)?,
                step: inward("in_proj_b", config.value_heads)?,
                decay: inward("in_proj_a", config.value_heads)?,
            }),
            DeltaNetProjections::GroupedSteps => DeltaNetInput::GroupedSteps(GroupedStepsInput {
                mixed: inward("in_proj_qkv", channels)?,
                gate: inward("in_proj_z", values)?,
                step_decay: inward("in_proj_ba", 2 * config.value_heads)?,
            }),
            DeltaNetProjections::Grouped => DeltaNetInput::Grouped(GroupedInput {
                mixed_gate: inward("in_proj_qkvz", channels + values)?,
                step_decay: inward("in_proj_ba", 2 * config.value_heads)?,
            }),
        };
        Ok(Self {
            input,
            output: Linear::load(&weights, "out_proj", values, config.hidden_size, false)?,
            norm: RmsNorm::load(&config.norm, &between)?,
            convolution: between.learned("conv1d.weight", [channels, 1, config.kernel], Learned::All)?,
            decay_rate: between.vector("A_log", config.value_heads)?,
            decay_bias: between.vector("dt_bias", config.value_heads)?,
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
        let DeltaNetConfig { value_heads, value_dim, .. } = self.config;
        let [count, _] = x.dims();
        let device = x.device();
        let between = host_device(&device);
        let [mixed, gate, step, decay] = self.project(x, &between);
        let parts = rows.groups.iter().zip(states).map(|(group, state)| {
            let mixed = self.convolve(group.of(&mixed), state);
            self.recur(Tokens { mixed, step: group.of(&step), decay: group.of(&decay) }, state)
        });
        let read = joined(parts.collect());
        let read = self.norm.forward(read.reshape([count * value_heads, value_dim]));
        let gated = gated(gate, read.reshape([count, value_heads * value_dim]), Activation::Silu);
        self.output.forward(gated.to_device(&device))
    }

    /// Returns queries, keys and values; gates; steps; and decays on a device.
    fn project(&self, x: Tensor<2>, between: &Device) -> [Tensor<2>; 4] {
        let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, .. } = self.config;
        let of_key_head = value_heads / key_heads;
        match &self.input {
            DeltaNetInput::Separate(SeparateInput { mixed, gate, step, decay }) => {
                Linear::forward_each([mixed, gate, step, decay], x)
                    .map(|projected| projected.to_device(between))
            }
            DeltaNetInput::GroupedSteps(GroupedStepsInput { mixed, gate, step_decay }) => {
                let [mixed, gate, step_decay] = Linear::forward_each([mixed, gate, step_decay], x)
                    .map(|projected| projected.to_device(between));
                let [step, decay] = parts(step_decay, key_heads, [of_key_head, of_key_head]);
                [mixed, gate, step, decay]
            }
            DeltaNetInput::Grouped(GroupedInput { mixed_gate, step_decay }) => {
                let [mixed_gate, step_decay] = Linear::forward_each([mixed_gate, step_decay], x)
                    .map(|projected| projected.to_device(between));
                let values = of_key_head * value_dim;
                let [query, key, value, gate] =
                    parts(mixed_gate, key_heads, [key_dim, key_dim, values, values]);
                let [step, decay] = parts(step_decay, key_heads, [of_key_head, of_key_head]);
                [Tensor::cat(vec![query, key, value], 1), gate, step, decay]
            }
        }
    }

    /// Returns each channel's causal convolution in f64.
    fn convolve(&self, mixed: Tensor<2>, state: &mut RecurrentState) -> Tensor<2> {
        let silu = self.config.activation == Activation::Silu;
        let params = ConvolutionParams { exact: true, silu };
        let (sums, kept) =
            convolve(mixed, state.convolution.take(), self.convolution.val().squeeze_dim(1), params);
        state.convolution = Some(kept);
        if silu { sums } else { self.config.activation.forward(sums) }
    }

    /// Runs the state through some tokens. Returns `[tokens, value heads * value width]`.
    fn recur(&self, tokens: Tokens, state: &mut RecurrentState) -> Tensor<2> {
        let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, .. } = self.config;
        let heads = Heads {
            key_heads,
            value_heads,
            key_width: key_dim,
            value_width: value_dim,
            tiled: self.config.value_heads_tiled,
        };
        let decay_params = DecayParams {
            rate: self.decay_rate.val(),
            bias: self.decay_bias.val(),
            logarithmic: !self.config.decay_stored,
        };
        let (read, memory) = delta_rule(tokens, decay_params, heads, state.memory.take());
        state.memory = Some(memory);
        read
    }
}

impl DeltaNetConfig {
    /// Returns the channels of the convolution: queries, keys and values.
    pub(crate) fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// Divides rows of several heads into parts of every head, each as `[rows, heads * width]`.
fn parts<const N: usize>(x: Tensor<2>, heads: usize, widths: [usize; N]) -> [Tensor<2>; N] {
    let [rows, width] = x.dims();
    let x = x.reshape([rows, heads, width / heads]);
    let mut start = 0;
    widths.map(|width| {
        let part = x.clone().narrow(2, start, width).reshape([rows, heads * width]);
        start += width;
        part
    })
}
