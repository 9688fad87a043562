//! Opens models.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::Device;
use firebox_model::{
    Decoder, Encoder, FeedForward, InputMoments, Mixer, ModelError, Network, OwnFeedForward, OwnMixer,
    StreamedConfig, StreamedDecoder,
};
use firebox_store::{Checkpoint, Heads, SegmentId, SourceKind};
use firebox_text::Tokenizer;

use crate::Charge;
use crate::RuntimeError;
use crate::heads::config::HeadPoolConfig;
use crate::heads::pool::HeadPool;
use crate::heads::source::InstalledHeads;
use crate::memory::{release_to_os, release_with_code};
use crate::readahead::read_all_of;
use crate::readout::Modules;
use crate::reporter::Reporter;
use crate::residency::Residency;
use crate::telemetry::{Meters, Telemetry};

/// An open model: its network on a device, and its tokenizer.
#[derive(Debug, Clone)]
pub struct Model {
    checkpoint: Checkpoint,
    network: Arc<Network>,
    pub(crate) modules: Arc<Modules>,
    tokenizer: Option<Arc<Tokenizer>>,
    pub(crate) residency: Option<Arc<Residency>>,
    /// The budget charge of a model that is in memory as a whole.
    pub(crate) paid: Option<Arc<Charge>>,
    heads: Option<HeadPool>,
    draft: Option<Arc<Self>>,
    telemetry: Telemetry,
    meters: Arc<Meters>,
}

impl Model {
    /// Opens a Hugging Face directory, a GGUF file or a bundle.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let model = firebox_runtime::Model::open("models/pocket", &firebox_runtime::device("cpu")?)?;
    /// let mut session = model.session()?;
    /// let logits = session.feed(&model.tokenizer()?.encode("Once upon", true)?)?;
    /// # Ok(()) }
    /// ```
    pub fn open(path: impl AsRef<Path>, device: &Device) -> Result<Self, RuntimeError> {
        Self::from_checkpoint(Checkpoint::open(path)?, device)
    }

    /// Opens a model from an open checkpoint.
    pub fn from_checkpoint(checkpoint: Checkpoint, device: &Device) -> Result<Self, RuntimeError> {
        if *device == Device::flex() {
            read_all_of(&checkpoint);
        }
        Ok(Self::build(checkpoint, device, |checkpoint| Ok((Network::load(checkpoint, device)?, ())))?.0)
    }

    /// Opens a decoder that measures the inputs of its matrices.
    pub fn measuring_inputs(
        checkpoint: Checkpoint,
        device: &Device,
        moments: &InputMoments,
    ) -> Result<Self, RuntimeError> {
        let decoder = |checkpoint: &Checkpoint| {
            let decoder = Decoder::measuring_inputs(checkpoint, device, moments)?;
            Ok((Network::Decoder(Arc::new(decoder)), ()))
        };
        Ok(Self::build(checkpoint, device, decoder)?.0)
    }

    /// Opens a decoder that reads its weights from disk while it runs, except for [resident](firebox_model::StreamedWeights::load)
    /// parts.
    pub fn streamed(
        checkpoint: Checkpoint,
        device: &Device,
        config: &StreamedConfig,
    ) -> Result<Self, RuntimeError> {
        Ok(Self::with_streamed_decoder(checkpoint, device, config)?.0)
    }

    /// Opens a streamed decoder, and returns it beside the model.
    pub(crate) fn with_streamed_decoder(
        checkpoint: Checkpoint,
        device: &Device,
        config: &StreamedConfig,
    ) -> Result<(Self, StreamedDecoder), RuntimeError> {
        Self::build(checkpoint, device, |checkpoint| {
            let decoder = StreamedDecoder::open(checkpoint, device, config)?;
            Ok((Network::Decoder(decoder.decoder().clone()), decoder))
        })
    }

