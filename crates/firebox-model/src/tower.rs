//! Layers to be trained: a whole model or a head.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor};
use firebox_cache::{AttentionCache, LayerCache, LayerLayout, RecurrentState, TransientKv};
use firebox_store::{Checkpoint, Tensors};

use crate::ModelError;
use crate::adapter_plan::{AdapterPlan, INWARD, OUTWARD};
use crate::block::Block;
use crate::bridge::{BRIDGE, Bridge};
use crate::config::DecoderConfig;
use crate::decoder::decoder_config;
use crate::head::{CLASSIFIER, HeadForm, Overlaid};
use crate::initial::{Initial, Seeded};
use crate::layer_inputs::{LayerInputs, no_inputs};
use crate::matrix::Matrix;
use crate::norm::Norm;
use crate::positions::LearnedPositions;
use crate::rows::{Rows, Span, indices};
use crate::weights::{Learned, Learning, Weights};

/// The layers of a decoder to be trained, with the norm and unembedding behind them: a whole model from its
/// first layer on, or a head from the split on. Trained parameters are in f32 and have gradients; others keep
/// the dtype of their file.
///
/// A tower runs the blocks of a [`Decoder`](crate::Decoder) on sequences without a cache.
#[derive(Module, Debug)]
pub struct Tower {
    embedding: Option<Matrix>,
    positions: Option<LearnedPositions>,
    layer_inputs: Option<LayerInputs>,
    /// The table that inputs of layers are read from.
    layer_table: Option<Matrix>,
    blocks: Vec<Block>,
    bridge: Option<Bridge>,
    final_norm: Norm,
    /// `None` if it is the embedding.
    unembedding: Option<Matrix>,
    exit: Option<Exit>,
    #[module(skip)]
    frame: Frame,
}

/// Everything but the parameters' values.
#[derive(Debug, Clone)]
struct Frame {
    config: DecoderConfig,
    first: usize,
    /// Trained parameters by name.
    parameters: BTreeMap<String, ParamId>,
}

/// A bridge that is trained together with a whole model from the hidden states before the split. It also
/// shapes the layers before the split, so that a bridge trained later finds what it needs there.
#[derive(Module, Debug)]
struct Exit {
    bridge: Bridge,
    final_norm: Norm,
    #[module(skip)]
    plan: ExitPlan,
}

/// Position, width and loss weight of an exit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExitPlan {
    /// Layers before the exit.
    pub split: usize,
    /// Inner width.
    pub width: usize,
    /// Weight of its loss beside the model's.
    pub weight: f32,
}

/// Prefix of an exit's tensors; the rest of the name is that of a head's tensor.
const EXIT: &str = "exit.";

/// Hidden states that the layers compute.
#[derive(Debug, Clone)]
pub struct Reached {
    /// Hidden states after the last layer, before the final norm.
    pub last: Tensor<2>,
    /// Hidden states at the exit, if there is one.
    pub exit: Option<Tensor<2>>,
}

/// Inputs of a tower: tokens or hidden states of some sequences, one after the other.
#[derive(Debug, Clone)]
pub enum Fed {
    /// Tokens, for a whole model.
    Tokens(Vec<u32>),
    /// Hidden states `[tokens, hidden_size]`, for a head.
    States(Tensor<2>),
}

impl Tower {
    /// Creates a whole model with initial weights. `config` is a `config.json`.
    pub fn begin(config: &serde_json::Value, device: &Device, seeded: Seeded) -> Result<Self, ModelError> {
        let (nothing, config) = (Nothing(Path::new("")), decoder_config(config)?);
        let all = |_: &str| true;
        Self::build(&nothing, &HeadForm::Blocks, None, 0, Learned::All, config, device, seeded, all, None)
    }

