//! One layer of a decoder: a mixer and a feed-forward network with their norms.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use firebox_cache::{LayerCache, LayerLayout};
use firebox_kernels::step::StepError;

use crate::ModelError;
use crate::config::BlockConfig;
use crate::experts::CachedExperts;
use crate::feed_forward::FeedForward;
use crate::layer_inputs::LayerInput;
use crate::mixer::Mixer;
use crate::norm::Norm;
use crate::rows::Rows;
use crate::weights::Weights;

/// One layer: norm, mixer, norm, feed-forward.
#[derive(Module, Debug)]
pub struct Block {
    pub(crate) mixer_norm: Option<Norm>,
    pub(crate) mixer: Mixer,
    pub(crate) mixer_output_norm: Option<Norm>,
    pub(crate) feed_forward_norm: Option<Norm>,
    pub(crate) feed_forward: FeedForward,
    pub(crate) feed_forward_output_norm: Option<Norm>,
    #[module(skip)]
    pub(crate) residual_scale: Option<f32>,
    #[module(skip)]
    pub(crate) parallel: bool,
    pub(crate) layer_input: Option<LayerInput>,
    /// A number that the output is multiplied by.
    pub(crate) output_scale: Option<Param<Tensor<1>>>,
    #[module(skip)]
    norms_sums: bool,
}

impl Block {
    /// Builds the module. Experts of a mixture come from the cache if there is one.
    pub(crate) fn load(
        config: &BlockConfig,
        weights: &Weights<'_>,
        experts: Option<CachedExperts>,
    ) -> Result<Self, ModelError> {
        let optional = |norm: &Option<_>| norm.as_ref().map(|norm| Norm::load(norm, weights)).transpose();
        Ok(Self {
            mixer_norm: Norm::load_present(&config.mixer_norm, weights)?,
            mixer: Mixer::load(&config.mixer, weights)?,
            mixer_output_norm: optional(&config.mixer_output_norm)?,
            feed_forward_norm: Norm::load_present(&config.feed_forward_norm, weights)?,
            feed_forward: FeedForward::load(&config.feed_forward, weights, experts)?,
            feed_forward_output_norm: optional(&config.feed_forward_output_norm)?,
            residual_scale: config.residual_scale,
            parallel: config.parallel,
            layer_input: match &config.layer_input {
                Some(input) => Some(LayerInput::load(input, weights)?),
                None => None,
            },
            output_scale: match &config.output_scale {
                Some(name) => Some(weights.vector(name, 1)?),
                None => None,
            },
            norms_sums: config.norms_sums,
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
        let fused = self.fused(&hidden, rows, &caches);
        if rows.steps.is_some() && !fused.as_ref().is_some_and(|fused| fused.can_record(&hidden)) {
            return Err(StepError::Unsupported { reason: "a layer is not fused".into() }.into());
        }
        if let Some(fused) = fused {
            return Ok(fused.forward(hidden, rows, &mut caches));
        }
        let x = normed(&self.mixer_norm, hidden.clone());
        let mixed = self.mixer.mix(x.clone(), rows, caches.into_iter())?;
        let mixed = self.scaled(normed(&self.mixer_output_norm, mixed));
        if matches!(self.feed_forward, FeedForward::Absent(_)) {
            return Ok(hidden.add(mixed));
        }
        let (hidden, x) = match &self.feed_forward_norm {
            Some(norm) if self.parallel => (hidden.clone().add(mixed), norm.forward(hidden)),
            None if self.parallel => (hidden.add(mixed), x),
            Some(norm) => norm.forward_sum(mixed, hidden),
            None => {
                let sum = hidden.add(mixed);
                (sum.clone(), sum)
            }
        };
        let hidden = hidden.add(self.fed(x)?);
        let hidden = match &self.layer_input {
            Some(input) => input.add(hidden, rows)?,
            None => hidden,
        };
        Ok(match &self.output_scale {
            Some(scale) => hidden.mul(scale.val().unsqueeze()),
            None => hidden,
        })
    }

    /// Takes `[rows, hidden_size]` of whole texts through this layer, where every token sees those behind it as well.
    pub(crate) fn forward_both_ways(&self, hidden: Tensor<2>, rows: &Rows) -> Result<Tensor<2>, ModelError> {
        let mixed = self.mixer.mix_both_ways(normed(&self.mixer_norm, hidden.clone()), rows)?;
        let hidden = self.joined(hidden, mixed, &self.mixer_output_norm);
        let fed = self.feed_forward.forward(normed(&self.feed_forward_norm, hidden.clone()))?;
        Ok(self.joined(hidden, fed, &self.feed_forward_output_norm))
    }

    /// Adds to the residual, with a norm of what is added or of the sum.
    fn joined(&self, residual: Tensor<2>, added: Tensor<2>, norm: &Option<Norm>) -> Tensor<2> {
        if self.norms_sums { normed(norm, residual.add(added)) } else { residual.add(normed(norm, added)) }
    }

    /// What the feed-forward adds to the residual.
    fn fed(&self, x: Tensor<2>) -> Result<Tensor<2>, ModelError> {
        Ok(self.scaled(normed(&self.feed_forward_output_norm, self.feed_forward.forward(x)?)))
    }

    fn scaled(&self, added: Tensor<2>) -> Tensor<2> {
        match self.residual_scale {
            Some(scale) => added.mul_scalar(scale),
            None => added,
        }
    }
}

impl BlockConfig {
    /// What such a layer remembers.
    pub fn layout(&self) -> LayerLayout {
        self.mixer.memory().layout()
    }
}

fn normed(norm: &Option<Norm>, x: Tensor<2>) -> Tensor<2> {
    match norm {
        Some(norm) => norm.forward(x),
        None => x,
    }
}
