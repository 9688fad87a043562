use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor};
use firebox_cache::{AttentionCache, LayerCache, LayerLayout, RecurrentState};
use firebox_store::{Checkpoint, Tensors};

use crate::ModelError;
use crate::adapter::{INWARD, OUTWARD};
use crate::block::Block;
use crate::bridge::{BRIDGE, Bridge};
use crate::config::DecoderConfig;
use crate::decoder::{decoder_config, indices};
use crate::head::{CLASSIFIER, HeadForm, Overlaid};
use crate::initial::{Initial, Seeded};
use crate::matrix::Matrix;
use crate::norm::RmsNorm;
use crate::rows::{Input, Rows};
use crate::weights::{Learned, Learning, Weights};

/// Layers of a decoder and what comes after them, to be trained: from its first layer on a whole model, from its split
/// on a head. Parameters that are trained are in f32 and have gradients; others are as their file has them.
///
/// It runs the blocks that a [`Decoder`](crate::Decoder) runs, on sequences that begin with what it is given.
#[derive(Module, Debug)]
pub struct Tower {
    embedding: Option<Matrix>,
    blocks: Vec<Block>,
    bridge: Option<Bridge>,
    final_norm: RmsNorm,
    /// Absent where it is the embedding.
    unembedding: Option<Matrix>,
    exit: Option<Exit>,
    #[module(skip)]
    frame: Frame,
}

/// What a tower is, but for numbers.
#[derive(Debug, Clone)]
struct Frame {
    config: DecoderConfig,
    first: usize,
    /// Of what is trained, by name.
    parameters: BTreeMap<String, ParamId>,
}

/// A bridge that learns beside a whole model, from what the layers before a split make. It shapes them too: what a bridge
/// that is trained later is to say has to be there when they are done.
#[derive(Module, Debug)]
struct Exit {
    bridge: Bridge,
    final_norm: RmsNorm,
    #[module(skip)]
    plan: ExitPlan,
}

/// Where a bridge learns beside a whole model, and how.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExitPlan {
    /// The layers before it.
    pub split: usize,
    /// Its inner width.
    pub width: usize,
    /// What its loss counts beside the model's own.
    pub weight: f32,
}

/// Names of an exit's tensors begin with this, and then are those of a head.
const EXIT: &str = "exit.";

/// What layers make of tokens.
#[derive(Debug, Clone)]
pub struct Reached {
    /// Behind the last layer, before the final norm.
    pub last: Tensor<2>,
    /// Where the exit is, if there is one.
    pub exit: Option<Tensor<2>>,
}

/// Which products a head's adapters change, and in how many dimensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterPlan {
    /// Their rank.
    pub rank: usize,
    /// Names of weights within their layer, such as `q_proj`.
    pub targets: Vec<String>,
}

/// The hidden states or tokens of some sequences, one after the other.
#[derive(Debug, Clone)]
pub enum Fed {
    /// For a whole model.
    Tokens(Vec<u32>),
    /// `[tokens, hidden_size]`, for a head.
    States(Tensor<2>),
}

impl Tower {
    /// A whole model, with new numbers. `config` is a `config.json`.
    pub fn begin(config: &serde_json::Value, device: &Device, seeded: Seeded) -> Result<Self, ModelError> {
        let (nothing, config) = (Nothing(Path::new("")), decoder_config(config)?);
        let all = |_: &str| true;
        Self::build(&nothing, &HeadForm::Blocks, None, 0, Learned::All, config, device, seeded, all, None)
    }

    /// The same, with a bridge that learns beside it.
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

    /// A whole model, to go on from what it has learned. As for a [`Decoder`](crate::Decoder), every tensor must be there
    /// and none beside them.
    pub fn whole(checkpoint: &Checkpoint, device: &Device) -> Result<Self, ModelError> {
        let config = decoder_config(checkpoint.config())?;
        let (seeded, none) = (Seeded::new(0), |_: &str| false);
        Self::build(checkpoint, &HeadForm::Blocks, None, 0, Learned::All, config, device, seeded, none, None)
    }

    /// A head of a model from layer `split` on. It begins as what the model does, where its form allows that. `own` are
    /// tensors to begin with in place of the model's, `adapters` those that there are to be if it is made of adapters. Only
    /// what models do not have may be in neither.
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
        let layers = if form.has_blocks() { first..config.blocks.len() } else { 0..0 };
        let blocks: Result<_, ModelError> = layers.map(|layer| config.load_block(layer, &weights)).collect();
        let unembedding = match form {
            HeadForm::Classifier { labels } => Some(weights.matrix(CLASSIFIER, labels.len(), hidden)?),
            _ if first == 0 && config.tied_embeddings => None,
            _ if first == 0 => Some(weights.matrix(&config.unembedding_name(), vocab, hidden)?),
            // What a head shares with its trunk is not trained with it, unless it begins with one of its own.
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
        let final_norm = RmsNorm::load(&config.final_norm, &weights.within(&config.names.prefix))?;
        let blocks = blocks?;
        let exit = exit.map(|plan| Exit::load(plan, &config, &weights.within(EXIT))).transpose()?;
        weights.all_taken(|name| config.is_foreign(name))?;
        let parameters = parameters.take();
        let frame = Frame { config, first, parameters };
        Ok(Self { embedding, blocks, bridge, final_norm, unembedding, exit, frame })
    }