    /// [`begin`](Self::begin) with a bridge that is trained together with the model.
    pub fn begin_with_exit(
        config: &serde_json::Value,
        device: &Device,
        seeded: Seeded,
        exit: ExitPlan,
    ) -> Result<Self, ModelError> {
        let config = decoder_config(config)?;
        let layers = config.blocks.len();
        let wrong = |field: &str, reason: String| Err(ModelError::Config { field: field.into(), reason });
        if exit.split == 0 || exit.split >= layers {
            return wrong("exit.split", format!("{}; should be from 1 to {}", exit.split, layers - 1));
        }
        if exit.width == 0 {
            return wrong("exit.width", "0; a bridge has to be wider".into());
        }
        let (nothing, form, all) = (Nothing(Path::new("")), HeadForm::Blocks, |_: &str| true);
        Self::build(&nothing, &form, None, 0, Learned::All, config, device, seeded, all, Some(exit))
    }

    /// Loads a whole model to continue its training. As for a [`Decoder`](crate::Decoder), all tensors must
    /// be present and no others.
    pub fn whole(checkpoint: &Checkpoint, device: &Device) -> Result<Self, ModelError> {
        let config = decoder_config(checkpoint.config())?;
        let (seeded, none) = (Seeded::new(0), |_: &str| false);
        Self::build(checkpoint, &HeadForm::Blocks, None, 0, Learned::All, config, device, seeded, none, None)
    }

    /// Creates a head of a model from layer `split` on, which starts out equal to the model where its form
    /// allows. `own` are initial tensors that replace the model's; `adapters` are the adapters to add. Only
    /// tensors that models do not have may be missing from both.
    pub fn head(
        checkpoint: &Checkpoint,
        own: Option<&dyn Tensors>,
        form: &HeadForm,
        adapters: Option<&AdapterPlan>,
        split: usize,
        device: &Device,
        seeded: Seeded,
    ) -> Result<Self, ModelError> {
        let config = decoder_config(checkpoint.config())?;
        let learned = if matches!(form, HeadForm::Adapter { .. }) { Learned::Adapters } else { Learned::All };
        let nothing = Nothing(checkpoint.path());
        let overlaid = Overlaid { over: own.unwrap_or(&nothing), under: checkpoint };
        Self::build(&overlaid, form, adapters, split, learned, config, device, seeded, is_of_heads, None)
    }

