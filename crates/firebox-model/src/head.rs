//! Heads: replacements of a decoder's last layers.

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
use crate::norm::Norm;
use crate::slot::Slot;
use crate::weights::Weights;
use crate::{Decoder, ModelError};

/// Replaces a decoder's layers from its split on, with the norm and unembedding behind them.
///
/// Heads of one decoder share its trunk, the layers before the split, and thus the cache of those layers.
#[derive(Debug)]
pub struct Head {
    id: Arc<str>,
    form: HeadForm,
    split: usize,
    /// Empty slots of blocks that can be built and are not in use.
    blocks: Vec<Slot<Block>>,
    source: Option<Source>,
    bridge: Option<Bridge>,
    final_norm: Norm,
    /// `None` if the decoder's unembedding is used.
    unembedding: Option<Arc<Matrix>>,
    /// Dropped last.
    kept_with: OnceLock<Box<dyn Any + Send + Sync>>,
}

/// Source of blocks that are built on use.
#[derive(Debug)]
struct Source {
    tensors: Arc<dyn Tensors + Send + Sync>,
    checkpoint: Checkpoint,
}

/// Structure of a head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum HeadForm {
    /// Layers of its own. Missing tensors are the model's.
    Blocks,
    /// The model's layers with low-rank adapters.
    Adapter {
        /// Scale of the adapters.
        scale: f32,
    },
    /// A small network that replaces all layers from the split on.
    Bridge {
        /// Inner width.
        width: usize,
    },
    /// Classifies a text from the trunk's hidden state of the last token.
    Classifier {
        /// Labels, in the order of the scores.
        labels: Vec<String>,
    },
}

impl HeadForm {
    /// Whether the head has layers.
    pub(crate) fn has_blocks(&self) -> bool {
        matches!(self, Self::Blocks | Self::Adapter { .. })
    }

    /// Rejects invalid forms.
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

/// Tensors that replace those of the model.
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

    /// Returns the replacing tensors only: all of them must be used.
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        self.over.names()
    }
}

/// Name of the matrix that scores labels.
pub(crate) const CLASSIFIER: &str = "classifier.weight";

impl Head {
    /// Loads a head of a decoder from `tensors`, which have the model's names. Missing tensors are taken from
    /// the decoder's checkpoint. `id` must be unique to this head: caches are stored under it.
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
        // Last, because the split is permanent and a head that fails to load must not set it.
        decoder.split_at(split)?;
        Ok(head)
    }

    /// Builds a head. `is_own` tells whether a tensor is the head's.
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
            final_norm: Norm::load(&config.final_norm, &root.within(&config.names.prefix))?,
            unembedding: unembedding.map(Arc::new),
            kept_with: OnceLock::new(),
        })
    }

    /// Drops blocks that can be rebuilt over mapped memory, because few of many heads are in use at a time.
    /// On other devices the blocks are the only copy.
    fn over_source(mut self, source: Source, device: &Device) -> Self {
        if *device == Device::flex() {
            self.blocks.iter().for_each(|slot| slot.set(None));
            self.source = Some(source);
        }
        self
    }

    /// Builds the layers now if they can be built, so that the next pass need not.
    pub fn build(&self, decoder: &Decoder) -> Result<(), ModelError> {
        (self.split..self.split + self.blocks.len())
            .try_for_each(|layer| self.block(layer, decoder).map(drop))
    }

    /// Keeps `companion`, such as a memory charge, alive as long as the head. Only the first call has an
    /// effect.
    pub fn keep_with(&self, companion: impl Any + Send + Sync) {
        let _ = self.kept_with.set(Box::new(companion));
    }

    /// Returns the identifier.
    pub fn id(&self) -> &Arc<str> {
        &self.id
    }

    /// Returns the form.
    pub fn form(&self) -> &HeadForm {
        &self.form
    }

    /// Whether the head classifies instead of continuing the text.
    pub fn is_classifier(&self) -> bool {
        matches!(self.form, HeadForm::Classifier { .. })
    }

    /// Whether the head has layers, which have caches.
    pub fn has_blocks(&self) -> bool {
        self.form.has_blocks()
    }

    /// Returns the replacement of a layer from the split on, or `None` if the head has no layers.
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

    /// Whether passes with the head may be recorded: its layers have to be fused, which adapters are not, and its tensors stay in place
    /// as long as it exists.
    pub(crate) fn can_record(&self) -> bool {
        matches!(self.form, HeadForm::Blocks) && self.source.is_none()
    }

    /// Applies the bridge, if there is one, and the final norm to the hidden states after the last layer.
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
    /// Returns the name of a head's own unembedding, whether or not the model's is tied.
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
    fn layers_are_built_on_request_or_first_use() {
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
