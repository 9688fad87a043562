use std::path::PathBuf;

use firebox_cache::CacheError;
use firebox_model::ModelError;
use firebox_store::StoreError;
use firebox_text::TextError;

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
    /// Tokenizer or chat template failed.
    #[error(transparent)]
    Text(#[from] TextError),
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
