//! The errors of training.

use std::io;
use std::path::{Path, PathBuf};

use firebox_store::StoreError;
use firebox_text::TextError;

/// Why something could not be trained.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A file could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Tokenizer or chat template failed.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A setting cannot be.
    #[error("{setting} is {value}: {reason}")]
    Setting {
        /// The setting, as `run.toml` spells it.
        setting: &'static str,
        /// Its value.
        value: String,
        /// The values that are allowed.
        reason: &'static str,
    },
    /// A file of the run breaks its own format.
    #[error("{}: {reason}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The fault, and how to remedy it.
        reason: String,
    },
    /// There is a run in the folder already.
    #[error("{} holds a run already; resume it, or choose another folder", folder.display())]
    RunExists {
        /// The folder.
        folder: PathBuf,
    },
    /// The run in the folder was begun with other settings.
    #[error(
        "{} holds a run that was begun with {setting} = {begun}, and now it is {now}; choose another folder, or delete that run",
        folder.display()
    )]
    OtherRun {
        /// The folder.
        folder: PathBuf,
        /// The first setting that differs, as `run.toml` spells it, with the tables that it is in.
        setting: String,
        /// The value that the run was begun with.
        begun: String,
        /// The value now.
        now: String,
    },
    /// There is no run in the folder.
    #[error("{} holds no run: it has no run.toml", folder.display())]
    NoRun {
        /// The folder.
        folder: PathBuf,
    },
    /// The run has no such checkpoint.
    #[error("{} has no whole checkpoint of {which}", folder.display())]
    NoCheckpoint {
        /// The run's folder.
        folder: PathBuf,
        /// The requested checkpoint.
        which: String,
    },
    /// A checkpoint holds other parameters than the network has.
    #[error(
        "{}: {parameter}: {reason}; resume with the network that the run was begun with", file.display()
    )]
    OtherNetwork {
        /// The file of the checkpoint.
        file: PathBuf,
        /// The parameter's path in the network.
        parameter: String,
        /// The mismatch.
        reason: String,
    },
    /// No parameter of the network has its gradients switched on.
    #[error("the network has nothing to train: no parameter has its gradients switched on")]
    NothingToTrain,
    /// One parameter stands at two places of the network.
    #[error(
        "parameter {second} is {first} once more; share it inside the module instead of holding it twice"
    )]
    SharedParameter {
        /// Where it stands first.
        first: String,
        /// Where it stands again.
        second: String,
    },
    /// A parameter that is to be trained is not kept in 32 bits.
    #[error("parameter {parameter} is {dtype}, but is trained in f32 only; convert it before training")]
    ParameterType {
        /// The parameter's path in the network.
        parameter: String,
        /// The number format of the weight.
        dtype: String,
    },
    /// The device has no numbers of the wanted precision.
    #[error("the device cannot compute in {precision}; set precision = \"f32\"")]
    PrecisionUnsupported {
        /// The requested precision.
        precision: &'static str,
    },
    /// There is nothing to learn from.
    #[error("{what} has nothing to learn from: {reason}")]
    NoData {
        /// The file, or the epoch.
        what: String,
        /// Why not.
        reason: String,
    },
    /// A batch came without a token to learn.
    #[error("batch {batch} of epoch {epoch} has no target; leave samples without one out")]
    NoTargets {
        /// The epoch.
        epoch: u64,
        /// The batch in it.
        batch: usize,
    },
    /// The numbers ran away.
    #[error(
        "step {step}: {what} is {value} at a learning rate of {learning_rate:e}; lower schedule.peak, clip harder, or \
         look at the data. The checkpoints are from before"
    )]
    Diverged {
        /// The step that was not taken.
        step: u64,
        /// Loss or gradient norm.
        what: &'static str,
        /// The value.
        value: f64,
        /// The learning rate it would have been taken with.
        learning_rate: f64,
    },
    /// A file was written to while it was in use.
    #[error("{}: changed while it was in use; begin the run again", file.display())]
    Changed {
        /// The file.
        file: PathBuf,
    },
    /// A hidden state cannot be stored.
    #[error(
        "sample {sample} has a hidden state of {value}, which f16 cannot hold; store them as f32, and look at the model if \
         it is no number"
    )]
    StateTooLarge {
        /// The sample's number.
        sample: usize,
        /// The state.
        value: f32,
    },
    /// An adapter uses something that is not supported.
    #[error("{}: {field} is {value}: not supported; {reason}", file.display())]
    AdapterUnsupported {
        /// The file.
        file: PathBuf,
        /// The field of the configuration, or the tensor.
        field: String,
        /// Its value.
        value: String,
        /// The supported values.
        reason: &'static str,
    },
    /// The device could not hand a result back.
    #[error("the device failed: {reason}")]
    Readback {
        /// The device's own error message.
        reason: String,
    },
    /// The network could not compute.
    #[error("the network failed: {0}")]
    Network(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl TrainError {
    /// An error of the system about a file.
    pub(crate) fn io(path: &Path, action: impl Into<String>, source: io::Error) -> Self {
        Self::Store(StoreError::io(path, action, source))
    }

    /// Returns whether the content or the absence of a file is at fault. Otherwise the file may be intact, and reading it
    /// failed.
    pub(crate) fn tells_of_content(&self) -> bool {
        match self {
            Self::Store(StoreError::Io { source, .. }) => source.kind() == io::ErrorKind::NotFound,
            _ => true,
        }
    }

    /// A file that breaks its format.
    pub(crate) fn malformed(file: &Path, reason: impl Into<String>) -> Self {
        Self::Malformed { file: file.to_owned(), reason: reason.into() }
    }

    /// Wraps an error of a network's own operations, for implementations of [`Network`](crate::Network).
    pub fn network(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Network(error.into())
    }
}
