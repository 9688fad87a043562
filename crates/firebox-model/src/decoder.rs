//! The decoder: embedding, blocks, final norm and unembedding, with resident or streamed weights.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use burn::tensor::{DType, Device, Int, Tensor};
use firebox_cache::{KvType, LayerLayout, Layout, PagePool, SequenceCache};
use firebox_kernels::step::StepError;
use firebox_store::Checkpoint;

use crate::ModelError;
use crate::block::Block;
use crate::config::DecoderConfig;
use crate::families::Architecture;
use crate::feed_forward::{FeedForward, OwnFeedForward};
use crate::input_moments::InputMoments;
use crate::layer_inputs::{DiskRows, LayerInputs};
use crate::mixer::{Mixer, MixerMemory, OwnMixer};
use crate::norm::Norm;
use crate::observer::Observer;
use crate::positions::LearnedPositions;
use crate::recording::StepRecorder;
use crate::resident::ResidentWeights;
use crate::rows::{Span, indices};
use crate::stream_lock::StreamLockGuard;
use crate::streamed::StreamedWeights;
use crate::weights::Weights;

/// A decoder: embedding, blocks, final norm, unembedding.
#[derive(Debug)]
pub struct Decoder {
    parts: Parts,
    final_norm: Norm,
    positions: Option<LearnedPositions>,
    /// What computes the inputs of layers, and the table that they are read from.
    layer_inputs: Option<(LayerInputs, DiskRows)>,
    config: DecoderConfig,
    device: Device,
    /// What the mixer of every layer remembers.
    memories: Vec<MixerMemory>,
    changes: Vec<String>,
    split: OnceLock<usize>,
    observer: RwLock<Option<Arc<dyn Observer>>>,
    recorder: StepRecorder,
}

/// A decoder's large weights.
#[derive(Debug)]
enum Parts {
    Resident(ResidentWeights),
    Streamed(Arc<StreamedWeights>),
}

impl Parts {
    /// Rows of a matrix that is never in memory.
    fn rows(&self, name: String) -> DiskRows {
        match self {
            Self::Resident(whole) => whole.rows(name),
            Self::Streamed(streamed) => streamed.rows(name),
        }
    }
}

/// Exclusive use of streamed weights. Resident weights need none.
#[derive(Debug)]
#[must_use]
pub struct StreamGuard<'a> {
    _streaming: Option<StreamLockGuard<'a>>,
}

/// The turn of an interleaved pass, until it is dropped.
#[derive(Debug)]
pub struct StreamTurn(Arc<Decoder>);

impl Drop for StreamTurn {
    fn drop(&mut self) {
        if let Some(streamed) = self.0.streamed() {
            streamed.lock().end_turn();
        }
    }
}

impl Decoder {
    /// Builds a checkpoint's modules over its weights. Every tensor must be there, in the shape that the
    /// configuration says, and none beside them.
    pub fn load(checkpoint: &Checkpoint, device: &Device) -> Result<Self, ModelError> {
        let taken = RefCell::default();
        Self::resident(checkpoint, &Weights::new(checkpoint, device, &taken))
    }

    /// Builds the modules so that the inputs of their matrices are measured.
    pub fn measuring_inputs(
        checkpoint: &Checkpoint,
        device: &Device,
        moments: &InputMoments,
    ) -> Result<Self, ModelError> {
        let taken = RefCell::default();
        Self::resident(checkpoint, &Weights::new(checkpoint, device, &taken).measuring(moments))
    }

    fn resident(checkpoint: &Checkpoint, root: &Weights<'_>) -> Result<Self, ModelError> {
        let config = decoder_config(checkpoint.config())?;
        let whole = ResidentWeights::load(checkpoint, &config, root)?;
        Self::checked(Parts::Resident(whole), config, root)
    }

