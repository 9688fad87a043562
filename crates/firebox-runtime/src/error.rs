use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use firebox_cache::CacheError;
use firebox_model::ModelError;
use firebox_store::StoreError;
use firebox_text::TextError;

use firebox_memory::MemoryError;
use firebox_schedule::ScheduleError;

use crate::GrammarError;

/// Why something could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The checkpoint could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The model could not be built or run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The sequence could not remember, or not forget, what it should.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Memory could not be charged, or a plan not be made.
    #[error(transparent)]
    Memory(MemoryError),
    /// A request was refused by its queue, or a schedule could not be set up.
    #[error(transparent)]
    Schedule(ScheduleError),
    /// No model was named, and the pocket model is not there.
    #[error(
        "no model was named, and the pocket model is neither in the sources of this program nor at {}; name a model",
        beside.display()
    )]
    NoPocketModel {
        /// Where it would be beside the program.
        beside: PathBuf,
    },
    /// A pass that several sequences took together failed.
    #[error("a pass of several sequences failed: {source}")]
    Together {
        /// Why.
        source: Arc<Self>,
    },
    /// A head was asked for by name and cannot be worn.
    #[error("head {name:?} cannot be worn: {source}")]
    HeadUnavailable {
        /// The head.
        name: String,
        /// Why.
        source: Arc<Self>,
    },
    /// No such branch is in the tree.
    #[error("branch {branch} is not in the tree, or not any more")]
    NoSuchBranch {
        /// What was asked for.
        branch: u64,
    },
    /// The root of a tree of branches was to be dropped.
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
    /// An answer could not be held to its grammar.
    #[error(transparent)]
    Constraint(#[from] GrammarError),
    /// The model has no tokenizer, and text was to be turned into tokens.
    #[error("{} has no tokenizer; put its tokenizer.json beside config.json", path.display())]
    NoTokenizer {
        /// The checkpoint.
        path: PathBuf,
    },
    /// No such device, or it was left out of this build.
    #[error("device {name:?} is not available in this build; available are {}", available.join(", "))]
    Device {
        /// What was asked for.
        name: String,
        /// What there is.
        available: Vec<&'static str>,
    },
    /// The device could not hand its results back.
    #[error("the device failed: {reason}")]
    Readback {
        /// What it reports.
        reason: String,
    },
    /// The device is gone: it was reset or taken away, or its driver has given up.
    #[error(
        "the device is lost: {reason}; what was asked is not answered, and models on other devices go on: open the model anew, \
         on another device if this one stays away"
    )]
    DeviceLost {
        /// What it reports.
        reason: String,
    },
    /// The device or a component panicked while it computed.
    #[error(
        "computing panicked: {reason}; what was asked is not answered, and other models go on: ask again, and open the model \
         anew if it goes on"
    )]
    Panicked {
        /// What the panic says.
        reason: String,
    },
    /// What a file remembers was computed by another model, or is kept in another way.
    #[error(
        "{}: {field} is {found:?} there and {expected:?} here; use it with what it was saved by, or remove it",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What differs.
        field: &'static str,
        /// What the file says.
        found: String,
        /// What it would have to say.
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
    /// No such model is there.
    #[error("no model {name:?} is there; there are: {}", if there.is_empty() { "none".into() } else { there.join(", ") })]
    NoModel {
        /// What was asked for.
        name: String,
        /// What there is.
        there: Vec<String>,
    },
    /// A model that is opened when somebody asks for it could not be.
    #[error("model {name:?} could not be opened: {source}")]
    NotOpened {
        /// Which.
        name: String,
        /// Why.
        source: Arc<Self>,
    },
    /// Another model goes by the same name.
    #[error("a model {name:?} is there already; give this one another name")]
    ModelNamed {
        /// The name.
        name: String,
    },
    /// A session was to go on with another model than it was begun with.
    #[error(
        "the session was begun with another model than {model:?}; begin a new one, and feed it the same tokens"
    )]
    ForeignSession {
        /// The model that was asked for.
        model: String,
    },
    /// The first token was not there when it should have been.
    #[error("{model} did not answer in time; give it longer, or let another model answer")]
    Late {
        /// The model.
        model: String,
    },
    /// The engine has ended, with all that was asked of it.
    #[error("the engine has ended")]
    EngineOver,
    /// The cores cannot be shared like that.
    #[error(
        "{wanted} of {cores} cores for small models; give them at least one, and leave one for large models"
    )]
    Cores {
        /// How many small models were to have.
        wanted: usize,
        /// How many there are.
        cores: usize,
    },
    /// A thread could not be made, or ended without a word.
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
    /// A head did not come into memory in time.
    #[error("head {name:?} was not in memory within {} ms; it is used as soon as it is there", waited.as_millis())]
    HeadTimeout {
        /// Its name.
        name: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The caller asked to stop while tokens were being fed.
    #[error("cancelled")]
    Cancelled,
    /// A setting makes no sense.
    #[error("{setting} = {value}: {reason}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// What it was set to.
        value: String,
        /// Why that cannot be.
        reason: &'static str,
    },
    /// A model does not fit beside those that it is to share memory with.
    #[error(
        "{} does not fit beside the other models: {:.0} MiB of memory are too little, and {:.0} MiB ({needed} bytes) are the \
         least that all of them take; allow that much, pin and reserve less, or do with fewer models",
        model.display(), *memory as f64 / 1048576.0, (*needed as f64 / 1048576.0).ceil()
    )]
    TooLittleShared {
        /// The model, which was not opened.
        model: PathBuf,
        /// Bytes that all models take at least, with this one and the program.
        needed: u64,
        /// Bytes that were allowed.
        memory: u64,
    },
    /// Similarities of turns do not say which of them are related.
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
    /// A draft model has other tokens than the model it is to draft for.
    #[error(
        "{} cannot draft for {}: {difference}; use a smaller model of the same family",
        draft.display(), model.display()
    )]
    DraftVocabulary {
        /// The draft model.
        draft: PathBuf,
        /// The model it is to draft for.
        model: PathBuf,
        /// How the draft model's tokens differ.
        difference: String,
    },
    /// A file of expected numbers cannot be used.
    #[error("{}: {field}: {reason}", path.display())]
    Expected {
        /// The file.
        path: PathBuf,
        /// The tensor in it.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An encoder was asked to generate, or a decoder to embed.
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

impl From<ScheduleError> for RuntimeError {
    fn from(error: ScheduleError) -> Self {
        match error {
            ScheduleError::Memory(error) => error.into(),
            ScheduleError::Store(error) => error.into(),
            ScheduleError::Setting { setting, value, reason } => Self::Setting { setting, value, reason },
            other => Self::Schedule(other),
        }
    }
}