    #[expect(clippy::too_many_arguments, reason = "what a tower is made of, and only here")]
    fn build(
        tensors: &dyn Tensors,
        form: &HeadForm,
        adapters: Option<&AdapterPlan>,
        first: usize,
        learned: Learned,
        config: DecoderConfig,
        device: &Device,
        seeded: Seeded,
        may_begin: fn(&str) -> bool,
        exit: Option<ExitPlan>,
    ) -> Result<Self, ModelError> {
        form.check()?;
        let (taken, parameters) = (RefCell::default(), RefCell::default());
        let initial = RefCell::new(Initial::new(seeded, config.blocks.len()));
        let inner = device.clone().without_autodiff();
        let frozen = Weights::new(tensors, &inner, &taken).adapted(form.adapter_scale());
        let learning =
            Learning { what: learned, parameters: &parameters, initial: &initial, may_begin, adapters };
        let weights = frozen.clone().learning(learning);
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding =
            (first == 0).then(|| weights.matrix(&config.embedding_name(), vocab, hidden)).transpose()?;
        let positions = match first {
            0 => LearnedPositions::load(&config, &weights.within(&config.names.prefix))?,
            _ => None,
        };
        if first > 0 && form.has_blocks() && config.reads_more_than_states(first) {
            return Err(no_inputs());
        }
        let (layer_inputs, layer_table) = match (&config.layer_inputs, config.layer_table()) {
            (Some(inputs), Some((name, [rows, width]))) if first == 0 => {
                let inputs = LayerInputs::load(inputs, &config, &weights.within(&config.names.prefix))?;
                (Some(inputs), Some(weights.matrix(&name, rows, width)?))
            }
            _ => (None, None),
        };
        let layers = if form.has_blocks() { first..config.blocks.len() } else { 0..0 };
        let blocks: Result<_, ModelError> = layers.map(|layer| config.load_block(layer, &weights)).collect();
        let unembedding = match form {
            HeadForm::Classifier { labels } => Some(weights.matrix(CLASSIFIER, labels.len(), hidden)?),
            _ if first == 0 && config.tied_embeddings => None,
            _ if first == 0 => Some(weights.matrix(&config.unembedding_name(), vocab, hidden)?),
            // Tensors that a head shares with its trunk are not trained, unless the head starts with its own.
            _ => {
                let own = config.own_unembedding_name();
                let of_head = tensors.names().any(|name| name == own);
                let (name, from) =
                    if of_head { (own, &weights) } else { (config.unembedding_name(), &frozen) };
                Some(from.matrix(&name, vocab, hidden)?)
            }
        };
        let bridge = match form {
            HeadForm::Bridge { width } => Some(Bridge::load(*width, &config, &weights)?),
            _ => None,
        };
        let final_norm = Norm::load(&config.final_norm, &weights.within(&config.names.prefix))?;
        let blocks = blocks?;
        let exit = exit.map(|plan| Exit::load(plan, &config, &weights.within(EXIT))).transpose()?;
        weights.all_taken(|name| config.is_foreign(name))?;
        let parameters = parameters.take();
        let frame = Frame { config, first, parameters };
        Ok(Self {
            embedding,
            positions,
            layer_inputs,
            layer_table,
            blocks,
            bridge,
            final_norm,
            unembedding,
            exit,
            frame,
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &DecoderConfig {
        &self.frame.config
    }

    /// Returns the index of the first layer.
    pub fn first(&self) -> usize {
        self.frame.first
    }

    /// Returns the logits of every token for sequences of the given lengths, `[tokens, vocab_size]`, or the
    /// label scores of a classifier.
    pub fn forward(&self, fed: Fed, lengths: &[usize]) -> Result<Tensor<2>, ModelError> {
        let hidden = self.hidden(fed, lengths)?;
        Ok(self.scored(hidden))
    }

    /// Returns the hidden states after the last layer, before the final norm.
    pub fn hidden(&self, fed: Fed, lengths: &[usize]) -> Result<Tensor<2>, ModelError> {
        Ok(self.reached(fed, lengths)?.last)
    }

    /// Returns the hidden states after the last layer and at the exit.
    pub fn reached(&self, fed: Fed, lengths: &[usize]) -> Result<Reached, ModelError> {
        self.run(fed, lengths, self.frame.config.blocks.len())
    }

    /// Returns the hidden states before a layer.
    pub fn hidden_before(&self, layer: usize, fed: Fed, lengths: &[usize]) -> Result<Tensor<2>, ModelError> {
        Ok(self.run(fed, lengths, layer)?.last)
    }

    /// Runs the layers before `end`.
    fn run(&self, fed: Fed, lengths: &[usize], end: usize) -> Result<Reached, ModelError> {
        let Frame { config, first, .. } = &self.frame;
        // Under evaluation the parameters' device has no autodiff.
        let device = &self.final_norm.device();
        let mut layer_inputs = None;
        let mut hidden = match (fed, &self.embedding) {
            (Fed::States(states), _) if device.is_autodiff() => states.autodiff(),
            (Fed::States(states), _) => states,
            (Fed::Tokens(tokens), Some(embedding)) => {
                let vocab_size = config.vocab_size;
                if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab_size) {
                    return Err(ModelError::Token { token, vocab_size });
                }
                let tokens = indices(&tokens, device);
                let embedded = config.scaled(embedding.gather(tokens.clone()));
                if let (Some(inputs), Some(table)) = (&self.layer_inputs, &self.layer_table) {
                    layer_inputs = Some(inputs.forward(table.gather(tokens), embedded.clone()));
                }
                let spans = lengths.iter().map(|&length| Span { rows: length, position: 0, length });
                match &self.positions {
                    Some(positions) => positions.add(embedded, spans)?,
                    None => embedded,
                }
            }
            (Fed::Tokens(_), None) => {
                let reason = format!("a tower that begins at layer {first} reads hidden states");
                return Err(ModelError::Config { field: "split".into(), reason });
            }
        };
        if lengths.iter().sum::<usize>() != hidden.dims()[0] || lengths.contains(&0) {
            return Err(ModelError::NoTokens);
        }
        let spans = lengths.iter().map(|&length| Span { rows: length, position: 0, length });
        let mut rows = Rows::new(&config.ropes, spans, device);
        rows.layer_inputs = layer_inputs;
        let mut at_exit = None;
        // What later layers read of earlier ones.
        let mut shared: BTreeMap<usize, Vec<TransientKv>> = BTreeMap::new();
        let is_shared =
            |layer| config.blocks.iter().any(|block| block.layout() == LayerLayout::Shared { layer });
        let layers = (*first..end).zip(&self.blocks);
        for ((layer, block), config) in layers.zip(&config.blocks[(*first).min(config.blocks.len())..]) {
            if self.exit.as_ref().is_some_and(|exit| exit.plan.split == layer) {
                at_exit = Some(hidden.clone());
            }
            let mut states = vec![RecurrentState::default(); lengths.len()];
            let source = match config.layout() {
                LayerLayout::Shared { layer } => layer,
                _ => layer,
            };
            let mut kept = shared.remove(&source).unwrap_or_default();
            kept.resize_with(lengths.len(), TransientKv::default);
            let caches = states.iter_mut().zip(&mut kept).map(|(state, kept)| match config.layout() {
                LayerLayout::Recurrent => LayerCache::Recurrent(state),
                _ => LayerCache::Attention(AttentionCache::transient(kept)),
            });
            hidden = block.forward(hidden, &rows, caches)?;
            if is_shared(source) {
                shared.insert(source, kept);
            }
        }
        Ok(Reached { last: hidden, exit: at_exit })
    }

    /// Returns the logits of the exit from its hidden states, and the weight of its loss.
    pub fn scored_at_exit(&self, hidden: Tensor<2>) -> Option<(Tensor<2>, f32)> {
        let exit = self.exit.as_ref()?;
        let hidden = exit.final_norm.forward(exit.bridge.forward(hidden));
        Some((self.unembedded(hidden), exit.plan.weight))
    }

    /// Returns the logits from hidden states after the last layer.
    pub fn scored(&self, hidden: Tensor<2>) -> Tensor<2> {
        let hidden = match &self.bridge {
            Some(bridge) => bridge.forward(hidden),
            None => hidden,
        };
        self.unembedded(self.final_norm.forward(hidden))
    }

    fn unembedded(&self, hidden: Tensor<2>) -> Tensor<2> {
        let logits = match (&self.unembedding, &self.embedding) {
            (Some(matrix), _) | (None, Some(matrix)) => matrix.multiply(hidden),
            (None, None) => unreachable!("a tower without an embedding has an unembedding"),
        };
        self.frame.config.capped(logits)
    }

    /// Returns the trained tensors in f32 under the model's names, without those of the exit.
    pub fn trained(&self) -> Result<Vec<Trained>, ModelError> {
        let mut all = self.all_trained()?;
        all.retain(|tensor| !tensor.name.starts_with(EXIT));
        Ok(all)
    }

    /// Returns the tensors of the exit under the names of a head's tensors.
    pub fn trained_exit(&self) -> Result<Vec<Trained>, ModelError> {
        let of_exit = |tensor: Trained| {
            let name = tensor.name.strip_prefix(EXIT)?.to_owned();
            Some(Trained { name, ..tensor })
        };
        Ok(self.all_trained()?.into_iter().filter_map(of_exit).collect())
    }

    fn all_trained(&self) -> Result<Vec<Trained>, ModelError> {
        let names = self.frame.parameters.iter().map(|(name, id)| (*id, name.as_str()));
        let mut collecting = Collecting { names: names.collect(), found: Vec::new(), failed: None };
        self.visit(&mut collecting);
        match collecting.failed {
            Some(reason) => Err(ModelError::Device { reason }),
            None => {
                collecting.found.sort_by(|one, other| one.name.cmp(&other.name));
                Ok(collecting.found)
            }
        }
    }
}

impl Exit {
    fn load(plan: ExitPlan, config: &DecoderConfig, weights: &Weights<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            bridge: Bridge::load(plan.width, config, weights)?,
            final_norm: Norm::load(&config.final_norm, &weights.within(&config.names.prefix))?,
            plan,
        })
    }
}