    /// A decoder that streams these weights. Its other tensors are loaded from `root`.
    pub(crate) fn with_streamed(
        weights: Arc<StreamedWeights>,
        config: DecoderConfig,
        root: &Weights<'_>,
    ) -> Result<Self, ModelError> {
        Self::checked(Parts::Streamed(weights), config, root)
    }

    fn checked(parts: Parts, config: DecoderConfig, root: &Weights<'_>) -> Result<Self, ModelError> {
        let weights = root.within(&config.names.prefix);
        let final_norm = Norm::load(&config.final_norm, &weights)?;
        let positions = LearnedPositions::load(&config, &weights)?;
        let layer_inputs = match (&config.layer_inputs, config.layer_table()) {
            (Some(inputs), Some((name, shape))) => {
                root.check(&name, &shape)?;
                Some((LayerInputs::load(inputs, &config, &weights)?, parts.rows(name)))
            }
            _ => None,
        };
        root.all_taken(|name| config.is_foreign(name))?;
        Ok(Self {
            parts,
            final_norm,
            positions,
            layer_inputs,
            memories: config.blocks.iter().map(|block| block.mixer.memory()).collect(),
            changes: Vec::new(),
            config,
            device: root.device().clone(),
            split: OnceLock::new(),
            observer: RwLock::new(None),
            recorder: StepRecorder::default(),
        })
    }