    /// What it is made of.
    pub fn config(&self) -> &DecoderConfig {
        &self.frame.config
    }

    /// Its first layer.
    pub fn first(&self) -> usize {
        self.frame.first
    }

    /// The logits after every token of sequences of the given lengths, `[tokens, vocab_size]`: scores of labels, for a
    /// classifier.
    pub fn forward(&self, fed: Fed, lengths: &[usize]) -> Result<Tensor<2>, ModelError> {
        let hidden = self.hidden(fed, lengths)?;
        Ok(self.scored(hidden))
    }

    /// The hidden states behind its last layer, before the final norm.
    pub fn hidden(&self, fed: Fed, lengths: &[usize]) -> Result<Tensor<2>, ModelError> {
        Ok(self.reached(fed, lengths)?.last)
    }

    /// The same, and those at the exit.
    pub fn reached(&self, fed: Fed, lengths: &[usize]) -> Result<Reached, ModelError> {
        self.run(fed, lengths, self.frame.config.blocks.len())
    }

    /// The hidden states that a layer is given.
    pub fn hidden_before(&self, layer: usize, fed: Fed, lengths: &[usize]) -> Result<Tensor<2>, ModelError> {
        Ok(self.run(fed, lengths, layer)?.last)
    }

    /// What the layers before `end` make.
    fn run(&self, fed: Fed, lengths: &[usize], end: usize) -> Result<Reached, ModelError> {
        let Frame { config, first, .. } = &self.frame;
        // A network that is only evaluated has left its gradients behind, and its device says so.
        let device = &self.final_norm.weight.val().device();
        let mut hidden = match (fed, &self.embedding) {
            (Fed::States(states), _) if device.is_autodiff() => states.autodiff(),
            (Fed::States(states), _) => states,
            (Fed::Tokens(tokens), Some(embedding)) => {
                let vocab_size = config.vocab_size;
                if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab_size) {
                    return Err(ModelError::Token { token, vocab_size });
                }
                config.scaled(embedding.gather(indices(&tokens, device)))
            }
            (Fed::Tokens(_), None) => {
                let reason = format!("a tower that begins at layer {first} reads hidden states");
                return Err(ModelError::Config { field: "split".into(), reason });
            }
        };
        if lengths.iter().sum::<usize>() != hidden.dims()[0] || lengths.contains(&0) {
            return Err(ModelError::NoTokens);
        }
        let placeholders = vec![0; lengths.iter().copied().max().unwrap_or(0)];
        let inputs: Vec<_> =
            lengths.iter().map(|&length| Input::new(&placeholders[..length], 0, length)).collect();
        let rows = Rows::new(config, &inputs, device);
        let mut at_exit = None;
        let layers = (*first..end).zip(&self.blocks);
        for ((layer, block), config) in layers.zip(&config.blocks[(*first).min(config.blocks.len())..]) {
            if self.exit.as_ref().is_some_and(|exit| exit.plan.split == layer) {
                at_exit = Some(hidden.clone());
            }
            let mut states = vec![RecurrentState::default(); lengths.len()];
            let caches = states.iter_mut().map(|state| match config.layout() {
                LayerLayout::Recurrent => LayerCache::Recurrent(state),
                _ => LayerCache::Attention(AttentionCache::transient()),
            });
            hidden = block.forward(hidden, &rows, caches)?;
        }
        Ok(Reached { last: hidden, exit: at_exit })
    }

    /// From hidden states at the exit to its logits and what they count.
    pub fn scored_at_exit(&self, hidden: Tensor<2>) -> Option<(Tensor<2>, f32)> {
        let exit = self.exit.as_ref()?;
        let hidden = exit.final_norm.forward(exit.bridge.forward(hidden));
        Some((self.unembedded(hidden), exit.plan.weight))
    }

    /// From hidden states behind the last layer to logits.
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

    /// What is trained, under the names of the model's tensors, in f32. What an exit has is left out.
    pub fn trained(&self) -> Result<Vec<Trained>, ModelError> {
        let mut all = self.all_trained()?;
        all.retain(|tensor| !tensor.name.starts_with(EXIT));
        Ok(all)
    }

    /// What the exit has, under the names that a head's tensors have.
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
            final_norm: RmsNorm::load(&config.final_norm, &weights.within(&config.names.prefix))?,
            plan,
        })
    }
}

/// A tensor that was trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    /// Its name in the model.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its numbers.
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

/// Whether a tensor is none that models have.
fn is_of_heads(name: &str) -> bool {
    name.starts_with(BRIDGE) || name == CLASSIFIER || name.ends_with(INWARD) || name.ends_with(OUTWARD)
}

/// No tensors at all, of a model at that path.
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

    /// The reference model under a configuration that says it has so many layers. It has four.
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
    fn nothing_is_made_up_that_a_model_should_have() {
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
    fn nothing_that_a_model_has_is_left_out() {
        let three = Saying::layers(3);
        match Tower::whole(&three.checkpoint(), &Device::flex()).unwrap_err() {
            ModelError::ExtraTensors { names, .. } => {
                assert!(names.iter().all(|name| name.starts_with("model.layers.3.")), "{names:?}");
            }
            other => panic!("{other}"),
        }
    }
}
