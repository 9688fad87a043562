//! The fused forward path of a block on accelerators.

use burn::tensor::Tensor;
use firebox_cache::{AttentionCache, LayerCache};
use firebox_kernels::Activation;
use firebox_kernels::linear::{self, Weight, multiply_added, multiply_each_normed, multiply_gated};

use crate::attention::Attention;
use crate::block::Block;
use crate::feed_forward::FeedForward;
use crate::mixer::Mixer;
use crate::norm::RmsNorm;
use crate::rows::Rows;

/// A block of attention and a gated feed-forward, each after an RMS norm, without output norms, biases, adapters and factors.
pub(crate) struct FusedBlock<'a> {
    attention_norm: &'a RmsNorm,
    attention: &'a Attention,
    inward: [Weight; 3],
    outward: Weight,
    feed_forward_norm: &'a RmsNorm,
    gate_up: [Weight; 2],
    down: Weight,
    activation: Activation,
}

impl Block {
    /// Returns the fused form of the block, if its device gains from that and the block has only parts that can be fused.
    pub(crate) fn fused(
        &self,
        hidden: &Tensor<2>,
        rows: &Rows,
        caches: &[LayerCache<'_>],
    ) -> Option<FusedBlock<'_>> {
        let (Mixer::Attention(attention), FeedForward::Gated(gated)) = (&self.mixer, &self.feed_forward)
        else {
            return None;
        };
        let stores_floats =
            |cache: &LayerCache<'_>| matches!(cache, LayerCache::Attention(cache) if cache.stores_floats());
        let output_norms = self.mixer_output_norm.is_some() || self.feed_forward_output_norm.is_some();
        if self.parallel || self.residual_scale.is_some() || attention.grows(rows) {
            return None;
        }
        if self.layer_input.is_some() || self.output_scale.is_some() {
            return None;
        }
        if !linear::fuses_rows(hidden) || output_norms || !caches.iter().all(stores_floats) {
            return None;
        }
        let ((inward, outward), (gate_up, down, activation)) =
            (attention.plain_weights()?, gated.plain_weights()?);
        Some(FusedBlock {
            attention_norm: self.mixer_norm.as_ref()?.as_rms()?,
            attention,
            inward,
            outward,
            feed_forward_norm: self.feed_forward_norm.as_ref()?.as_rms()?,
            gate_up,
            down,
            activation,
        })
    }
}

impl FusedBlock<'_> {
    /// Returns whether it can be part of a recorded step.
    pub fn can_record(&self, hidden: &Tensor<2>) -> bool {
        self.attention.can_record(hidden)
    }

    /// Takes `[rows, hidden_size]` through the block, as [`Block::forward`] does.
    pub fn forward(self, hidden: Tensor<2>, rows: &Rows, caches: &mut [LayerCache<'_>]) -> Tensor<2> {
        let mut products =
            multiply_each_normed(hidden.clone(), self.attention_norm.row_norm(), self.inward.into())
                .into_iter();
        let heads =
            std::array::from_fn(|_| products.next().unwrap_or_else(|| unreachable!("three products")));
        let mut caches: Vec<&mut AttentionCache<'_>> = caches
            .iter_mut()
            .filter_map(|cache| match cache {
                LayerCache::Attention(cache) => Some(cache),
                LayerCache::Recurrent(_) => None,
            })
            .collect();
        let gathered = self.attention.gather(heads, rows, &mut caches);
        let hidden = multiply_added(gathered, self.outward, hidden);
        let inner =
            multiply_gated(hidden.clone(), self.feed_forward_norm.row_norm(), self.gate_up, self.activation);
        multiply_added(inner, self.down, hidden)
    }
}
