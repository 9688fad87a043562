//! The errors of measuring a model.

use std::path::PathBuf;

use firebox_runtime::RuntimeError;

/// An error of a comparison with expected numbers.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The model could not be run.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
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
}
