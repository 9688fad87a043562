//! The kinds of feed-forward networks in a block, custom ones included.

use std::fmt::Debug;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;

use crate::absent::Absent;
use crate::config::FeedForwardConfig;
use crate::error::{ComponentError, ModelError, of_width};
use crate::experts::{CachedExperts, MixtureOfExperts};
use crate::gated::GatedFeedForward;
use crate::plain::PlainFeedForward;
use crate::weights::Weights;

/// What works on each position alone.
#[derive(Module, Debug)]
pub enum FeedForward {
    /// One gated network.
    Gated(GatedFeedForward),
    /// Two matrices with a nonlinearity between them.
    Plain(PlainFeedForward),
    /// Several, a few of which are chosen.
    MixtureOfExperts(MixtureOfExperts),
    /// None.
    Absent(Absent),
    /// A custom feed-forward.
    Own(HeldFeedForward),
}

/// A custom feed-forward, which [takes the place](crate::Decoder::with_feed_forward) of one that a model came with. Its
/// output for a row must not depend on the other rows, or a prompt computed in pieces would give other results.
pub trait OwnFeedForward: Debug + Send + Sync {
    /// That of no other, its numbers included: what sequences remember is kept under it.
    fn id(&self) -> &str;

    /// Maps `[rows, hidden_size]` to the same shape.
    fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, ComponentError>;
}

/// An [`OwnFeedForward`] as part of a block. To a visitor of the block's parameters it has none: they stay as they are.
#[derive(Module, Debug)]
pub struct HeldFeedForward {
    #[module(skip)]
    held: Arc<dyn OwnFeedForward>,
}

impl FeedForward {
    /// Builds the module. A mixture uses the experts of the cache if there is one.
    pub(crate) fn load(
        config: &FeedForwardConfig,
        weights: &Weights<'_>,
        experts: Option<CachedExperts>,
    ) -> Result<Self, ModelError> {
        let weights = weights.within("mlp.");
        Ok(match config {
            FeedForwardConfig::Gated(gated) => Self::Gated(GatedFeedForward::load(gated, &weights)?),
            FeedForwardConfig::Plain(plain) => Self::Plain(PlainFeedForward::load(plain, &weights)?),
            FeedForwardConfig::MixtureOfExperts(mixture) => {
                Self::MixtureOfExperts(MixtureOfExperts::load(mixture, &weights, experts)?)
            }
            FeedForwardConfig::Absent => Self::Absent(Absent),
        })
    }

    pub(crate) fn own(held: Arc<dyn OwnFeedForward>) -> Self {
        Self::Own(HeldFeedForward { held })
    }

    /// Maps `[rows, hidden_size]` to the same shape.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>, ModelError> {
        match self {
            Self::Gated(gated) => Ok(gated.forward(x)),
            Self::Plain(plain) => Ok(plain.forward(x)),
            Self::MixtureOfExperts(experts) => experts.forward(x),
            Self::Absent(absent) => Ok(absent.forward(x)),
            Self::Own(HeldFeedForward { held }) => of_width(held.id(), x.dims(), held.forward(x)),
        }
    }
}
