//! The errors of the engine.

use std::sync::Arc;
use std::time::Duration;

use firebox_cache::CacheError;
use firebox_model::ModelError;
use firebox_runtime::RuntimeError;
use firebox_schedule::ScheduleError;

/// Why a request failed, or an engine refused a command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A model or a session failed.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// A request was refused by its queue, or a schedule could not be set up.
    #[error(transparent)]
    Schedule(ScheduleError),
    /// A pass over several sequences failed, or a request for several choices.
    #[error("several answers failed together: {source}")]
    Together {
        /// Why.
        source: Arc<Self>,
    },
    /// A requested head cannot be used.
    #[error("head {name:?} cannot be used: {source}")]
    HeadUnavailable {
        /// The head.
        name: String,
        /// Why.
        source: Arc<RuntimeError>,
    },
    /// The device was reset or removed, or its driver gave up.
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
    /// There is no such model.
    #[error("no model {name:?} is there; there are: {}", if there.is_empty() { "none".into() } else { there.join(", ") })]
    NoModel {
        /// What was asked for.
        name: String,
        /// What there is.
        there: Vec<String>,
    },
    /// A model that is opened on demand could not be opened.
    #[error("model {name:?} could not be opened: {source}")]
    NotOpened {
        /// Which.
        name: String,
        /// Why.
        source: Arc<Self>,
    },
    /// Another model has the name.
    #[error("a model {name:?} is there already; give this one another name")]
    ModelNamed {
        /// The name.
        name: String,
    },
    /// A session was to continue with another model than its own.
    #[error(
        "the session was begun with another model than {model:?}; begin a new one, and feed it the same tokens"
    )]
    ForeignSession {
        /// The model that was asked for.
        model: String,
    },
    /// The first token did not arrive in time.
    #[error("{model} did not answer in time; give it longer, or let another model answer")]
    Late {
        /// The model.
        model: String,
    },
    /// The engine's thread panicked outside a computation, which ended all requests.
    #[error("the engine failed: {reason}; what was asked is not answered: ask again")]
    EngineFailed {
        /// What the panic says.
        reason: String,
    },
    /// The events of the answer were not read for too long.
    #[error(
        "the answer was not read for {} s, and others wait for its place; read it as it comes, or ask for fewer tokens or choices",
        after.as_secs_f64()
    )]
    Stalled {
        /// How long.
        after: Duration,
    },
    /// The engine has ended, and with it all requests.
    #[error("the engine has ended")]
    EngineOver,
}

impl EngineError {
    /// Returns whether a sequence found no free page of keys and values.
    pub(crate) fn is_pool_exhausted(&self) -> bool {
        let Self::Runtime(error) = self else { return false };
        matches!(
            error,
            RuntimeError::Cache(CacheError::PoolExhausted { .. })
                | RuntimeError::Model(ModelError::Cache(CacheError::PoolExhausted { .. }))
        )
    }
}

impl From<ScheduleError> for EngineError {
    fn from(error: ScheduleError) -> Self {
        match error {
            ScheduleError::Memory(error) => Self::Runtime(error.into()),
            ScheduleError::Store(error) => Self::Runtime(error.into()),
            ScheduleError::Setting { setting, value, reason } => {
                Self::Runtime(RuntimeError::Setting { setting, value, reason })
            }
            other => Self::Schedule(other),
        }
    }
}
