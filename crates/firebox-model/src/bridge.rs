//! The bridge of a head, a small residual network in place of layers.

use burn::module::Module;
use burn::tensor::{Tensor, activation};

use crate::ModelError;
use crate::config::{DecoderConfig, NormConfig};
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::weights::Weights;

/// What the names of a bridge's tensors begin with.
pub(crate) const BRIDGE: &str = "bridge.";

/// A small network in place of layers: `x + outward(silu(inward(norm(x))))`.
#[derive(Module, Debug)]
pub struct Bridge {
    norm: RmsNorm,
    inward: Linear,
    outward: Linear,
}

impl Bridge {
    pub(crate) fn load(
        width: usize,
        config: &DecoderConfig,
        weights: &Weights<'_>,
    ) -> Result<Self, ModelError> {
        let weights = weights.within(BRIDGE);
        let hidden = config.hidden_size;
        let norm = NormConfig { weight_offset: 0.0, ..config.final_norm.named("norm", hidden) };
        Ok(Self {
            norm: RmsNorm::load(&norm, &weights)?,
            inward: Linear::load(&weights, "inward", hidden, width, false)?,
            outward: Linear::load(&weights, "outward", width, hidden, false)?,
        })
    }

    /// Maps `[rows, hidden_size]` to the same shape.
    pub fn forward(&self, hidden: Tensor<2>) -> Tensor<2> {
        let inner = activation::silu(self.inward.forward(self.norm.forward(hidden.clone())));
        hidden.add(self.outward.forward(inner))
    }
}
