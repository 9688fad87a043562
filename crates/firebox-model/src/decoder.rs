use std::cell::RefCell;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor};
use firebox_cache::{KvType, Layout, Pool, SequenceCache};
use firebox_kernels::on_pool;
use firebox_store::Checkpoint;

use crate::block::Block;
use crate::config::{AttentionConfig, BlockConfig, DecoderConfig, MixerConfig};
use crate::families::Architecture;
use crate::matrix::Matrix;
use crate::norm::RmsNorm;
use crate::pass::{Pass, Wanted};
use crate::rows::Input;
use crate::weights::Weights;
use crate::{Encoder, ModelError};

/// A decoder: embedding, blocks, final norm, unembedding.
#[derive(Module, Debug)]
pub struct Decoder {
    embedding: Matrix,
    blocks: Vec<Block>,
    final_norm: RmsNorm,
    /// Absent where the embedding serves.
    unembedding: Option<Matrix>,
    #[module(skip)]
    config: DecoderConfig,
    #[module(skip)]
    device: Device,
}

impl Decoder {
    /// Builds a checkpoint's modules over its weights. Every tensor must be there, in the shape that the
    /// configuration says, and none beside them.
    pub fn load(checkpoint: &Checkpoint, device: &Device) -> Result<Self, ModelError> {
        let config = match Architecture::from_json(checkpoint.config())? {
            Architecture::Decoder(config) => config,
            Architecture::Encoder(_) => {
                return Err(ModelError::Kind {
                    model_type: "bert".into(),
                    found: "an encoder",
                    wanted: "a decoder",
                    remedy: "it embeds text but cannot continue it",
                });
            }
        };
        let taken = RefCell::default();
        let root = Weights::new(checkpoint, device, &taken);
        let weights = root.within(&config.names.prefix);
        let DecoderConfig { vocab_size, hidden_size, .. } = config;
        let blocks = config
            .blocks
            .iter()
            .enumerate()
            .map(|(index, block)| Block::load(block, &weights.within(&format!("layers.{index}."))))
            .collect::<Result<_, _>>()?;
        let unembedding = format!("{}.weight", config.names.unembedding);
        let model = Self {
            embedding: weights.matrix("embed_tokens.weight", vocab_size, hidden_size)?,
            blocks,
            final_norm: RmsNorm::load(&config.final_norm, &weights)?,
            unembedding: if config.tied_embeddings {
                None
            } else {
                Some(root.matrix(&unembedding, vocab_size, hidden_size)?)
            },
            device: device.clone(),
            config,
        };
        let names = root.untaken(|name| model.config.is_foreign(name));
        if names.is_empty() {
            Ok(model)
        } else {
            Err(ModelError::ExtraTensors { names, path: checkpoint.path().to_path_buf() })
        }
    }

    /// What it is made of.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How many blocks it has.
    pub fn layers(&self) -> usize {
        self.blocks.len()
    }

    /// What a sequence of this model remembers, keys and values kept as `kept`, or in f32 where the device has no
    /// such numbers.
    pub fn layout(&self, kept: KvType) -> Layout {
        let kept = match kept {
            KvType::F16 if !self.device.supports_dtype(DType::F16) => KvType::F32,
            kept => kept,
        };
        let layers = self.config.blocks.iter().map(BlockConfig::layout).collect();
        Layout { layers, kept, device: self.device.clone() }
    }

    /// An empty cache for a sequence of this model, exact, with pages of its own.
    pub fn cache(&self) -> SequenceCache {
        SequenceCache::new(&Pool::new(self.layout(KvType::F32)))
    }

    /// Takes up the positions that forgotten tokens have left in a sequence of this model. `length` is how long the
    /// sequence is known to become.
    pub fn close_up(&self, cache: &mut SequenceCache, length: usize) -> Result<(), ModelError> {
        let angles: Vec<_> =
            self.config.ropes.iter().map(|rope| (rope.frequencies(length).0, rope)).collect();
        let rotate = |layer: usize, keys: Tensor<3>, back: usize| match &self.config.blocks[layer].mixer {
            MixerConfig::Attention(AttentionConfig { rope: Some(index), .. }) => {
                let (frequencies, rope) = &angles[*index];
                rope.turn_back(keys, frequencies, back)
            }
            // Where there is no rotation, positions leave no trace.
            _ => keys,
        };
        Ok(cache.close_up(rotate)?)
    }