    /// Builds a model around a network, and returns what else `network` makes.
    fn build<T>(
        checkpoint: Checkpoint,
        device: &Device,
        network: impl FnOnce(&Checkpoint) -> Result<(Network, T), ModelError>,
    ) -> Result<(Self, T), RuntimeError> {
        let tokenizer = match checkpoint.text().tokenizer {
            Some(_) => Some(Arc::new(Tokenizer::new(checkpoint.text(), checkpoint.config())?)),
            None => None,
        };
        // Frees the tokenizer's source, which is as large as the tokenizer, before anything else is allocated.
        let checkpoint = checkpoint.without_tokenizer();
        release_to_os();
        let (network, other) = network(&checkpoint)?;
        // A list of heads that cannot be read is reported when a head is requested; the model runs without them.
        if let (Network::Decoder(decoder), Ok(Some(heads))) = (&network, installed(&checkpoint))
            && let Ok(list) = heads.list()
            && let Some(head) = list.first()
        {
            let _ = decoder.split_at(head.split);
        }
        let telemetry = Telemetry::default();
        let name = checkpoint.path().file_stem().unwrap_or_default().to_string_lossy();
        let meters = telemetry.model(&name);
        let network = Arc::new(network);
        let hidden_size = match &*network {
            Network::Encoder(encoder) => encoder.config().hidden_size,
            Network::Decoder(decoder) => decoder.config().hidden_size,
        };
        let modules = Arc::new(Modules::read(&checkpoint, hidden_size, device)?);
        let model = Self {
            network,
            modules,
            tokenizer,
            checkpoint,
            residency: None,
            paid: None,
            heads: None,
            draft: None,
            telemetry,
            meters,
        };
        model.report();
        release_with_code();
        Ok((model, other))
    }

    /// Sets a smaller model with the same vocabulary that drafts this model's answers.
    pub fn with_draft(self, draft: Self) -> Result<Self, RuntimeError> {
        self.check_draft(&draft)?;
        // What keeps it from drafting is an error now and not when the engine begins.
        drop(draft.session()?);
        Ok(Self { draft: Some(Arc::new(draft)), ..self })
    }

    /// Returns an error unless a model has the same vocabulary, so that it can draft this model's answers.
    pub(crate) fn check_draft(&self, draft: &Self) -> Result<(), RuntimeError> {
        let path = |model: &Self| model.checkpoint().path().to_path_buf();
        let differ = |difference: String| RuntimeError::DraftVocabulary {
            draft: path(draft),
            model: path(self),
            difference,
        };
        let sizes = (draft.decoder()?.config().vocab_size, self.decoder()?.config().vocab_size);
        if sizes.0 != sizes.1 {
            return Err(differ(format!("it has {} tokens and not {}", sizes.0, sizes.1)));
        }
        if let (Ok(of_draft), Ok(of_model)) = (draft.tokenizer(), self.tokenizer()) {
            let spelled = |id: u32| (of_draft.id_to_token(id), of_model.id_to_token(id));
            let other = (0..sizes.0 as u32).find(|&id| spelled(id).0 != spelled(id).1);
            if let Some(id) = other {
                let (of_draft, of_model) = spelled(id);
                return Err(differ(format!(
                    "token {id} is {:?} and not {:?}",
                    of_draft.unwrap_or_default(),
                    of_model.unwrap_or_default()
                )));
            }
        }
        Ok(())
    }

    /// Returns the model that drafts its answers, if there is one.
    pub fn draft(&self) -> Option<&Self> {
        self.draft.as_deref()
    }

    /// Reports to this telemetry under a name, together with sessions that are created later. Without it a model reports
    /// to a telemetry of its own, under the name of its directory or file.
    pub fn with_telemetry(self, telemetry: &Telemetry, name: &str) -> Self {
        let model = Self { telemetry: telemetry.clone(), meters: telemetry.model(name), ..self };
        model.report();
        model
    }

    /// Returns its telemetry.
    pub fn telemetry(&self) -> &Telemetry {
        &self.telemetry
    }

    /// Returns its meters.
    pub fn meters(&self) -> &Arc<Meters> {
        &self.meters
    }

    /// Returns meters for a session that was not created by the model. [Its own](Self::session) have some.
    pub fn session_meters(&self) -> Arc<Meters> {
        self.telemetry.next_session(&self.meters)
    }

    /// Connects its parts to its telemetry.
    pub(crate) fn report(&self) {
        if let Network::Decoder(decoder) = &*self.network {
            Reporter::attach(decoder, &self.meters, &self.telemetry);
        }
        if let Some(residency) = &self.residency {
            residency.report(&self.meters, &self.telemetry);
        }
        if let Some(heads) = &self.heads {
            heads.report(&self.meters, &self.telemetry);
        }
    }

    /// Loads heads into a pool. Sessions that are created later switch between them. If the configuration has no
    /// budget and the model was [fitted](Self::open_within) into one, heads are charged to that.
    pub fn with_heads(self, mut config: HeadPoolConfig) -> Result<Self, RuntimeError> {
        config.budget = config.budget.or_else(|| Some(self.residency.as_ref()?.budget().clone()));
        let heads = match installed(&self.checkpoint)? {
            Some(heads) => {
                let decoder = self.decoder()?;
                release_own(&decoder, &heads);
                let source = Arc::new(InstalledHeads::new(heads, decoder));
                Some(HeadPool::new(source, config)?)
            }
            None => None,
        };
        let model = Self { heads, ..self };
        model.report();
        Ok(model)
    }

