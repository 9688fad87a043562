//! Sources that heads are loaded from.

use std::fmt::Debug;
use std::sync::Arc;

use firebox_model::{Decoder, Head, HeadForm};
use firebox_store::{
    BufferPool, DetachFlag, HeadFiles, Heads, Quantization, SegmentId, StoreError, Tensors as _,
};

use crate::{Device, RuntimeError};

/// Provides the heads of a model.
pub trait HeadSource: Debug + Send + Sync {
    /// Lists the heads.
    fn names(&self) -> Result<Vec<String>, RuntimeError>;

    /// Returns the current generation of a head; `None` if there is no such head.
    fn generation(&self, name: &str) -> Result<Option<u64>, RuntimeError>;

    /// Returns the bytes that a head takes in memory.
    fn bytes(&self, name: &str) -> Result<u64, RuntimeError>;

    /// Reads a head into memory, and checks that it can be built.
    fn load(&self, name: &str) -> Result<ReadyHead, RuntimeError>;

    /// Builds what a head needs beside its bytes, before a sequence uses it.
    fn build(&self, _head: &Head) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// Returns the pool that reuses the memory of evicted heads, if there is one.
    fn buffers(&self) -> Option<&BufferPool> {
        None
    }
}

/// A head in memory.
#[derive(Debug, Clone)]
pub struct ReadyHead {
    /// The head.
    pub head: Arc<Head>,
    /// Distinguishes it from other heads with its name.
    pub generation: u64,
    /// Its bytes in memory.
    pub bytes: u64,
    /// The quantization of its weights and the trunk's, if they differ.
    pub requantized: Option<Requantized>,
    /// Keeps the head's memory out of its buffer pool while it is in use, if it belongs to one.
    pub detach: Option<DetachFlag>,
}

/// A difference in quantization between trunk and head. Activations between them are `f32`, quantized again for the
/// head's products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Requantized {
    /// The trunk's scheme.
    pub trunk: Option<Quantization>,
    /// The head's.
    pub head: Option<Quantization>,
}

/// The heads installed beside a model.
#[derive(Debug)]
pub struct InstalledHeads {
    heads: Heads,
    decoder: Arc<Decoder>,
    buffers: BufferPool,
}

impl InstalledHeads {
    /// Returns the heads of the model that `decoder` was opened from.
    pub fn new(heads: Heads, decoder: Arc<Decoder>) -> Self {
        Self { heads, decoder, buffers: BufferPool::of_largest() }
    }

    /// Returns the bytes of a head in memory. For a streamed model they include the model's weights that only the
    /// head keeps in memory.
    fn bytes_of(&self, head: &HeadFiles) -> u64 {
        let own = head.bytes();
        if self.decoder.streamed().is_none() {
            return own;
        }
        let layers = self.heads.model().segments().into_iter();
        let taken =
            layers.filter(|segment| matches!(segment.id, SegmentId::Layer(layer) if layer >= head.split()));
        let shared = taken.flat_map(|segment| segment.tensors).filter(|name| head.info(name).is_none());
        own + shared.filter_map(|name| Some(self.heads.model().info(&name)?.bytes)).sum::<u64>()
    }
}

impl HeadSource for InstalledHeads {
    fn names(&self) -> Result<Vec<String>, RuntimeError> {
        Ok(self.heads.list()?.into_iter().map(|head| head.name).collect())
    }

    fn generation(&self, name: &str) -> Result<Option<u64>, RuntimeError> {
        Ok(self.heads.list()?.into_iter().find(|head| head.name == name).map(|head| head.generation))
    }

    fn bytes(&self, name: &str) -> Result<u64, RuntimeError> {
        Ok(self.bytes_of(&self.heads.head(name)?))
    }

    fn load(&self, name: &str) -> Result<ReadyHead, RuntimeError> {
        let files = self.heads.head(name)?;
        let form: HeadForm =
            serde_json::from_value(files.spec().clone()).map_err(|error| StoreError::Malformed {
                file: files.path().join("head.json"),
                field: "spec".into(),
                reason: format!("{error}; this program knows no such head, update it"),
            })?;
        let memory = files.read(&self.buffers)?;
        // What a sequence remembers is kept under it, in files too: the same name is not enough.
        let id = format!("{name} {}", files.hash());
        // On other devices the weights are copied, and the charge for this memory goes with them.
        let is_used_here = *self.decoder.device() == Device::flex();
        if let Some(flag) = memory.detach_flag().filter(|_| !is_used_here) {
            flag.detach();
        }
        let detach = memory.detach_flag().filter(|_| is_used_here).cloned();
        let head =
            Head::load(&id, Arc::new(memory), &form, files.split(), &self.decoder, self.heads.model())?;
        let (trunk, own) = (self.heads.model().quantization(), files.quantization());
        Ok(ReadyHead {
            head: Arc::new(head),
            generation: files.generation(),
            bytes: self.bytes_of(&files),
            requantized: (form == HeadForm::Blocks && trunk != own)
                .then_some(Requantized { trunk, head: own }),
            detach,
        })
    }

    fn build(&self, head: &Head) -> Result<(), RuntimeError> {
        Ok(head.build(&self.decoder)?)
    }

    fn buffers(&self) -> Option<&BufferPool> {
        Some(&self.buffers)
    }
}
