//! The models given to a server.

use std::fmt;
use std::sync::Arc;

use firebox_runtime::schedule::Priority;
use firebox_runtime::{Model, RuntimeError};

/// Opens a model.
#[derive(Clone)]
pub(crate) struct Opener(Arc<dyn Fn() -> Result<Model, RuntimeError> + Send + Sync>);

impl Opener {
    pub fn open(&self) -> Result<Model, RuntimeError> {
        (self.0)()
    }
}

/// A model for a server, with its name and priority.
///
/// ```no_run
/// use firebox_runtime::residency::{SharedBudget, ShareOptions};
/// use firebox_runtime::{device, schedule::Priority};
/// use firebox_server::{ModelSpec, Server, ServerConfig};
///
/// let (shared, cpu) = (SharedBudget::new(2 << 30)?, device("cpu")?);
/// let chat = shared.open("models/chat", &cpu, &ShareOptions::pinned())?;
/// let memory = Some(shared.budget().clone());
/// let models = vec![
///     ModelSpec::new("chat", chat).with_priority(Priority::Interactive),
///     ModelSpec::lazy("code", move || shared.open("models/code", &cpu, &ShareOptions::default())),
/// ];
/// Server::with_models(ServerConfig { memory, ..ServerConfig::default() }, models)?.run()?;
/// # Ok::<(), firebox_server::ServerError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ModelSpec {
    pub(crate) name: String,
    pub(crate) source: ModelSource,
    pub(crate) priority: Priority,
}

/// An open model, or how to open it.
#[derive(Debug, Clone)]
pub(crate) enum ModelSource {
    Open(Box<Model>),
    Lazy(Opener),
}

impl ModelSpec {
    /// Serves an open model under a name.
    pub fn new(name: impl Into<String>, model: Model) -> Self {
        Self::from(name, ModelSource::Open(Box::new(model)))
    }

    /// Serves a model that is opened by its first request and takes no memory before. If opening fails, the
    /// waiting requests get the error, and the next request tries again.
    pub fn lazy(
        name: impl Into<String>,
        open: impl Fn() -> Result<Model, RuntimeError> + Send + Sync + 'static,
    ) -> Self {
        Self::from(name, ModelSource::Lazy(Opener(Arc::new(open))))
    }

    fn from(name: impl Into<String>, source: ModelSource) -> Self {
        Self { name: name.into(), source, priority: Priority::default() }
    }

    /// Sets the priority of the model's requests.
    pub fn with_priority(self, priority: Priority) -> Self {
        Self { priority, ..self }
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opener").finish_non_exhaustive()
    }
}
