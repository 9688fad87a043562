use std::any::Any;
use std::cell::RefCell;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use burn::tensor::{Device, Tensor};
use firebox_store::{Checkpoint, StoreError, TensorInfo, Tensors, Weight};
use serde::{Deserialize, Serialize};

use crate::block::Block;
use crate::bridge::Bridge;
use crate::config::DecoderConfig;
use crate::matrix::Matrix;
use crate::norm::RmsNorm;
use crate::slot::Slot;
use crate::weights::Weights;
use crate::{Decoder, ModelError};

/// What stands in place of a decoder's layers from its split on, with what comes after them.
///
/// Heads of one decoder share all layers before the split, its trunk, and so whatever passes through those.
#[derive(Debug)]
pub struct Head {
    id: Arc<str>,
    form: HeadForm,
    split: usize,
    /// Empty where they can be built and nobody has put the head on.
    blocks: Vec<Slot<Block>>,
    source: Option<Source>,
    bridge: Option<Bridge>,
    final_norm: RmsNorm,
    /// Absent where the decoder's serves.
    unembedding: Option<Arc<Matrix>>,
    /// Goes when all else is gone.
    kept_with: OnceLock<Box<dyn Any + Send + Sync>>,
}

/// What blocks are built from.
#[derive(Debug)]
struct Source {
    tensors: Arc<dyn Tensors + Send + Sync>,
    checkpoint: Checkpoint,
}

/// What a head is made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum HeadForm {
    /// Layers of its own. Tensors that it does not have are the model's.
    Blocks,
    /// The model's layers, with changes of low rank.
    Adapter {
        /// What the changes count.
        scale: f32,
    },
    /// A small network in place of all layers from the split on.
    Bridge {
        /// Its inner width.
        width: usize,
    },
    /// Says what a text is instead of continuing it. It reads what the trunk made of the last token.
    Classifier {
        /// What it may be.
        labels: Vec<String>,
    },
}

impl HeadForm {
    /// Whether there are layers from the split on.
    pub(crate) fn has_blocks(&self) -> bool {
        matches!(self, Self::Blocks | Self::Adapter { .. })
    }

    /// Refuses what would have nothing in it.
    pub(crate) fn check(&self) -> Result<(), ModelError> {
        let (field, reason) = match self {
            Self::Bridge { width: 0 } => ("width", "0; a bridge has to be wider"),
            Self::Classifier { labels } if labels.is_empty() => ("labels", "none; a classifier needs some"),
            Self::Adapter { scale } if !scale.is_finite() => ("scale", "not a number"),
            _ => return Ok(()),
        };
        Err(ModelError::Config { field: format!("head.{field}"), reason: reason.into() })
    }

    pub(crate) fn adapter_scale(&self) -> f32 {
        match self {
            Self::Adapter { scale } => *scale,
            _ => 1.0,
        }
    }
}

/// Tensors in place of others.
#[derive(Debug)]
pub(crate) struct Overlaid<'a> {
    pub over: &'a dyn Tensors,
    pub under: &'a dyn Tensors,
}

impl Overlaid<'_> {
    fn holder(&self, name: &str) -> &dyn Tensors {
        if self.over.info(name).is_some() { self.over } else { self.under }
    }
}

impl Tensors for Overlaid<'_> {
    fn path(&self) -> &Path {
        self.over.path()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.over.info(name).or_else(|| self.under.info(name))
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        self.holder(name).weight(name)
    }

    /// Of what is in the place of others: all of it has to be used.
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        self.over.names()
    }
}

/// The matrix that scores labels.
pub(crate) const CLASSIFIER: &str = "classifier.weight";

impl Head {
    /// Builds a head of a decoder over `tensors`, which are under the names of the model's own. What it does not have is
    /// taken from the checkpoint that the decoder was built over. `id` is that of no other head: what a sequence
    /// remembers is kept under it.
    pub fn load(
        id: &str,
        tensors: Arc<dyn Tensors + Send + Sync>,
        form: &HeadForm,
        split: usize,
        decoder: &Decoder,
        checkpoint: &Checkpoint,
    ) -> Result<Self, ModelError> {
        let config = decoder.config();
        decoder.check_split(split)?;
        form.check()?;
        let taken = RefCell::default();
        let all = Overlaid { over: &*tensors, under: checkpoint };
        let root = Weights::new(&all, decoder.device(), &taken).adapted(form.adapter_scale());
        let head = Self::over(id, form, split, config, &root, |name| tensors.info(name).is_some())?;
        root.all_taken(|_| false)?;
        let head = head.over_source(Source { tensors, checkpoint: checkpoint.clone() }, decoder.device());
        // Only now: a split stays, and a head that cannot be loaded has no say in where.
        decoder.split_at(split)?;
        Ok(head)
    }