/// A trained tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    /// Its name in the model.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values.
    pub values: Vec<f32>,
}

struct Collecting<'a> {
    names: BTreeMap<ParamId, &'a str>,
    found: Vec<Trained>,
    failed: Option<String>,
}

impl ModuleVisitor for Collecting<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(name) = self.names.get(&param.id) else { return };
        let tensor = param.val();
        let shape = tensor.dims().to_vec();
        match tensor.try_into_vec_as::<f32>() {
            Ok(values) => self.found.push(Trained { name: (*name).to_owned(), shape, values }),
            Err(error) => self.failed = Some(error.to_string()),
        }
    }
}

/// Whether a tensor belongs to heads only.
fn is_of_heads(name: &str) -> bool {
    name.starts_with(BRIDGE) || name == CLASSIFIER || name.ends_with(INWARD) || name.ends_with(OUTWARD)
}

/// A checkpoint without tensors at a model's path.
#[derive(Debug)]
struct Nothing<'a>(&'a Path);

impl Tensors for Nothing<'_> {
    fn path(&self) -> &Path {
        self.0
    }

    fn info(&self, _: &str) -> Option<&firebox_store::TensorInfo> {
        None
    }

    fn weight(&self, name: &str) -> Result<firebox_store::Weight, firebox_store::StoreError> {
        Err(firebox_store::StoreError::MissingTensor {
            model: self.path().to_owned(),
            tensor: name.to_owned(),
        })
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(std::iter::empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reference model, which has four layers, with a configuration that claims another number.
    struct Saying(std::path::PathBuf);

    impl Saying {
        fn layers(count: usize) -> Self {
            let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
            let folder = std::env::temp_dir().join(format!("firebox-tower-{}-{count}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            let config = std::fs::read_to_string(fixture.join("config.json")).unwrap();
            let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
            config["num_hidden_layers"] = count.into();
            std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
            std::fs::copy(fixture.join("model.safetensors"), folder.join("model.safetensors")).unwrap();
            Self(folder)
        }

        fn checkpoint(&self) -> Checkpoint {
            Checkpoint::open(&self.0).unwrap()
        }
    }

    impl Drop for Saying {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn missing_model_tensors_are_rejected() {
        let lacking = |result: Result<Tower, ModelError>| match result.unwrap_err() {
            ModelError::MissingTensor { name, .. } => assert!(name.starts_with("model.layers.4."), "{name}"),
            other => panic!("{other}"),
        };
        let (five, device, seeded) = (Saying::layers(5), Device::flex(), Seeded::new(0));
        lacking(Tower::whole(&five.checkpoint(), &device));
        let head = |form: &HeadForm, plan: Option<&AdapterPlan>| {
            Tower::head(&five.checkpoint(), None, form, plan, 3, &device, seeded)
        };
        let plan = AdapterPlan { rank: 2, targets: vec!["q_proj".into()] };
        lacking(head(&HeadForm::Blocks, None));
        lacking(head(&HeadForm::Adapter { scale: 1.0 }, Some(&plan)));
        head(&HeadForm::Bridge { width: 3 }, None).unwrap();
        head(&HeadForm::Classifier { labels: vec!["one".into(), "other".into()] }, None).unwrap();
    }

    #[test]
    fn unused_model_tensors_are_rejected() {
        let three = Saying::layers(3);
        match Tower::whole(&three.checkpoint(), &Device::flex()).unwrap_err() {
            ModelError::ExtraTensors { names, .. } => {
                assert!(names.iter().all(|name| name.starts_with("model.layers.3.")), "{names:?}");
            }
            other => panic!("{other}"),
        }
    }
}
