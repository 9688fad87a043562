use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor, activation};
use firebox_cache::RecurrentState;
use firebox_kernels::delta::{Tokens, delta_rule};
use firebox_kernels::host;

use crate::ModelError;
use crate::attention::joined;
use crate::config::DeltaNetConfig;
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::rows::Rows;
use crate::weights::{Weights, param};

/// The gated delta rule: a matrix per head that forgets by a gate and is corrected towards every token.
///
/// The projections run on the device. What lies between them runs on the CPU in f64, and the state stays there:
/// what is read from it is often a small difference of large terms that the norm behind it scales up again, so
/// that f32 and a shader's exponentials show in the fourth digit of the logits.
#[derive(Module, Debug)]
pub struct GatedDeltaNet {
    mixed: Linear,
    gate: Linear,
    step: Linear,
    decay: Linear,
    output: Linear,
    norm: RmsNorm,
    /// `[channels, kernel]`
    convolution: Param<Tensor<2>>,
    /// As the checkpoint has it: a logarithm, or the decay itself.
    decay_rate: Param<Tensor<1>>,
    decay_bias: Param<Tensor<1>>,
    #[module(skip)]
    config: DeltaNetConfig,
}

impl GatedDeltaNet {
    pub(crate) fn load(config: &DeltaNetConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let weights = weights.within("linear_attn.");
        let between = weights.on(host(weights.device()));
        let values = config.value_heads * config.value_dim;
        let channels = config.channels();
        let inward = |name, width| Linear::load(&weights, name, config.hidden_size, width, false);
        Ok(Self {
            mixed: inward("in_proj_qkv", channels)?,
            gate: inward("in_proj_z", values)?,
            step: inward("in_proj_b", config.value_heads)?,
            decay: inward("in_proj_a", config.value_heads)?,
            output: Linear::load(&weights, "out_proj", values, config.hidden_size, false)?,
            norm: RmsNorm::load(&config.norm, &between)?,
            convolution: param(
                between
                    .plain("conv1d.weight", [channels, 1, config.kernel])?
                    .reshape([channels, config.kernel]),
            ),
            decay_rate: between.vector("A_log", config.value_heads)?,
            decay_bias: between.vector("dt_bias", config.value_heads)?,
            config: config.clone(),
        })
    }

    /// From `[rows, hidden_size]` to the same. `states` are those of the rows' groups, in order.
    pub(crate) fn forward<'c>(
        &self,
        x: Tensor<2>,
        rows: &Rows,
        states: impl Iterator<Item = &'c mut RecurrentState>,
    ) -> Tensor<2> {
        let DeltaNetConfig { value_heads, value_dim, .. } = self.config;
        let [count, _] = x.dims();
        let device = x.device();
        let between = host(&device);
        let exact = |projected: Tensor<2>| projected.to_device(&between).cast(DType::F64);
        let [gate, step, decay, mixed] =
            Linear::forward_each([&self.gate, &self.step, &self.decay, &self.mixed], x);
        let gate = exact(gate).reshape([count, value_heads, value_dim]);
        let step = activation::sigmoid(exact(step));
        let rate = self.decay_rate.val().cast(DType::F64);
        let rate = if self.config.decay_stored { rate } else { rate.exp().neg() };
        let bias = self.decay_bias.val().cast(DType::F64);
        let decay = activation::softplus(exact(decay).add(bias.unsqueeze()), 1.0)
            .mul(rate.unsqueeze())
            .exp();
        let mixed = exact(mixed);
        let parts = rows
            .groups
            .iter()
            .zip(states)
            .map(|(group, state)| {
                let of_group =
                    |tensor: &Tensor<2>| tensor.clone().narrow(0, group.rows.start, group.rows.len());
                let mixed = self.convolve(of_group(&mixed), state);
                self.recur(self.tokens(mixed, of_group(&decay), of_group(&step)), state)
            })
            .collect();
        let read = self.norm.forward(joined(parts).cast(DType::F32));
        let gated = read.mul(activation::silu(gate).cast(DType::F32));
        self.output.forward(gated.reshape([count, value_heads * value_dim]).to_device(&device))
    }

    /// Each channel's weighted sum over the last tokens, this one included.
    fn convolve(&self, mixed: Tensor<2>, state: &mut RecurrentState) -> Tensor<2> {
        let [count, channels] = mixed.dims();
        let before = self.config.kernel - 1;
        let padded = if before == 0 {
            mixed
        } else {
            let earlier = state
                .convolution
                .take()
                .unwrap_or_else(|| Tensor::zeros([before, channels], (&mixed.device(), DType::F64)));
            Tensor::cat(vec![earlier, mixed], 0)
        };
        if before > 0 {
            state.convolution = Some(padded.clone().narrow(0, count, before));
        }
        let taps = self.convolution.val().cast(DType::F64);
        let mut sum: Option<Tensor<2>> = None;
        for tap in 0..self.config.kernel {
            let weight = taps.clone().narrow(1, tap, 1).reshape([1, channels]);
            let term = padded.clone().narrow(0, tap, count).mul(weight);
            sum = Some(match sum {
                Some(sum) => sum.add(term),
                None => term,
            });
        }
        self.config.activation.forward(sum.unwrap_or(padded))
    }

    fn tokens(&self, mixed: Tensor<2>, decay: Tensor<2>, step: Tensor<2>) -> Tokens {
        let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, .. } = self.config;
        let [count, _] = mixed.dims();
        let keys = key_heads * key_dim;
        let heads = |from, heads, width| {
            mixed.clone().narrow(1, from, heads * width).reshape([count, heads, width]).swap_dims(0, 1)
        };
        let unit = |heads: Tensor<3>| {
            let square = heads.clone().square().sum_dim(2);
            heads.div(square.add_scalar(1e-6).sqrt())
        };
        let query = unit(heads(0, key_heads, key_dim)).mul_scalar((key_dim as f32).powf(-0.5));
        let per_head = |values: Tensor<2>| values.transpose().reshape([value_heads, count, 1]);
        Tokens {
            query: self.for_value_heads(query),
            key: self.for_value_heads(unit(heads(keys, key_heads, key_dim))),
            value: heads(2 * keys, value_heads, value_dim),
            decay: per_head(decay),
            step: per_head(step),
        }
    }

    /// Gives every value head the key head it belongs to.
    fn for_value_heads(&self, heads: Tensor<3>) -> Tensor<3> {
        let [key_heads, count, width] = heads.dims();
        let sharing = self.config.value_heads / key_heads;
        if sharing == 1 {
            return heads;
        }
        let (as_one, shape) = if self.config.value_heads_tiled {
            ([1, key_heads, count, width], [sharing, key_heads, count, width])
        } else {
            ([key_heads, 1, count, width], [key_heads, sharing, count, width])
        };
        heads.reshape(as_one).expand(shape).reshape([self.config.value_heads, count, width])
    }

    /// Takes the state through some tokens. Returns `[tokens, value heads, value width]`.
    fn recur(&self, tokens: Tokens, state: &mut RecurrentState) -> Tensor<3> {
        let DeltaNetConfig { value_heads, key_dim, value_dim, .. } = self.config;
        let memory = state.memory.take().unwrap_or_else(|| {
            let device = tokens.value.device();
            Tensor::zeros([value_heads, key_dim, value_dim], (&device, DType::F64))
        });
        let (read, memory) = delta_rule(tokens, memory);
        state.memory = Some(memory);
        read.swap_dims(0, 1)
    }
}

impl DeltaNetConfig {
    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}
