//! The errors of the library.

use std::path::PathBuf;
use std::sync::Arc;

use firebox_model::ModelError;
use firebox_runtime::{CacheError, MemoryError, RuntimeError};

/// Why a call failed. Other languages get the variant and the message.
#[derive(Debug, thiserror::Error, ::uniffi::Error)]
#[uniffi(flat_error)]
pub enum FireboxError {
    /// An argument is invalid.
    #[error("{argument} {reason}")]
    InvalidArgument {
        /// The argument.
        argument: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The model cannot be opened.
    #[error("{source}")]
    Model {
        /// Why.
        source: RuntimeError,
    },
    /// A head does not exist or cannot be used.
    #[error("head {name:?} cannot be used: {source}")]
    NoHead {
        /// Its name.
        name: String,
        /// Why.
        source: Arc<RuntimeError>,
    },
    /// The fact does not exist or is superseded.
    #[error("fact {fact} does not exist or is superseded; pass the number returned when it was added")]
    NoFact {
        /// The given number.
        fact: u64,
    },
    /// The session has no room for the text.
    #[error("{source}")]
    Full {
        /// What has no room.
        source: RuntimeError,
    },
    /// A session could not be saved or restored.
    #[error("{source}")]
    File {
        /// Why.
        source: RuntimeError,
    },
    /// The file was not saved through this library.
    #[error(
        "{} was not saved through this library; see `firebox session list`", path.display()
    )]
    ForeignFile {
        /// The file.
        path: PathBuf,
    },
    /// The session is in use by another call.
    #[error(
        "the session is in use by another call; wait until it returns, and do not use the session in its own callback"
    )]
    Busy,
    /// The listener failed. The session is unchanged.
    #[error("the listener failed: {reason}; the session is unchanged")]
    Listener {
        /// Its error.
        reason: String,
    },
    /// Running the model failed.
    #[error("{source}")]
    Failed {
        /// Why.
        source: RuntimeError,
    },
    /// A panic.
    #[error(
        "the library panicked: {reason}; the session is lost: restore it from a file or create another, and report \
         this"
    )]
    Panicked {
        /// Its message.
        reason: String,
    },
}

impl From<RuntimeError> for FireboxError {
    fn from(source: RuntimeError) -> Self {
        match source {
            RuntimeError::ContextFull { .. }
            | RuntimeError::Memory(MemoryError::OverBudget { .. })
            | RuntimeError::Cache(
                CacheError::TurnTooLong { .. }
                | CacheError::FactsFull { .. }
                | CacheError::PoolExhausted { .. },
            )
            | RuntimeError::Model(ModelError::Cache(CacheError::PoolExhausted { .. })) => {
                Self::Full { source }
            }
            RuntimeError::Setting { setting, value, reason } => {
                Self::InvalidArgument { argument: setting, reason: format!("= {value}: {reason}") }
            }
            source => Self::Failed { source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhausted_pools_are_reported_as_full() {
        let exhausted = || CacheError::PoolExhausted { pages: 1 };
        for source in [exhausted().into(), RuntimeError::Model(exhausted().into())] {
            let told = FireboxError::from(source);
            assert!(matches!(told, FireboxError::Full { .. }), "{told:?}");
        }
    }
}
