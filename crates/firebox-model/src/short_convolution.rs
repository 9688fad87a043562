//! The gated short convolution as a mixer.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use firebox_cache::RecurrentState;
use firebox_kernels::convolution::{ConvolutionParams, convolve};

use crate::ModelError;
use crate::config::ShortConvolutionConfig;
use crate::linear::Linear;
use crate::rows::{Rows, joined};
use crate::weights::{Learned, Weights};

/// `output(after · convolution(before · value))`, where one projection yields `before`, `after` and `value`.
#[derive(Module, Debug)]
pub struct ShortConvolution {
    input: Linear,
    output: Linear,
    /// `[hidden_size, 1, kernel]`
    convolution: Param<Tensor<3>>,
    bias: Option<Param<Tensor<1>>>,
}

impl ShortConvolution {
    pub(crate) fn load(config: &ShortConvolutionConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let weights = weights.within("conv.");
        let ShortConvolutionConfig { hidden_size, kernel, bias } = *config;
        Ok(Self {
            input: Linear::load(&weights, "in_proj", hidden_size, 3 * hidden_size, bias)?,
            output: Linear::load(&weights, "out_proj", hidden_size, hidden_size, bias)?,
            convolution: weights.learned("conv.weight", [hidden_size, 1, kernel], Learned::All)?,
            bias: if bias { Some(weights.vector("conv.bias", hidden_size)?) } else { None },
        })
    }

    /// Maps `[rows, hidden_size]` to `[rows, hidden_size]`. `states` are those of the rows' groups, in order.
    pub(crate) fn forward<'c>(
        &self,
        x: Tensor<2>,
        rows: &Rows,
        states: impl Iterator<Item = &'c mut RecurrentState>,
    ) -> Tensor<2> {
        let projected = self.input.forward(x);
        let width = projected.dims()[1] / 3;
        let [before, after, value] = [0, 1, 2].map(|part| projected.clone().narrow(1, part * width, width));
        let mixed = before.mul(value);
        let parts = rows.groups.iter().zip(states).map(|(group, state)| {
            let params = ConvolutionParams::default();
            convolve_with_bias(group.of(&mixed), &self.convolution, self.bias.as_ref(), params, state)
        });
        let sums = joined(parts.collect());
        self.output.forward(after.mul(sums))
    }
}

/// Returns each channel's causal convolution, behind what the state has of earlier tokens.
pub(crate) fn convolve_with_bias(
    mixed: Tensor<2>,
    convolution: &Param<Tensor<3>>,
    bias: Option<&Param<Tensor<1>>>,
    params: ConvolutionParams,
    state: &mut RecurrentState,
) -> Tensor<2> {
    // A restored state is on the CPU.
    let earlier = state.convolution.take().map(|earlier| earlier.to_device(&mixed.device()));
    let (sums, kept) = convolve(mixed, earlier, convolution.val().squeeze_dim(1), params);
    state.convolution = Some(kept);
    match bias {
        Some(bias) => sums.add(bias.val().unsqueeze()),
        None => sums,
    }
}
