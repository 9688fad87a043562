use burn::module::Module;
use burn::tensor::Tensor;
use firebox_cache::{LayerCache, LayerLayout};

use crate::ModelError;
use crate::attention::Attention;
use crate::config::{BlockConfig, FeedForwardConfig, MixerConfig};
use crate::delta_net::GatedDeltaNet;
use crate::experts::MixtureOfExperts;
use crate::gated::GatedFeedForward;
use crate::norm::RmsNorm;
use crate::rows::Rows;
use crate::weights::Weights;

/// One layer: norm, mixer, norm, feed-forward.
#[derive(Module, Debug)]
pub struct Block {
    mixer_norm: RmsNorm,
    mixer: Mixer,
    mixer_output_norm: Option<RmsNorm>,
    feed_forward_norm: RmsNorm,
    feed_forward: FeedForward,
    feed_forward_output_norm: Option<RmsNorm>,
}

/// What moves information between positions.
#[derive(Module, Debug)]
pub enum Mixer {
    /// Softmax attention.
    Attention(Attention),
    /// The gated delta rule.
    GatedDeltaNet(GatedDeltaNet),
}

/// What works on each position alone.
#[derive(Module, Debug)]
pub enum FeedForward {
    /// One gated network.
    Gated(GatedFeedForward),
    /// Several, a few of which are chosen.
    MixtureOfExperts(MixtureOfExperts),
}

impl Block {
    pub(crate) fn load(config: &BlockConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let optional = |norm: &Option<_>| norm.as_ref().map(|norm| RmsNorm::load(norm, weights)).transpose();
        Ok(Self {
            mixer_norm: RmsNorm::load(&config.mixer_norm, weights)?,
            mixer: match &config.mixer {
                MixerConfig::Attention(attention) => Mixer::Attention(Attention::load(attention, weights)?),
                MixerConfig::GatedDeltaNet(delta) => {
                    Mixer::GatedDeltaNet(GatedDeltaNet::load(delta, weights)?)
                }
            },
            mixer_output_norm: optional(&config.mixer_output_norm)?,
            feed_forward_norm: RmsNorm::load(&config.feed_forward_norm, weights)?,
            feed_forward: match &config.feed_forward {
                FeedForwardConfig::Gated(gated) => {
                    FeedForward::Gated(GatedFeedForward::load(gated, &weights.within("mlp."))?)
                }
                FeedForwardConfig::MixtureOfExperts(experts) => {
                    FeedForward::MixtureOfExperts(MixtureOfExperts::load(experts, &weights.within("mlp."))?)
                }
            },
            feed_forward_output_norm: optional(&config.feed_forward_output_norm)?,
        })
    }

    /// Takes `[rows, hidden_size]` through this layer. `caches` are those of the rows' groups, in order.
    pub(crate) fn forward<'c>(
        &self,
        hidden: Tensor<2>,
        rows: &Rows,
        caches: impl Iterator<Item = LayerCache<'c>>,
    ) -> Result<Tensor<2>, ModelError> {
        let x = self.mixer_norm.forward(hidden.clone());
        let mixed = match &self.mixer {
            Mixer::Attention(attention) => {
                let caches = caches.filter_map(|layer| match layer {
                    LayerCache::Attention(cache) => Some(cache),
                    LayerCache::Recurrent(_) => None,
                });
                attention.forward(x, rows, caches)
            }
            Mixer::GatedDeltaNet(delta) => {
                let states = caches.filter_map(|layer| match layer {
                    LayerCache::Recurrent(state) => Some(state),
                    LayerCache::Attention(_) => None,
                });
                delta.forward(x, rows, states)
            }
        };
        let (hidden, x) = self.feed_forward_norm.forward_sum(normed(&self.mixer_output_norm, mixed), hidden);
        let fed = match &self.feed_forward {
            FeedForward::Gated(gated) => gated.forward(x),
            FeedForward::MixtureOfExperts(experts) => experts.forward(x)?,
        };
        Ok(hidden.add(normed(&self.feed_forward_output_norm, fed)))
    }
}

impl BlockConfig {
    /// What such a layer remembers.
    pub fn layout(&self) -> LayerLayout {
        match &self.mixer {
            MixerConfig::Attention(attention) => attention.layout(),
            MixerConfig::GatedDeltaNet(_) => LayerLayout::Recurrent,
        }
    }
}

fn normed(norm: &Option<RmsNorm>, x: Tensor<2>) -> Tensor<2> {
    match norm {
        Some(norm) => norm.forward(x),
        None => x,
    }
}
