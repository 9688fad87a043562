//! Heads of a small model, from a source that a test controls.

#![allow(clippy::unwrap_used)] // Tests alone call it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use firebox_model::{Decoder, Head, HeadForm};
use firebox_runtime::heads::{HeadSource, ReadyHead};
use firebox_runtime::{Model, RuntimeError, device};
use firebox_store::{Checkpoint, StoreError, TensorInfo, Tensors, Weight};

/// Heads that are a model's own last layer under other names. A loaded head's id is its name and its generation.
#[derive(Debug)]
pub struct TestHeads {
    /// The model, split before its last layer.
    pub model: Model,
    split: usize,
    heads: Mutex<BTreeMap<String, TestHead>>,
    is_loading: AtomicBool,
    stale_generation: Mutex<Option<u64>>,
}

/// How a head loads.
#[derive(Debug, Clone, Copy)]
pub struct TestHead {
    /// Distinguishes it from other heads with its name.
    pub generation: u64,
    /// The bytes that it takes in memory.
    pub bytes: u64,
    /// Whether loading waits until this is unset.
    pub is_held_back: bool,
    /// Whether loading fails.
    pub fails: bool,
    /// Whether loading panics.
    pub panics: bool,
    /// Whether it is a classifier, with a label for every token.
    pub is_classifier: bool,
}

impl TestHeads {
    /// Creates heads with these names and bytes.
    pub fn new(heads: &[(&str, u64)]) -> Arc<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
        let checkpoint = Checkpoint::open(path).unwrap();
        let model = Model::from_checkpoint(checkpoint, &device("cpu").unwrap()).unwrap();
        let split = model.decoder().unwrap().layers() - 1;
        model.decoder().unwrap().split_at(split).unwrap();
        let head = |bytes| TestHead {
            generation: 1,
            bytes,
            is_held_back: false,
            fails: false,
            panics: false,
            is_classifier: false,
        };
        let heads = heads.iter().map(|(name, bytes)| ((*name).to_owned(), head(*bytes))).collect();
        Arc::new(Self {
            model,
            split,
            heads: Mutex::new(heads),
            is_loading: AtomicBool::default(),
            stale_generation: Mutex::default(),
        })
    }

    /// Changes how a head loads.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut TestHead)) {
        change(self.heads.lock().unwrap().get_mut(name).unwrap());
    }

    /// Returns how a head loads.
    pub fn head(&self, name: &str) -> TestHead {
        self.heads.lock().unwrap()[name]
    }

    /// Returns whether a load has begun.
    pub fn is_loading(&self) -> bool {
        self.is_loading.load(Ordering::Relaxed)
    }

    /// Answers the next request for a generation with this one, as if the request had been sent earlier.
    pub fn answer_stale_generation(&self, generation: u64) {
        *self.stale_generation.lock().unwrap() = Some(generation);
    }
}

impl HeadSource for TestHeads {
    fn names(&self) -> Result<Vec<String>, RuntimeError> {
        Ok(self.heads.lock().unwrap().keys().cloned().collect())
    }

    fn generation(&self, name: &str) -> Result<Option<u64>, RuntimeError> {
        let current = self.heads.lock().unwrap().get(name).map(|head| head.generation);
        Ok(self.stale_generation.lock().unwrap().take().or(current))
    }

    fn bytes(&self, name: &str) -> Result<u64, RuntimeError> {
        Ok(self.head(name).bytes)
    }

    fn load(&self, name: &str) -> Result<ReadyHead, RuntimeError> {
        let TestHead { generation, bytes, fails, panics, is_classifier, .. } = self.head(name);
        self.is_loading.store(true, Ordering::Relaxed);
        // Gives up after a minute, so that no test waits forever.
        (0..6000).take_while(|_| self.head(name).is_held_back).for_each(|_| sleep(Duration::from_millis(10)));
        assert!(!panics, "as if a kernel had been given an impossible shape");
        if fails {
            return Err(RuntimeError::NoHead { name: "broken".into() });
        }
        let decoder = self.model.decoder()?;
        let (id, checkpoint) = (format!("{name} {generation}"), self.model.checkpoint());
        let (tensors, form): (Arc<dyn Tensors + Send + Sync>, _) = if is_classifier {
            (Arc::new(LabelTensors(checkpoint.clone())), LabelTensors::form(&decoder))
        } else {
            (Arc::new(NoTensors), HeadForm::Blocks)
        };
        let head = Head::load(&id, tensors, &form, self.split, &decoder, checkpoint)?;
        Ok(ReadyHead { head: Arc::new(head), generation, bytes, requantized: None, detach: None })
    }
}

/// The tensors of a head that replaces nothing.
#[derive(Debug)]
struct NoTensors;

impl Tensors for NoTensors {
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

/// The model's embeddings as the matrix of a classifier, which has a label for every token.
#[derive(Debug)]
struct LabelTensors(Checkpoint);

impl LabelTensors {
    const ROWS: &str = "model.embed_tokens.weight";

    fn form(decoder: &Decoder) -> HeadForm {
        HeadForm::Classifier { labels: (0..decoder.config().vocab_size).map(|id| id.to_string()).collect() }
    }
}

impl Tensors for LabelTensors {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.0.info(Self::ROWS).filter(|_| name == "classifier.weight")
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        Ok(Weight { name: name.into(), ..self.0.weight(Self::ROWS)? })
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(std::iter::once("classifier.weight"))
    }
}
