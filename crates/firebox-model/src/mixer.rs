use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use firebox_cache::{LayerCache, LayerLayout, RecurrentState};

use crate::attention::Attention;
use crate::config::MixerConfig;
use crate::delta_net::GatedDeltaNet;
use crate::error::{ComponentError, ModelError, of_width};
use crate::rows::Rows;
use crate::weights::Weights;

/// What moves information between positions.
#[derive(Module, Debug)]
pub enum Mixer {
    /// Softmax attention.
    Attention(Attention),
    /// The gated delta rule.
    GatedDeltaNet(GatedDeltaNet),
    /// One of somebody else's kind.
    Own(HeldMixer),
}

/// A mixer of somebody else's kind, which [takes the place](crate::Decoder::with_mixer) of one that a model came with.
///
/// What it does to a row may depend on that row, on earlier rows of the same sequence, and on what is remembered of
/// it. It must not depend on how many of them come at a time, or prompts in pieces say something else.
pub trait OwnMixer: Debug + Send + Sync {
    /// That of no other, its numbers included: what sequences remember is kept under it.
    fn id(&self) -> &str;

    /// What it remembers of a sequence. Always the same.
    fn memory(&self) -> MixerMemory;

    /// From `[rows, hidden_size]` to the same.
    fn forward(&self, x: Tensor<2>, sequences: Sequences<'_>) -> Result<Tensor<2>, ComponentError>;
}

/// What a mixer remembers of a sequence. With that, sequences branch, go back and are saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MixerMemory {
    /// A key and a value of every head for every position.
    KeysAndValues {
        /// Heads of keys and values.
        kv_heads: usize,
        /// Width of one head.
        head_dim: usize,
        /// Which of the model's position schemes keys were [rotated](Sequences::rotate) by, if any.
        rope: Option<usize>,
    },
    /// A state of constant size, one tensor or two, absent before the first token. One that was saved comes back on the
    /// CPU, whatever the model's device is.
    State {
        /// The shape of [`RecurrentState::memory`], where it is used.
        memory: Option<[usize; 3]>,
        /// The shape of [`RecurrentState::convolution`], where it is used.
        convolution: Option<[usize; 2]>,
    },
}

impl MixerMemory {
    /// How a cache keeps it.
    pub(crate) fn layout(self) -> LayerLayout {
        match self {
            Self::KeysAndValues { kv_heads, head_dim, .. } => LayerLayout::Attention { kv_heads, head_dim },
            Self::State { .. } => LayerLayout::Recurrent,
        }
    }
}

/// The sequences whose tokens are the rows of a hidden state, one after the other, and what a mixer remembers of each.
#[derive(Debug)]
pub struct Sequences<'a> {
    rows: &'a Rows,
    caches: Vec<LayerCache<'a>>,
}

/// One of them.
#[derive(Debug)]
pub struct Sequence<'s, 'a> {
    /// Which rows are its tokens.
    pub rows: Range<usize>,
    /// The position of the first of them.
    pub position: usize,
    /// What is remembered of those before.
    pub cache: &'s mut LayerCache<'a>,
}

impl<'a> Sequences<'a> {
    /// One after the other.
    pub fn each(&mut self) -> impl Iterator<Item = Sequence<'_, 'a>> {
        self.rows.groups.iter().zip(&mut self.caches).map(|(group, cache)| Sequence {
            rows: group.rows.clone(),
            position: group.position,
            cache,
        })
    }

    /// Rotates `[rows, heads, head_dim]` to the rows' positions, by one of the model's position schemes.
    ///
    /// # Panics
    /// If there is none of that index.
    pub fn rotate(&self, rope: usize, heads: Tensor<3>) -> Tensor<3> {
        self.rows.rope(rope).rotate(heads)
    }
}

impl Sequence<'_, '_> {
    /// The state, of a mixer that [remembers](MixerMemory) one.
    pub fn state(&mut self) -> Option<&mut RecurrentState> {
        match self.cache {
            LayerCache::Recurrent(state) => Some(state),
            LayerCache::Attention(_) => None,
        }
    }
}

/// An [`OwnMixer`] as part of a block. To a visitor of the block's parameters it has none: they stay as they are.
#[derive(Module, Debug)]
pub struct HeldMixer {
    #[module(skip)]
    held: Arc<dyn OwnMixer>,
}

impl Mixer {
    pub(crate) fn load(config: &MixerConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        Ok(match config {
            MixerConfig::Attention(attention) => Self::Attention(Attention::load(attention, weights)?),
            MixerConfig::GatedDeltaNet(delta) => Self::GatedDeltaNet(GatedDeltaNet::load(delta, weights)?),
        })
    }

    pub(crate) fn own(held: Arc<dyn OwnMixer>) -> Self {
        Self::Own(HeldMixer { held })
    }

    /// From `[rows, hidden_size]` to the same. `caches` are those of the rows' groups, in order.
    pub(crate) fn mix<'c>(
        &self,
        x: Tensor<2>,
        rows: &Rows,
        caches: impl Iterator<Item = LayerCache<'c>>,
    ) -> Result<Tensor<2>, ModelError> {
        match self {
            Self::Attention(attention) => {
                let caches = caches.filter_map(|layer| match layer {
                    LayerCache::Attention(cache) => Some(cache),
                    LayerCache::Recurrent(_) => None,
                });
                Ok(attention.forward(x, rows, caches))
            }
            Self::GatedDeltaNet(delta) => {
                let states = caches.filter_map(|layer| match layer {
                    LayerCache::Recurrent(state) => Some(state),
                    LayerCache::Attention(_) => None,
                });
                Ok(delta.forward(x, rows, states))
            }
            Self::Own(HeldMixer { held }) => {
                let sequences = Sequences { rows, caches: caches.collect() };
                of_width(held.id(), x.dims(), held.forward(x, sequences))
            }
        }
    }

    /// From `[rows, hidden_size]` to the same, for one that stands within another. That one has to remember what this
    /// one does.
    pub fn forward(&self, x: Tensor<2>, sequences: Sequences<'_>) -> Result<Tensor<2>, ModelError> {
        let fits = |cache: &LayerCache<'_>| match self {
            Self::Attention(_) => matches!(cache, LayerCache::Attention(_)),
            Self::GatedDeltaNet(_) => matches!(cache, LayerCache::Recurrent(_)),
            // It looks for itself.
            Self::Own(_) => true,
        };
        if !sequences.caches.iter().all(fits) {
            return Err(ModelError::Component {
                id: "a mixer within another".into(),
                source: "it remembers something else than the one around it says".into(),
            });
        }
        self.mix(x, sequences.rows, sequences.caches.into_iter())
    }
}

impl MixerConfig {
    /// What such a mixer remembers.
    pub fn memory(&self) -> MixerMemory {
        match self {
            Self::Attention(attention) => MixerMemory::KeysAndValues {
                kv_heads: attention.kv_heads,
                head_dim: attention.head_dim,
                rope: attention.rope,
            },
            Self::GatedDeltaNet(delta) => MixerMemory::State {
                memory: Some([delta.value_heads, delta.key_dim, delta.value_dim]),
                convolution: Some([delta.kernel.saturating_sub(1), delta.channels()]),
            },
        }
    }
}