    /// Replaces the mixer of a layer by a custom one: see [`Decoder::with_mixer`]. Sessions that are created later
    /// use it.
    pub fn with_mixer<M: OwnMixer + 'static>(
        self,
        layer: usize,
        make: impl FnOnce(Mixer) -> M,
    ) -> Result<Self, RuntimeError> {
        self.with_change(|decoder| decoder.with_mixer(layer, make))
    }

    /// Replaces the feed-forward of a layer: see [`Decoder::with_feed_forward`].
    pub fn with_feed_forward<F: OwnFeedForward + 'static>(
        self,
        layer: usize,
        make: impl FnOnce(FeedForward) -> F,
    ) -> Result<Self, RuntimeError> {
        self.with_change(|decoder| decoder.with_feed_forward(layer, make))
    }

    fn with_change(
        self,
        change: impl FnOnce(&Decoder) -> Result<Decoder, ModelError>,
    ) -> Result<Self, RuntimeError> {
        if self.heads.is_some() {
            return Err(RuntimeError::Kind {
                found: "one whose heads are in use",
                remedy: "put components of one's own in first, and call `with_heads` then",
            });
        }
        let decoder = change(&*self.decoder()?)?;
        let model = Self { network: Arc::new(Network::Decoder(Arc::new(decoder))), ..self };
        model.report();
        Ok(model)
    }

    /// The residency of a model that was opened within a budget.
    pub fn residency(&self) -> Option<&Residency> {
        self.residency.as_deref()
    }

    /// Tokens that there are pages for: the planned number within a budget, any number otherwise.
    pub fn planned_tokens(&self) -> usize {
        self.residency().map_or(usize::MAX, |residency| residency.plan().kv_tokens)
    }

    /// Its heads, if they are [in use](Self::with_heads).
    pub fn heads(&self) -> Option<&HeadPool> {
        self.heads.as_ref()
    }

    /// Returns the checkpoint that it was opened from.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Returns the network, a decoder or an encoder.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the decoder, or an error for an encoder.
    pub fn decoder(&self) -> Result<Arc<Decoder>, RuntimeError> {
        match &*self.network {
            Network::Decoder(decoder) => Ok(decoder.clone()),
            Network::Encoder(_) => Err(RuntimeError::Kind {
                found: "a sentence encoder",
                remedy: "it can embed text but not continue it; use a decoder such as qwen3",
            }),
        }
    }

    /// Returns the encoder, or an error for a decoder.
    pub fn encoder(&self) -> Result<&Encoder, RuntimeError> {
        match &*self.network {
            Network::Encoder(encoder) => Ok(encoder),
            Network::Decoder(_) => Err(RuntimeError::Kind {
                found: "a decoder",
                remedy: "it continues text; use a sentence encoder such as bert to embed",
            }),
        }
    }

    /// Returns the tokenizer, if the checkpoint has one.
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>, RuntimeError> {
        let path = || self.checkpoint.path().to_path_buf();
        self.tokenizer.as_ref().ok_or_else(|| RuntimeError::NoTokenizer { path: path() })
    }

    /// Returns the tokens that end a generation: the tokenizer's, or without one those that `generation_config.json`
    /// or `config.json` names.
    pub fn end_tokens(&self) -> Vec<u32> {
        if let Some(tokenizer) = &self.tokenizer {
            return tokenizer.eos_ids().to_vec();
        }
        let config = self.checkpoint.config();
        let files =
            [self.checkpoint.text().generation_config.as_ref(), Some(config), config.get("text_config")];
        let named =
            files.into_iter().flatten().find_map(|file| file.get("eos_token_id").filter(|id| !id.is_null()));
        let Some(named) = named else { return Vec::new() };
        let ids = named.as_array().map_or(std::slice::from_ref(named), Vec::as_slice);
        ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
    }
}

/// Releases the layers that heads replace, and the pages that were read to open them. They are read again if needed.
/// Heads that cannot be listed are reported when one is requested.
fn release_own(decoder: &Decoder, heads: &Heads) {
    let Some(split) = heads.list().ok().and_then(|heads| Some(heads.first()?.split)) else { return };
    decoder.evict_from(split);
    let model = heads.model();
    for segment in model.segments() {
        if matches!(segment.id, SegmentId::Layer(layer) if layer >= split) {
            let _ = model.release(segment.id);
        }
    }
    release_with_code();
}

/// Returns the table of heads; GGUF files have none.
fn installed(checkpoint: &Checkpoint) -> Result<Option<Heads>, RuntimeError> {
    match checkpoint.source() {
        SourceKind::Gguf => Ok(None),
        _ => Ok(Some(Heads::of(checkpoint.clone())?)),
    }
}
