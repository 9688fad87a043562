use std::path::PathBuf;
use std::sync::Arc;

use firebox_model::ModelError;
use firebox_runtime::{CacheError, RuntimeError};

/// Why a call failed. Other languages get the kind, and the text that says what to do.
#[derive(Debug, thiserror::Error, ::uniffi::Error)]
#[uniffi(flat_error)]
pub enum FireboxError {
    /// Something that was passed cannot be used.
    #[error("{argument} {reason}")]
    InvalidArgument {
        /// What was passed.
        argument: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The model could not be opened.
    #[error("{source}")]
    Model {
        /// Why.
        source: RuntimeError,
    },
    /// A head is not there, or cannot be used.
    #[error("head {name:?} cannot be used: {source}")]
    NoHead {
        /// Its name.
        name: String,
        /// Why.
        source: Arc<RuntimeError>,
    },
    /// No such fact is there.
    #[error(
        "fact {fact} is not there, or another has taken its place already; pass what the call that added it gave"
    )]
    NoFact {
        /// What was passed.
        fact: u64,
    },
    /// What was said or told has no room.
    #[error("{source}")]
    Full {
        /// What has no room, and in what.
        source: RuntimeError,
    },
    /// A session could not be saved or restored.
    #[error("{source}")]
    File {
        /// Why.
        source: RuntimeError,
    },
    /// The file holds a session that was not saved by these calls.
    #[error(
        "{} was not saved by these calls; `firebox session list` may know what it is", path.display()
    )]
    ForeignFile {
        /// The file.
        path: PathBuf,
    },
    /// The session is in another call.
    #[error(
        "the session is in another call; wait until that has returned, and do not use it in its own callback"
    )]
    Busy,
    /// What listened to the answer failed. The session is as if nothing had been said.
    #[error("what listened to the answer failed: {reason}; the session is as it was before")]
    Listener {
        /// What it said.
        reason: String,
    },
    /// The model could not be run.
    #[error("{source}")]
    Failed {
        /// Why.
        source: RuntimeError,
    },
    /// Something panicked.
    #[error(
        "the library failed in a way it should not: {reason}; the session is lost, restore it from a file or begin \
         another, and report this"
    )]
    Panicked {
        /// What it said.
        reason: String,
    },
}

impl From<RuntimeError> for FireboxError {
    fn from(source: RuntimeError) -> Self {
        match source {
            RuntimeError::ContextFull { .. }
            | RuntimeError::OverBudget { .. }
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
    fn what_has_no_room_is_full_wherever_that_is_noticed() {
        let exhausted = || CacheError::PoolExhausted { pages: 1 };
        for source in [exhausted().into(), RuntimeError::Model(exhausted().into())] {
            let told = FireboxError::from(source);
            assert!(matches!(told, FireboxError::Full { .. }), "{told:?}");
        }
    }
}
