//! One layer of a decoder: a mixer and a feed-forward network with their norms.

use burn::module::Module;
use burn::tensor::Tensor;
use firebox_cache::{LayerCache, LayerLayout};
use firebox_kernels::step::StepError;

use crate::ModelError;
use crate::config::BlockConfig;
use crate::experts::CachedExperts;
use crate::feed_forward::FeedForward;
use crate::mixer::Mixer;
use crate::norm::RmsNorm;
use crate::rows::Rows;
use crate::weights::Weights;

/// One layer: norm, mixer, norm, feed-forward.
#[derive(Module, Debug)]
pub struct Block {
    pub(crate) mixer_norm: RmsNorm,
    pub(crate) mixer: Mixer,
    pub(crate) mixer_output_norm: Option<RmsNorm>,
    pub(crate) feed_forward_norm: RmsNorm,
    pub(crate) feed_forward: FeedForward,
    pub(crate) feed_forward_output_norm: Option<RmsNorm>,
}

impl Block {
    /// Builds the module. Experts of a mixture come from the cache if there is one.
    pub(crate) fn load(
        config: &BlockConfig,
        weights: &Weights<'_>,
        experts: Option<CachedExperts>,
    ) -> Result<Self, ModelError> {
        let optional = |norm: &Option<_>| norm.as_ref().map(|norm| RmsNorm::load(norm, weights)).transpose();
        Ok(Self {
            mixer_norm: RmsNorm::load(&config.mixer_norm, weights)?,
            mixer: Mixer::load(&config.mixer, weights)?,
            mixer_output_norm: optional(&config.mixer_output_norm)?,
            feed_forward_norm: RmsNorm::load(&config.feed_forward_norm, weights)?,
            feed_forward: FeedForward::load(&config.feed_forward, weights, experts)?,
            feed_forward_output_norm: optional(&config.feed_forward_output_norm)?,
        })
    }

    pub(crate) fn mixer(&self) -> &Mixer {
        &self.mixer
    }

    pub(crate) fn feed_forward(&self) -> &FeedForward {
        &self.feed_forward
    }

    /// Whether it is made of nothing but what its checkpoint has.
    pub(crate) fn is_original(&self) -> bool {
        !matches!(self.mixer, Mixer::Own(_)) && !matches!(self.feed_forward, FeedForward::Own(_))
    }

    pub(crate) fn with_mixer(&self, mixer: Mixer) -> Self {
        Self { mixer, ..self.clone() }
    }

    pub(crate) fn with_feed_forward(&self, feed_forward: FeedForward) -> Self {
        Self { feed_forward, ..self.clone() }
    }

    /// Takes `[rows, hidden_size]` through this layer. `caches` are those of the rows' groups, in order.
    pub(crate) fn forward<'c>(
        &self,
        hidden: Tensor<2>,
        rows: &Rows,
        caches: impl Iterator<Item = LayerCache<'c>>,
    ) -> Result<Tensor<2>, ModelError> {
        let mut caches: Vec<_> = caches.collect();
        let fused = self.fused(&hidden, &caches);
        if rows.steps.is_some() && !fused.as_ref().is_some_and(|fused| fused.can_record(&hidden)) {
            return Err(StepError::Unsupported { reason: "a layer is not fused".into() }.into());
        }
        if let Some(fused) = fused {
            return Ok(fused.forward(hidden, rows, &mut caches));
        }
        let x = self.mixer_norm.forward(hidden.clone());
        let mixed = self.mixer.mix(x, rows, caches.into_iter())?;
        let (hidden, x) = self.feed_forward_norm.forward_sum(normed(&self.mixer_output_norm, mixed), hidden);
        let fed = self.feed_forward.forward(x)?;
        Ok(hidden.add(normed(&self.feed_forward_output_norm, fed)))
    }
}

impl BlockConfig {
    /// What such a layer remembers.
    pub fn layout(&self) -> LayerLayout {
        self.mixer.memory().layout()
    }
}

fn normed(norm: &Option<RmsNorm>, x: Tensor<2>) -> Tensor<2> {
    match norm {
        Some(norm) => norm.forward(x),
        None => x,
    }
}
