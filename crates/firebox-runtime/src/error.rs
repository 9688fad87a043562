//! The errors of the runtime.

use std::path::PathBuf;
use std::time::Duration;

use firebox_cache::CacheError;
use firebox_model::ModelError;
use firebox_store::StoreError;
use firebox_text::TextError;

use firebox_memory::MemoryError;

use crate::GrammarError;

/// An error of the runtime.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The checkpoint could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The model could not be built or run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The cache could not keep or remove what it should.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Memory could not be charged, or a plan not be made.
    #[error(transparent)]
    Memory(MemoryError),
    /// No model was named, and there is no pocket model.
    #[error(
        "no model was named, and the pocket model is neither in the sources of this program nor at {}; name a model",
        beside.display()
    )]
    NoPocketModel {
        /// Its path beside the program.
        beside: PathBuf,
    },
    /// There is no such branch in the tree.
    #[error("branch {branch} is not in the tree, or not any more")]
    NoSuchBranch {
        /// What was asked for.
        branch: u64,
    },
    /// The root of a tree of branches was to be removed.
    #[error(
        "the root of a tree cannot be dropped while the tree lives; promote a branch into its place instead"
    )]
    RootBranch,
    /// A condenser panicked on its thread; the session is as it was.
    #[error("the condenser panicked; the facts are as they were")]
    CondenserPanicked,
    /// Tokenizer or chat template failed.
    #[error(transparent)]
    Text(#[from] TextError),
    /// An answer could not be constrained to its grammar.
    #[error(transparent)]
    Constraint(#[from] GrammarError),
    /// The model has no tokenizer, and text was to be turned into tokens.
    #[error("{} has no tokenizer; put its tokenizer.json beside config.json", path.display())]
    NoTokenizer {
        /// The checkpoint.
        path: PathBuf,
    },
    /// There is no such device in this build.
    #[error("device {name:?} is not available in this build; available are {}", available.join(", "))]
    Device {
        /// What was asked for.
        name: String,
        /// What there is.
        available: Vec<&'static str>,
    },
    /// The build could compute on such a device, and the machine lacks something.
    #[error("device {name:?} cannot be used: {reason}")]
    DeviceMissing {
        /// What was asked for.
        name: String,
        /// What is missing, and what to do about it.
        reason: String,
    },
    /// The results of the device could not be read.
    #[error("the device failed: {reason}")]
    Readback {
        /// What it reports.
        reason: String,
    },
    /// A file was written by another model, or with other settings.
    #[error(
        "{}: {field} is {found:?} there and {expected:?} here; use it with what it was saved by, or remove it",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The field that differs.
        field: &'static str,
        /// Its value in the file.
        found: String,
        /// The expected value.
        expected: String,
    },
    /// The sequence has no room for more tokens.
    #[error(
        "{tokens} tokens do not fit into a context of {context}; shorten the prompt or raise the context size"
    )]
    ContextFull {
        /// How long the sequence would become.
        tokens: usize,
        /// How long it may become.
        context: usize,
    },
    /// A thread could not be started, or ended without a result.
    #[error("a thread is missing: {reason}")]
    Threads {
        /// Why.
        reason: String,
    },
    /// No head of that name is installed.
    #[error("no head {name:?} is installed; `firebox head list` says which there are")]
    NoHead {
        /// The name.
        name: String,
    },
    /// A head was not loaded in time.
    #[error("head {name:?} was not in memory within {} ms; it is used as soon as it is there", waited.as_millis())]
    HeadTimeout {
        /// Its name.
        name: String,
        /// How long the request waited.
        waited: Duration,
    },
    /// The caller cancelled while tokens were fed.
    #[error("cancelled")]
    Cancelled,
    /// A setting has an invalid value.
    #[error("{setting} = {value}: {reason}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// What it was set to.
        value: String,
        /// Why that cannot be.
        reason: &'static str,
    },
    /// A model does not fit beside the models that share its memory.
    #[error(
        "{} does not fit beside the other models: {:.0} MiB of memory are too little, and {:.0} MiB ({needed} bytes) are the \
         least that all of them take; allow that much, pin and reserve less, or do with fewer models",
        model.display(), *memory as f64 / 1048576.0, (*needed as f64 / 1048576.0).ceil()
    )]
    TooLittleShared {
        /// The model, which was not opened.
        model: PathBuf,
        /// The least bytes of all models and the program.
        needed: u64,
        /// Allowed bytes.
        memory: u64,
    },
    /// Similarities of turns do not separate related from unrelated pairs.
    #[error(
        "similarity does not tell {related} related pairs of turns from {unrelated} unrelated ones: it is right about \
         {:.0} % of them; calibrate with some dozen pairs of each kind, in the language of the conversation, or use a \
         sentence encoder such as all-MiniLM-L6-v2", accuracy * 100.0
    )]
    Calibration {
        /// How many pairs were related.
        related: usize,
        /// How many were not.
        unrelated: usize,
        /// The share that would be on the right side of a threshold, related and unrelated pairs counting alike.
        accuracy: f64,
    },
    /// The tokens of a draft model differ from those of its target model.
    #[error(
        "{} cannot draft for {}: {difference}; use a smaller model of the same family",
        draft.display(), model.display()
    )]
    DraftVocabulary {
        /// The draft model.
        draft: PathBuf,
        /// The target model.
        model: PathBuf,
        /// The difference between their tokens.
        difference: String,
    },
    /// An operation that this kind of model does not have.
    #[error("this model is {found}; {remedy}")]
    Kind {
        /// What it is.
        found: &'static str,
        /// What would help.
        remedy: &'static str,
    },
}

impl From<MemoryError> for RuntimeError {
    fn from(error: MemoryError) -> Self {
        match error {
            MemoryError::Setting { setting, value, reason } => Self::Setting { setting, value, reason },
            other => Self::Memory(other),
        }
    }
}
