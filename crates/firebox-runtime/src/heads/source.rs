use std::fmt::Debug;
use std::sync::Arc;

use firebox_model::{Decoder, Head, HeadForm};
use firebox_store::{HeadFiles, Heads, Loan, Quantization, SegmentId, Spare, StoreError, Tensors as _};

use crate::{Device, RuntimeError};

/// Where heads come from.
pub trait HeadSource: Debug + Send + Sync {
    /// Which heads there are.
    fn names(&self) -> Result<Vec<String>, RuntimeError>;

    /// Which generation of a head is in use; `None` if there is no such head.
    fn generation(&self, name: &str) -> Result<Option<u64>, RuntimeError>;

    /// How many bytes of memory a head takes.
    fn bytes(&self, name: &str) -> Result<u64, RuntimeError>;

    /// Reads a head into memory, and sees that it can be built.
    fn load(&self, name: &str) -> Result<ReadyHead, RuntimeError>;

    /// Builds what a head needs beside its bytes, before somebody puts it on.
    fn build(&self, _head: &Head) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// Where the memory of heads goes that are no longer used, if it is used again.
    fn spare(&self) -> Option<&Spare> {
        None
    }
}

/// A head that is in memory.
#[derive(Debug, Clone)]
pub struct ReadyHead {
    /// To be used.
    pub head: Arc<Head>,
    /// Tells it from other heads that had its name.
    pub generation: u64,
    /// Bytes that it takes.
    pub bytes: u64,
    /// How its weights and those of the trunk are quantized, where they differ.
    pub requantized: Option<Requantized>,
    /// What the memory is on that it lies in, where that is used again.
    pub loan: Option<Loan>,
}

/// A change of quantization between trunk and head: what passes is in f32 and quantized anew for the head's products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Requantized {
    /// The trunk's scheme.
    pub trunk: Option<Quantization>,
    /// The head's.
    pub head: Option<Quantization>,
}

/// The heads that are installed beside a model.
#[derive(Debug)]
pub struct InstalledHeads {
    heads: Heads,
    decoder: Arc<Decoder>,
    spare: Spare,
}

impl InstalledHeads {
    /// Those of the model that the decoder is over.
    pub fn new(heads: Heads, decoder: Arc<Decoder>) -> Self {
        Self { heads, decoder, spare: Spare::default() }
    }

    /// What a head takes in memory. What it takes from a model that is streamed otherwise it alone keeps there.
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
        let memory = files.read(&self.spare)?;
        // What a sequence remembers is kept under it, in files too: the same name is not enough.
        let id = format!("{name} {}", files.hash());
        // To other devices weights are copied, and with them goes what was charged for this memory.
        let is_used_here = *self.decoder.device() == Device::flex();
        if let Some(loan) = memory.loan().filter(|_| !is_used_here) {
            loan.keep();
        }
        let loan = memory.loan().filter(|_| is_used_here).cloned();
        let head =
            Head::load(&id, Arc::new(memory), &form, files.split(), &self.decoder, self.heads.model())?;
        let (trunk, own) = (self.heads.model().quantization(), files.quantization());
        Ok(ReadyHead {
            head: Arc::new(head),
            generation: files.generation(),
            bytes: self.bytes_of(&files),
            requantized: (form == HeadForm::Blocks && trunk != own)
                .then_some(Requantized { trunk, head: own }),
            loan,
        })
    }

    fn build(&self, head: &Head) -> Result<(), RuntimeError> {
        Ok(head.build(&self.decoder)?)
    }

    fn spare(&self) -> Option<&Spare> {
        Some(&self.spare)
    }
}
