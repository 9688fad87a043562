//! Mixers: attention, also to latents, the gated delta rule, short convolutions, Mamba-2, and custom ones.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use firebox_cache::{AttentionCache, LayerCache, LayerLayout, RecurrentState};

use crate::absent::Absent;
use crate::attention::Attention;
use crate::config::{AttentionConfig, MixerConfig};
use crate::delta_net::GatedDeltaNet;
use crate::error::{ComponentError, ModelError, of_width};
use crate::latent_attention::LatentAttention;
use crate::mamba::Mamba;
use crate::rows::Rows;
use crate::short_convolution::ShortConvolution;
use crate::weights::Weights;

/// The part of a block that moves information between positions.
#[derive(Module, Debug)]
pub enum Mixer {
    /// Softmax attention.
    Attention(Attention),
    /// Softmax attention to latents.
    LatentAttention(LatentAttention),
    /// The gated delta rule.
    GatedDeltaNet(GatedDeltaNet),
    /// A gated short convolution.
    ShortConvolution(ShortConvolution),
    /// Mamba-2.
    Mamba(Mamba),
    /// None.
    Absent(Absent),
    /// A custom mixer.
    Own(HeldMixer),
}

/// A custom mixer that [replaces](crate::Decoder::with_mixer) one of a model's own.
///
/// The output of a row may depend on that row, on earlier rows of the same sequence and on the cached state.
/// It must not depend on how the rows are split into calls, or prompts in chunks give different results.
pub trait OwnMixer: Debug + Send + Sync {
    /// Returns an identifier that no other mixer has, its parameters included. Caches are stored under it.
    fn id(&self) -> &str;

    /// Returns what the mixer caches of a sequence. It must be constant.
    fn memory(&self) -> MixerMemory;

    /// Maps `[rows, hidden_size]` to `[rows, hidden_size]`.
    fn forward(&self, x: Tensor<2>, sequences: Sequences<'_>) -> Result<Tensor<2>, ComponentError>;
}

/// What a mixer caches of a sequence, so that sequences can branch, be rewound and be saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MixerMemory {
    /// A key and a value of every head for every position.
    KeysAndValues {
        /// Number of key and value heads.
        kv_heads: usize,
        /// Width of a head.
        head_dim: usize,
        /// Index of the position scheme that keys were [rotated](Sequences::rotate) by, if any.
        rope: Option<usize>,
    },
    /// Nothing: the keys and values of an earlier layer are read.
    Shared {
        /// That layer, whose mixer caches keys and values.
        layer: usize,
    },
    /// A row for every position that is key and value of one head at once. A position scheme rotates its first elements;
    /// the mixer drops them from what attention yields.
    Latents {
        /// Width of a row.
        width: usize,
        /// Index of the position scheme that rows were [rotated](Sequences::rotate) by, if any.
        rope: Option<usize>,
    },
    /// A state of constant size in one or two tensors, absent before the first token. A restored state is on
    /// the CPU, whatever the model's device is.
    State {
        /// Shape of [`RecurrentState::memory`], if it is used.
        memory: Option<[usize; 3]>,
        /// Shape of [`RecurrentState::convolution`], if it is used.
        convolution: Option<[usize; 2]>,
    },
}

impl MixerMemory {
    /// Returns the index of the position scheme that cached keys are rotated by, if any.
    pub(crate) fn rope(self) -> Option<usize> {
        match self {
            Self::KeysAndValues { rope, .. } | Self::Latents { rope, .. } => rope,
            Self::Shared { .. } | Self::State { .. } => None,
        }
    }

    /// Returns the cache layout of a layer with this mixer.
    pub(crate) fn layout(self) -> LayerLayout {
        match self {
            Self::KeysAndValues { kv_heads, head_dim, .. } => LayerLayout::Attention { kv_heads, head_dim },
            Self::Shared { layer } => LayerLayout::Shared { layer },
            Self::Latents { width, .. } => LayerLayout::Latents { width },
            Self::State { .. } => LayerLayout::Recurrent,
        }
    }
}

/// The sequences whose tokens are the rows of a hidden state, one after the other, with the caches of a
/// layer.
#[derive(Debug)]
pub struct Sequences<'a> {
    rows: &'a Rows,
    caches: Vec<LayerCache<'a>>,
}

/// One sequence of a pass.
#[derive(Debug)]
pub struct Sequence<'s, 'a> {
    /// Rows of its tokens.
    pub rows: Range<usize>,
    /// Position of its first row.
    pub position: usize,
    /// The layer's cache of its earlier positions.
    pub cache: &'s mut LayerCache<'a>,
}

impl<'a> Sequences<'a> {
    /// Returns the sequences one after the other.
    pub fn each(&mut self) -> impl Iterator<Item = Sequence<'_, 'a>> {
        self.rows.groups.iter().zip(&mut self.caches).map(|(group, cache)| Sequence {
            rows: group.rows.clone(),
            position: group.position,
            cache,
        })
    }

    /// Rotates `[rows, heads, head_dim]` to the rows' positions by one of the model's position schemes.
    ///
    /// # Panics
    /// If the model has no scheme of that index.
    pub fn rotate(&self, rope: usize, heads: Tensor<3>) -> Tensor<3> {
        self.rows.rope(rope).rotate(heads)
    }
}

impl Sequence<'_, '_> {
    /// Returns the state of a mixer that [caches](MixerMemory) one.
    pub fn state(&mut self) -> Option<&mut RecurrentState> {
        match self.cache {
            LayerCache::Recurrent(state) => Some(state),
            LayerCache::Attention(_) => None,
        }
    }
}

