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

/// A model that a server is to serve, and on what terms.
///
/// ```no_run
/// use firebox_runtime::fit::{Commons, Terms};
/// use firebox_runtime::{device, schedule::Priority};
/// use firebox_server::{Offer, Server, ServerConfig};
///
/// let (commons, cpu) = (Commons::new(2 << 30)?, device("cpu")?);
/// let chat = commons.open("models/chat", &cpu, &Terms::pinned())?;
/// let memory = Some(commons.budget().clone());
/// let offers = vec![
///     Offer::new("chat", chat).with_priority(Priority::Interactive),
///     Offer::later("code", move || commons.open("models/code", &cpu, &Terms::default())),
/// ];
/// Server::offering(ServerConfig { memory, ..ServerConfig::default() }, offers)?.run()?;
/// # Ok::<(), firebox_server::ServerError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Offer {
    pub(crate) name: String,
    pub(crate) source: Source,
    pub(crate) priority: Priority,
}

/// Where a model comes from.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    Opened(Box<Model>),
    Later(Opener),
}

impl Offer {
    /// A model by the name that it is asked for.
    pub fn new(name: impl Into<String>, model: Model) -> Self {
        Self::from(name, Source::Opened(Box::new(model)))
    }

    /// One that is opened when somebody asks for it, and takes no memory before. Where it cannot be opened, those who asked
    /// are told, and it is tried again for the next.
    pub fn later(
        name: impl Into<String>,
        open: impl Fn() -> Result<Model, RuntimeError> + Send + Sync + 'static,
    ) -> Self {
        Self::from(name, Source::Later(Opener(Arc::new(open))))
    }

    fn from(name: impl Into<String>, source: Source) -> Self {
        Self { name: name.into(), source, priority: Priority::default() }
    }

    /// The same, with requests that are so urgent.
    pub fn with_priority(self, priority: Priority) -> Self {
        Self { priority, ..self }
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opener").finish_non_exhaustive()
    }
}
