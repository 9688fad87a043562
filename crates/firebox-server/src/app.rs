//! The state shared by all request handlers.

use std::sync::Arc;

use axum::Router;
use firebox_engine::Engine;
use firebox_runtime::telemetry::Telemetry;
use firebox_runtime::{Constraint, Grammar, RuntimeError};
use tokio::sync::Semaphore;

use crate::allowed_origins::AllowedOrigins;
use crate::blocking::with_permit;
use crate::body_memory::BodyMemory;
use crate::catalog::Catalog;
use crate::connection::Limits;
use crate::credentials::CredentialStore;
use crate::engine_watchers::EngineWatchers;
use crate::error::ApiError;
use crate::served_model::ServedModel;
use crate::sessions::registry::SessionRegistry;
use crate::stop_handle::StopHandle;

/// State shared by all request handlers.
#[derive(Debug)]
pub(crate) struct App {
    pub catalog: Catalog,
    pub engine: Engine,
    pub telemetry: Telemetry,
    pub credentials: CredentialStore,
    pub limits: Limits,
    /// Grammars are compiled outside the engine, one at a time, so that a costly one delays only other
    /// grammars.
    pub grammar_permits: Arc<Semaphore>,
    /// Encoders, whose weights no chat uses, compute outside the engine, one batch of one request at a time.
    pub encoder_permits: Arc<Semaphore>,
    /// The requests to encoders that may run and wait at once.
    pub encoder_places: Arc<Semaphore>,
    /// The memory of the bodies of all requests.
    pub body_memory: Arc<BodyMemory>,
    pub sessions: SessionRegistry,
    /// The clients of `/v1/engine/events`.
    pub watchers: EngineWatchers,
    pub stop: StopHandle,
    /// Start time, in seconds since 1970.
    pub started: u64,
    /// The server listens on a loopback address only.
    pub is_local: bool,
    pub allowed_origins: AllowedOrigins,
}

impl App {
    /// Returns true if requests are checked for host names that an attack by DNS rebinding would have: on a loopback address, on a
    /// server without keys, and where host names are listed.
    pub fn checks_hosts(&self) -> bool {
        self.is_local || self.allowed_origins.has_hosts() || self.credentials.current().keys.is_open()
    }

    /// Rejects an invalid grammar before it reaches the engine's thread, which serves all requests. `field` is
    /// the request field that asked for it.
    pub async fn check_grammar(
        &self,
        field: &str,
        grammar: Option<&Grammar>,
        served: &ServedModel,
    ) -> Result<(), ApiError> {
        let Some(grammar) = grammar.cloned() else { return Ok(()) };
        let (tokenizer, ends) = (served.tokenizer()?.clone(), served.model.end_tokens());
        let check = move || {
            Constraint::new(&grammar, &tokenizer, &ends).map_err(RuntimeError::from)?;
            Ok(())
        };
        with_permit(&self.grammar_permits, check)
            .await
            .map_err(|error: ApiError| error.with_grammar_field(field))
    }
}

/// Routes of one group.
pub(crate) type Routes = Router<Arc<App>>;