    /// A whole pass: the logits of some tokens that follow what is cached.
    pub fn forward(
        &self,
        tokens: &[u32],
        length: usize,
        cache: &mut SequenceCache,
        wanted: Wanted,
    ) -> Result<Tensor<2>, ModelError> {
        let input = Input { tokens, position: cache.position(), length };
        self.forward_together(&[input], &mut [cache], wanted)
    }

    /// The same for several sequences at once, each with its own cache.
    pub fn forward_together(
        &self,
        inputs: &[Input<'_>],
        caches: &mut [&mut SequenceCache],
        wanted: Wanted,
    ) -> Result<Tensor<2>, ModelError> {
        on_pool(&self.device, || {
            let mut pass = Pass::begin(self, inputs)?;
            while pass.next_layer() < self.layers() {
                pass.step(self, caches)?;
            }
            Ok(pass.logits(self, wanted))
        })
    }

    /// The hidden states after the first `layers` layers of a sequence that is nothing but `tokens`, `[tokens,
    /// hidden_size]`. Later layers do not run.
    pub fn hidden_after(&self, tokens: &[u32], layers: usize) -> Result<Tensor<2>, ModelError> {
        on_pool(&self.device, || {
            let mut cache = self.cache();
            let mut pass = Pass::begin(self, &[Input { tokens, position: 0, length: tokens.len() }])?;
            while pass.next_layer() < layers.min(self.layers()) {
                pass.step(self, &mut [&mut cache])?;
            }
            Ok(pass.hidden().clone())
        })
    }

    pub(crate) fn block(&self, index: usize) -> &Block {
        &self.blocks[index]
    }

    pub(crate) fn embed(&self, tokens: Tensor<1, Int>) -> Tensor<2> {
        let embedded = self.embedding.gather(tokens);
        match self.config.embedding_scale {
            Some(scale) => embedded.mul_scalar(scale),
            None => embedded,
        }
    }

    pub(crate) fn unembed(&self, hidden: Tensor<2>) -> Tensor<2> {
        let logits =
            self.unembedding.as_ref().unwrap_or(&self.embedding).multiply(self.final_norm.forward(hidden));
        match self.config.logit_softcap {
            Some(cap) => logits.div_scalar(cap).tanh().mul_scalar(cap),
            None => logits,
        }
    }
}

impl DecoderConfig {
    /// Whether a tensor may be there without being used.
    fn is_foreign(&self, name: &str) -> bool {
        self.names.foreign.iter().any(|prefix| name.starts_with(prefix))
            // Tied checkpoints sometimes store the embedding twice, old ones their rotary frequencies.
            || (self.tied_embeddings && name == format!("{}.weight", self.names.unembedding))
            || name.ends_with(".rotary_emb.inv_freq")
    }

    /// The shortest sequence for which positions mean what they mean in one of `length` tokens: once this
    /// changes, what was cached before does not fit what comes after.
    pub fn position_epoch(&self, length: usize) -> usize {
        self.ropes.iter().map(|rope| rope.epoch(length)).max().unwrap_or(0)
    }
}

/// A model of either kind.
#[derive(Debug)]
pub enum Network {
    /// It continues text.
    Decoder(Arc<Decoder>),
    /// It turns text into a vector.
    Encoder(Encoder),
}

impl Network {
    /// Builds whichever kind the checkpoint is.
    pub fn load(checkpoint: &Checkpoint, device: &Device) -> Result<Self, ModelError> {
        match Architecture::from_json(checkpoint.config())? {
            Architecture::Decoder(_) => {
                Decoder::load(checkpoint, device).map(|decoder| Self::Decoder(Arc::new(decoder)))
            }
            Architecture::Encoder(_) => Encoder::load(checkpoint, device).map(Self::Encoder),
        }
    }
}