    /// Returns this decoder with a custom mixer in a layer, made from the mixer that is there. All weights are shared, so that
    /// variants of a model may be used side by side.
    ///
    /// Layers of heads do not change: from the split on only the model's own layers do. A streamed decoder takes no custom
    /// mixer, since its blocks are built anew whenever they are read.
    pub fn with_mixer<M: OwnMixer + 'static>(
        &self,
        layer: usize,
        make: impl FnOnce(Mixer) -> M,
    ) -> Result<Self, ModelError> {
        let (whole, block) = self.replaceable(layer)?;
        let own: Arc<dyn OwnMixer> = Arc::new(make(block.mixer().clone()));
        let (memory, change) = (own.memory(), format!("{} as mixer {layer}", own.id()));
        if let Some(rope) = memory.rope()
            && rope >= self.config.ropes.len()
        {
            let reason = format!("its keys are rotated by scheme {rope} of {}", self.config.ropes.len());
            return Err(ModelError::Misplaced { layer, reason });
        }
        let shares = |other: &MixerMemory| *other == MixerMemory::Shared { layer };
        let differs = memory != self.config.blocks[layer].mixer.memory();
        if differs && (matches!(memory, MixerMemory::Shared { .. }) || self.memories.iter().any(shares)) {
            let reason = "its keys and values would not be those that layers share".into();
            return Err(ModelError::Misplaced { layer, reason });
        }
        let mut decoder = self.with_block(layer, block.with_mixer(Mixer::own(own)), whole, change);
        decoder.memories[layer] = memory;
        match self.split() {
            Some(split) => decoder.fits_heads(split).map(|()| decoder),
            None => Ok(decoder),
        }
    }

    /// Returns this decoder with a custom feed-forward in a layer, as [`with_mixer`](Self::with_mixer) does with a mixer.
    pub fn with_feed_forward<F: OwnFeedForward + 'static>(
        &self,
        layer: usize,
        make: impl FnOnce(FeedForward) -> F,
    ) -> Result<Self, ModelError> {
        let (whole, block) = self.replaceable(layer)?;
        let own: Arc<dyn OwnFeedForward> = Arc::new(make(block.feed_forward().clone()));
        let change = format!("{} as feed-forward {layer}", own.id());
        Ok(self.with_block(layer, block.with_feed_forward(FeedForward::own(own)), whole, change))
    }

    /// Weights and block of a layer that may be replaced.
    fn replaceable(&self, layer: usize) -> Result<(&ResidentWeights, Arc<Block>), ModelError> {
        let reason = match &self.parts {
            Parts::Streamed(_) => {
                "the model is read from disk while it runs; open it without a limit of memory".into()
            }
            Parts::Resident(whole) if layer < self.layers() => {
                return Ok((whole, whole.block(layer, &self.config, &self.device)?));
            }
            Parts::Resident(_) => format!("there are {}, counted from 0", self.layers()),
        };
        Err(ModelError::Misplaced { layer, reason })
    }

    fn with_block(&self, layer: usize, block: Block, whole: &ResidentWeights, change: String) -> Self {
        Self {
            parts: Parts::Resident(whole.with_block(layer, block)),
            final_norm: self.final_norm.clone(),
            positions: self.positions.clone(),
            layer_inputs: self.layer_inputs.clone(),
            config: self.config.clone(),
            device: self.device.clone(),
            memories: self.memories.clone(),
            changes: self.changes.iter().cloned().chain([change]).collect(),
            split: self.split.clone(),
            observer: RwLock::new(self.observer()),
            recorder: StepRecorder::default(),
        }
    }

    /// Refuses a layer from `split` on that remembers something else than the checkpoint's own: those of heads do not.
    fn fits_heads(&self, split: usize) -> Result<(), ModelError> {
        let differs = |layer: &usize| self.memories[*layer] != self.config.blocks[*layer].mixer.memory();
        match (split..self.layers()).find(differs) {
            Some(layer) => Err(ModelError::Misplaced {
                layer,
                reason: format!("heads begin at layer {split}, and theirs remember something else"),
            }),
            None => Ok(()),
        }
    }

    /// What it has that did not come with it, in the order it came.
    pub fn changes(&self) -> &[String] {
        &self.changes
    }

    /// The weights of a decoder that [streams](crate::StreamedDecoder) them.
    pub fn streamed(&self) -> Option<&StreamedWeights> {
        match &self.parts {
            Parts::Streamed(streamed) => Some(streamed),
            Parts::Resident(_) => None,
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

    /// Who looks on from now on.
    pub fn set_observer(&self, observer: Arc<dyn Observer>) {
        *self.observer.write().unwrap_or_else(PoisonError::into_inner) = Some(observer);
    }

    pub(crate) fn observer(&self) -> Option<Arc<dyn Observer>> {
        self.observer.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many blocks it has.
    pub fn layers(&self) -> usize {
        self.config.blocks.len()
    }

    /// Lets heads take the place of the layers from `split` on. Once said, it stays.
    pub fn split_at(&self, split: usize) -> Result<(), ModelError> {
        self.check_split(split)?;
        self.release_recorded_step();
        if *self.split.get_or_init(|| split) == split { Ok(()) } else { self.check_split(split) }
    }

    /// Whether that may be said.
    pub(crate) fn check_split(&self, split: usize) -> Result<(), ModelError> {
        self.fits_heads(split)?;
        if split < self.layers() && self.split().is_none_or(|there| there == split) {
            return Ok(());
        }
        let reason = match self.split() {
            Some(there) => format!("{split}, where heads begin at {there} of {} layers", self.layers()),
            None => format!("{split}, where there are {} layers", self.layers()),
        };
        Err(ModelError::Config { field: "split".into(), reason })
    }

    /// The first layer that heads take the place of, if there are heads.
    pub fn split(&self) -> Option<usize> {
        self.split.get().copied()
    }

    /// Releases the layers from `first` on, which heads replace. A released layer is built again when a pass goes through it,
    /// and stays from then on. Streamed weights are not released: their plan decides what is kept.
    pub fn evict_from(&self, first: usize) {
        self.release_recorded_step();
        if let Parts::Resident(whole) = &self.parts {
            whole.evict_from(first);
        }
    }

    /// Which layer of a sequence keeps the hidden states at the split: one behind the blocks.
    pub(crate) fn states_layer(&self, layout: &Layout) -> Option<usize> {
        (layout.layers.len() > self.layers()).then(|| self.layers())
    }

    /// What the mixers of its layers remember.
    pub fn memories(&self) -> &[MixerMemory] {
        &self.memories
    }

    /// What a sequence of this model remembers, keys and values kept as `kept`, or in f32 where the device has no
    /// such numbers.
    pub fn layout(&self, kept: KvType) -> Layout {
        let kept = match kept {
            KvType::F16 if !self.device.supports_dtype(DType::F16) => KvType::F32,
            kept => kept,
        };
        let states = self.split().map(|_| LayerLayout::HiddenStates { width: self.config.hidden_size });
        let layers = self.memories.iter().map(|memory| memory.layout()).chain(states).collect();
        Layout { layers, kv_dtype: kept, device: self.device.clone() }
    }

    /// An empty cache for a sequence of this model, exact, with pages of its own.
    pub fn cache(&self) -> SequenceCache {
        SequenceCache::new(&PagePool::new(self.layout(KvType::F32)))
    }

    /// Takes up the positions that forgotten tokens have left in a sequence of this model. `length` is how long the
    /// sequence is known to become.
    pub fn compact_positions(&self, cache: &mut SequenceCache, length: usize) -> Result<(), ModelError> {
        if self.positions.is_some() {
            // The states behind keys and values hold the positions that their tokens had.
            return Ok(());
        }
        let angles: Vec<_> =
            self.config.ropes.iter().map(|rope| (rope.frequencies(length).0, rope)).collect();
        let rotate = |layer: usize, keys: Tensor<3>, back: usize| match self.memories[layer].rope() {
            Some(index) => {
                let (frequencies, rope) = &angles[index];
                rope.turn_back(keys, frequencies, back)
            }
            // Where there is no rotation, positions leave no trace.
            None => keys,
        };
        Ok(cache.compact_positions(rotate)?)
    }

    /// Waits until no other pass streams the weights.
    pub(crate) fn stream_guard(&self) -> StreamGuard<'_> {
        StreamGuard { _streaming: self.streamed().map(|streamed| streamed.lock().lock()) }
    }

    /// Begins the turn of a pass that is interleaved with others by [`try_stream`](Self::try_stream): until it is dropped, whole passes
    /// of other threads that stream the weights wait.
    pub fn begin_turn(self: &Arc<Self>) -> StreamTurn {
        if let Some(streamed) = self.streamed() {
            streamed.lock().begin_turn();
        }
        StreamTurn(self.clone())
    }

    /// Takes the guard that every [step](crate::Pass::step) of an interleaved pass holds, from before it enters the thread pool. Returns none
    /// if another pass streams the weights or waits to.
    pub fn try_stream(&self) -> Option<StreamGuard<'_>> {
        let streaming = match self.streamed() {
            Some(streamed) => Some(streamed.lock().try_lock()?),
            None => None,
        };
        Some(StreamGuard { _streaming: streaming })
    }

    pub(crate) fn block(&self, index: usize) -> Result<Arc<Block>, ModelError> {
        match &self.parts {
            Parts::Resident(whole) => whole.block(index, &self.config, &self.device),
            Parts::Streamed(streamed) => streamed.block(index),
        }
    }

    /// Releases the memory of a recorded decode step: weights, keys and values, and all that it allocated stay in place as long
    /// as it might run. A later step is recorded again.
    pub fn release_recorded_step(&self) {
        self.recorder.release();
    }

    pub(crate) fn recorder(&self) -> &StepRecorder {
        &self.recorder
    }

    /// Embeds tokens that are on the device. Only resident weights can.
    pub(crate) fn embed_indices(&self, tokens: Tensor<1, Int>) -> Result<Tensor<2>, ModelError> {
        if self.positions.is_some() || self.layer_inputs.is_some() {
            let reason = "positions are learned, or layers read rows of their own".into();
            return Err(StepError::Unsupported { reason }.into());
        }
        match &self.parts {
            Parts::Resident(whole) => Ok(self.config.scaled(whole.embedding.gather(tokens))),
            Parts::Streamed(_) => {
                Err(StepError::Unsupported { reason: "the weights are streamed".into() }.into())
            }
        }
    }

    pub(crate) fn embed(
        &self,
        tokens: &[u32],
        spans: impl Iterator<Item = Span>,
    ) -> Result<Tensor<2>, ModelError> {
        let embedded = match &self.parts {
            Parts::Resident(whole) => whole.embedding.gather(indices(tokens, &self.device)),
            Parts::Streamed(streamed) => streamed.embed(tokens)?,
        };
        let embedded = self.config.scaled(embedded);
        match &self.positions {
            Some(positions) => positions.add(embedded, spans),
            None => Ok(embedded),
        }
    }

    /// Returns what layers get beside the hidden state, if the model's do. `embedded` are the embeddings of the tokens, if they
    /// are at hand.
    pub(crate) fn layer_inputs(
        &self,
        tokens: &[u32],
        embedded: Option<Tensor<2>>,
    ) -> Result<Option<Tensor<2>>, ModelError> {
        let Some((inputs, table)) = &self.layer_inputs else { return Ok(None) };
        let embedded = match embedded {
            Some(embedded) => embedded,
            None => self.embed(tokens, std::iter::empty())?,
        };
        let width = inputs.width() * self.layers();
        Ok(Some(inputs.forward(table.gather(tokens, width, &self.device)?, embedded)))
    }

    /// Applies the final norm.
    pub(crate) fn normalize(&self, hidden: Tensor<2>) -> Tensor<2> {
        self.final_norm.forward(hidden)
    }

    /// Multiplies normalized hidden states with the unembedding.
    pub(crate) fn unembed(&self, hidden: &Tensor<2>) -> Result<Tensor<2>, ModelError> {
        match &self.parts {
            Parts::Resident(whole) => Ok(whole.unembedding.multiply(hidden.clone())),
            Parts::Streamed(streamed) => streamed.unembed(hidden),
        }
    }
}

