//! The gated short convolution as a mixer.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use firebox_cache::RecurrentState;
use firebox_kernels::convolution::{ConvolutionParams, convolve};

use crate::ModelError;
use crate::config::ShortConvolutionConfig;
use crate::linear::Linear;
use crate::rows::Rows;
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
        let device = x.device();
        let projected = self.input.forward(x);
        let width = projected.dims()[1] / 3;
        let [before, after, value] = [0, 1, 2].map(|part| projected.clone().narrow(1, part * width, width));
        let mixed = before.mul(value);
        let mut parts: Vec<_> = rows
            .groups
            .iter()
            .zip(states)
            .map(|(group, state)| {
                let mixed = mixed.clone().narrow(0, group.rows.start, group.rows.len());
                // A restored state is on the CPU.
                let earlier = state.convolution.take().map(|earlier| earlier.to_device(&device));
                let taps = self.convolution.val().squeeze_dim(1);
                let (sums, kept) = convolve(mixed, earlier, taps, ConvolutionParams::default());
                state.convolution = Some(kept);
                sums
            })
            .collect();
        let sums = if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) };
        let sums = match &self.bias {
            Some(bias) => sums.add(bias.val().unsqueeze()),
            None => sums,
        };
        self.output.forward(after.mul(sums))
    }
}