/// An [`OwnMixer`] as part of a block. Visitors of the block's parameters find none in it.
#[derive(Module, Debug)]
pub struct HeldMixer {
    #[module(skip)]
    held: Arc<dyn OwnMixer>,
}

impl Mixer {
    pub(crate) fn load(config: &MixerConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        Ok(match config {
            MixerConfig::Attention(attention) => Self::Attention(Attention::load(attention, weights)?),
            MixerConfig::LatentAttention(attention) => {
                Self::LatentAttention(LatentAttention::load(attention, weights)?)
            }
            MixerConfig::GatedDeltaNet(delta) => Self::GatedDeltaNet(GatedDeltaNet::load(delta, weights)?),
            MixerConfig::ShortConvolution(convolution) => {
                Self::ShortConvolution(ShortConvolution::load(convolution, weights)?)
            }
            MixerConfig::Mamba(mamba) => Self::Mamba(Mamba::load(mamba, weights)?),
            MixerConfig::Absent => Self::Absent(Absent),
        })
    }

    pub(crate) fn own(held: Arc<dyn OwnMixer>) -> Self {
        Self::Own(HeldMixer { held })
    }

    /// Maps `[rows, hidden_size]` to `[rows, hidden_size]`. `caches` are those of the rows' groups, in order.
    pub(crate) fn mix<'c>(
        &self,
        x: Tensor<2>,
        rows: &Rows,
        caches: impl Iterator<Item = LayerCache<'c>>,
    ) -> Result<Tensor<2>, ModelError> {
        match self {
            Self::Attention(held) => Ok(held.forward(x, rows, caches.filter_map(attention))),
            Self::LatentAttention(held) => Ok(held.forward(x, rows, caches.filter_map(attention))),
            Self::GatedDeltaNet(delta) => Ok(delta.forward(x, rows, caches.filter_map(recurrent))),
            Self::ShortConvolution(convolution) => {
                Ok(convolution.forward(x, rows, caches.filter_map(recurrent)))
            }
            Self::Mamba(mamba) => Ok(mamba.forward(x, rows, caches.filter_map(recurrent))),
            Self::Absent(absent) => Ok(absent.forward(x)),
            Self::Own(HeldMixer { held }) => {
                let sequences = Sequences { rows, caches: caches.collect() };
                of_width(held.id(), x.dims(), held.forward(x, sequences))
            }
        }
    }

    /// Maps `[rows, hidden_size]` of whole texts to the same shape, where every token sees those behind it as well.
    pub(crate) fn mix_both_ways(&self, x: Tensor<2>, rows: &Rows) -> Result<Tensor<2>, ModelError> {
        let attended = match self {
            Self::Attention(attention) => attention.forward_both_ways(x, rows),
            _ => None,
        };
        attended.ok_or_else(|| ModelError::Component {
            id: "the mixer of an encoder".into(),
            source: "it sees only what came before; an encoder needs attention with keys of its own".into(),
        })
    }

    /// Maps `[rows, hidden_size]` to `[rows, hidden_size]` as part of another mixer, which must cache what
    /// this one does.
    pub fn forward(&self, x: Tensor<2>, sequences: Sequences<'_>) -> Result<Tensor<2>, ModelError> {
        let fits = |cache: &LayerCache<'_>| match self {
            Self::Attention(_) => {
                matches!(cache, LayerCache::Attention(cache) if cache.stores_latents() != Some(true))
            }
            Self::LatentAttention(_) => {
                matches!(cache, LayerCache::Attention(cache) if cache.stores_latents() != Some(false))
            }
            Self::GatedDeltaNet(_) | Self::ShortConvolution(_) | Self::Mamba(_) => {
                matches!(cache, LayerCache::Recurrent(_))
            }
            // A custom mixer checks by itself.
            Self::Absent(_) | Self::Own(_) => true,
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
    /// Returns what the mixer caches of a sequence.
    pub fn memory(&self) -> MixerMemory {
        match self {
            Self::Attention(AttentionConfig { kv_layer: Some(layer), .. }) => {
                MixerMemory::Shared { layer: *layer }
            }
            Self::Attention(attention) => MixerMemory::KeysAndValues {
                kv_heads: attention.kv_heads,
                head_dim: attention.head_dim,
                rope: attention.rope,
            },
            Self::LatentAttention(attention) => {
                MixerMemory::Latents { width: attention.width(), rope: Some(attention.rope) }
            }
            Self::GatedDeltaNet(delta) => MixerMemory::State {
                memory: Some([delta.value_heads, delta.key_dim, delta.value_dim]),
                convolution: Some([delta.kernel.saturating_sub(1), delta.channels()]),
            },
            Self::ShortConvolution(convolution) => MixerMemory::State {
                memory: None,
                convolution: Some([convolution.kernel.saturating_sub(1), convolution.hidden_size]),
            },
            Self::Mamba(mamba) => MixerMemory::State {
                memory: Some([mamba.heads, mamba.states, mamba.head_dim]),
                convolution: Some([mamba.kernel.saturating_sub(1), mamba.channels()]),
            },
            Self::Absent => MixerMemory::State { memory: None, convolution: None },
        }
    }
}

/// Returns the cache of an attention layer.
fn attention(layer: LayerCache<'_>) -> Option<AttentionCache<'_>> {
    match layer {
        LayerCache::Attention(cache) => Some(cache),
        LayerCache::Recurrent(_) => None,
    }
}

/// Returns the state of a recurrent layer.
fn recurrent(layer: LayerCache<'_>) -> Option<&mut RecurrentState> {
    match layer {
        LayerCache::Recurrent(state) => Some(state),
        LayerCache::Attention(_) => None,
    }
}