/// What a `config.json` says, if it is that of a decoder.
pub(crate) fn decoder_config(config: &serde_json::Value) -> Result<DecoderConfig, ModelError> {
    match Architecture::from_json(config)? {
        Architecture::Decoder(config) => Ok(config),
        Architecture::Encoder(config) => Err(ModelError::Kind {
            model_type: config.family.into(),
            found: "an encoder",
            wanted: "a decoder",
            remedy: "it embeds text but cannot continue it",
        }),
    }
}

impl DecoderConfig {
    /// Rows of the embedding as the first layer is given them.
    pub(crate) fn scaled(&self, embedded: Tensor<2>) -> Tensor<2> {
        match self.embedding_scale {
            Some(scale) => embedded.mul_scalar(scale),
            None => embedded,
        }
    }

    /// Products with the unembedding as logits.
    pub(crate) fn capped(&self, logits: Tensor<2>) -> Tensor<2> {
        let logits = match self.logit_scale {
            Some(scale) => logits.mul_scalar(scale),
            None => logits,
        };
        match self.logit_softcap {
            Some(cap) => logits.div_scalar(cap).tanh().mul_scalar(cap),
            None => logits,
        }
    }

    /// Whether a tensor may be there without being used.
    pub(crate) fn is_foreign(&self, name: &str) -> bool {
        self.names.foreign.iter().any(|prefix| name.starts_with(prefix))
            // Tied checkpoints sometimes store the embedding twice, old ones their rotary frequencies.
            || (self.tied_embeddings && name == format!("{}.weight", self.names.unembedding))
            || name.ends_with(".rotary_emb.inv_freq")
            // Causal masks of old GPT-2 checkpoints.
            || name.ends_with(".attn.masked_bias")
            || (self.names.layers == "h" && name.ends_with(".attn.bias"))
    }

    /// The shortest sequence for which positions mean what they mean in one of `length` tokens: once this
    /// changes, what was cached before does not fit what comes after.
    pub fn position_epoch(&self, length: usize) -> usize {
        self.ropes.iter().map(|rope| rope.epoch(length)).max().unwrap_or(0)
    }
}