    /// `is_own` says whether a tensor is the head's.
    fn over(
        id: &str,
        form: &HeadForm,
        split: usize,
        config: &DecoderConfig,
        root: &Weights<'_>,
        is_own: impl Fn(&str) -> bool,
    ) -> Result<Self, ModelError> {
        let layers = if form.has_blocks() { split..config.blocks.len() } else { 0..0 };
        let blocks: Result<_, ModelError> =
            layers.map(|layer| config.load_block(layer, root).map(Slot::from)).collect();
        let bridge = match form {
            HeadForm::Bridge { width } => Some(Bridge::load(*width, config, root)?),
            _ => None,
        };
        let hidden = config.hidden_size;
        let unembedding = match form {
            HeadForm::Classifier { labels } => Some(root.matrix(CLASSIFIER, labels.len(), hidden)?),
            _ => {
                let name = config.own_unembedding_name();
                is_own(&name).then(|| root.matrix(&name, config.vocab_size, hidden)).transpose()?
            }
        };
        Ok(Self {
            id: id.into(),
            form: form.clone(),
            split,
            blocks: blocks?,
            source: None,
            bridge,
            final_norm: RmsNorm::load(&config.final_norm, &root.within(&config.names.prefix))?,
            unembedding: unembedding.map(Arc::new),
            kept_with: OnceLock::new(),
        })
    }

    /// Lets go of blocks that can be built again over what lies in memory: of many heads few are worn. On other devices
    /// they are what is in memory.
    fn over_source(mut self, source: Source, device: &Device) -> Self {
        if *device == Device::flex() {
            self.blocks.iter().for_each(|slot| slot.set(None));
            self.source = Some(source);
        }
        self
    }

    /// Builds its layers over the decoder's, where it can build them and has not, so that the next pass need not.
    pub fn build(&self, decoder: &Decoder) -> Result<(), ModelError> {
        (self.split..self.split + self.blocks.len())
            .try_for_each(|layer| self.block(layer, decoder).map(drop))
    }

    /// Has something live for as long as the head does, be it worn by whomever: what was charged for its memory. Only the
    /// first is taken.
    pub fn keep_with(&self, companion: impl Any + Send + Sync) {
        let _ = self.kept_with.set(Box::new(companion));
    }

    /// Which one it is.
    pub fn id(&self) -> &Arc<str> {
        &self.id
    }

    /// What it is made of.
    pub fn form(&self) -> &HeadForm {
        &self.form
    }

    /// Whether it says what a text is instead of continuing it.
    pub fn is_classifier(&self) -> bool {
        matches!(self.form, HeadForm::Classifier { .. })
    }

    /// Whether it has layers, which remember something of a sequence.
    pub fn has_blocks(&self) -> bool {
        self.form.has_blocks()
    }

    /// What is in the place of one of the decoder's layers from the split on; nothing where it goes without them.
    pub(crate) fn block(&self, layer: usize, decoder: &Decoder) -> Result<Option<Arc<Block>>, ModelError> {
        let Some(slot) = layer.checked_sub(self.split).and_then(|index| self.blocks.get(index)) else {
            return Ok(None);
        };
        let (None, Some(source)) = (slot.get(), &self.source) else { return Ok(slot.get()) };
        let all = Overlaid { over: &*source.tensors, under: &source.checkpoint };
        let taken = RefCell::default();
        let root = Weights::new(&all, decoder.device(), &taken).adapted(self.form.adapter_scale());
        Ok(Some(slot.fill(Arc::new(decoder.config().load_block(layer, &root)?))))
    }

    /// From hidden states after its last layer to what its unembedding reads.
    pub(crate) fn completed(&self, hidden: Tensor<2>) -> Tensor<2> {
        self.final_norm.forward(match &self.bridge {
            Some(bridge) => bridge.forward(hidden),
            None => hidden,
        })
    }

    pub(crate) fn unembedding(&self) -> Option<&Matrix> {
        self.unembedding.as_deref()
    }
}

impl DecoderConfig {
    /// What a head's own unembedding is called, whether or not the model's is the embedding.
    pub(crate) fn own_unembedding_name(&self) -> String {
        format!("{}.weight", self.names.unembedding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nothing;

    impl Tensors for Nothing {
        fn path(&self) -> &Path {
            Path::new("nothing")
        }

        fn info(&self, _: &str) -> Option<&TensorInfo> {
            None
        }

        fn weight(&self, name: &str) -> Result<Weight, StoreError> {
            Err(StoreError::MissingTensor { model: "nothing".into(), tensor: name.into() })
        }

        fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
            Box::new(std::iter::empty())
        }
    }

    #[test]
    fn layers_are_built_when_the_head_is_put_on_or_somebody_goes_through_them() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
        let checkpoint = Checkpoint::open(fixture).unwrap();
        let decoder = Decoder::load(&checkpoint, &Device::flex()).unwrap();
        let split = decoder.layers() - 2;
        let head =
            || Head::load("own", Arc::new(Nothing), &HeadForm::Blocks, split, &decoder, &checkpoint).unwrap();
        let built = |head: &Head| head.blocks.iter().map(|slot| slot.get().is_some()).collect::<Vec<_>>();
        let through = head();
        assert_eq!(built(&through), [false; 2]);
        assert!(through.block(split - 1, &decoder).unwrap().is_none(), "the trunk's");
        let block = through.block(split + 1, &decoder).unwrap().unwrap();
        assert_eq!(built(&through), [false, true]);
        assert!(Arc::ptr_eq(&block, &through.block(split + 1, &decoder).unwrap().unwrap()), "it stays");
        let on = head();
        on.build(&decoder).unwrap();
        assert_eq!(built(&on), [true; 2]);
    }
}
