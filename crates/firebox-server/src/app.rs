//! The state shared by all request handlers.

use std::sync::Arc;

use axum::Router;
use firebox_engine::Engine;
use firebox_runtime::schedule::Client;
use firebox_runtime::telemetry::Telemetry;
use firebox_runtime::{CompiledGrammar, Grammar};
use tokio::sync::Semaphore;

use crate::allowed_origins::AllowedOrigins;
use crate::background_work::BackgroundWork;
use crate::blocking::blocking;
use crate::body_memory::BodyMemory;
use crate::catalog::Catalog;
use crate::connection::Limits;
use crate::credentials::CredentialStore;
use crate::engine_watchers::EngineWatchers;
use crate::error::ApiError;
use crate::key_share::KeyShare;
use crate::served_model::ServedModel;
use crate::sessions::registry::SessionRegistry;
use crate::stop_handle::StopHandle;

/// Bytes of text from which on parsing and tokenizing are work for the background: tens of milliseconds.
pub(crate) const LONG_TEXT: usize = 64 << 10;

/// State shared by all request handlers.
#[derive(Debug)]
pub(crate) struct App {
    pub catalog: Catalog,
    pub engine: Engine,
    pub telemetry: Telemetry,
    pub credentials: CredentialStore,
    /// What requests of every key may have of a model, unless the key has its own share.
    pub per_key: KeyShare,
    pub limits: Limits,
    /// Grammars are compiled outside the engine, few at a time, so that a costly one delays only other
    /// grammars.
    pub grammar_work: BackgroundWork,
    /// Long bodies are parsed, and long texts tokenized, one at a time.
    pub text_work: BackgroundWork,
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

    /// Compiles a grammar for a request before that reaches the engine's thread, which serves all requests, unless the same
    /// one was compiled lately. `field` is the request field that asked for it.
    pub async fn compile_grammar(
        &self,
        field: &str,
        grammar: Option<&Grammar>,
        served: &ServedModel,
        scope: &str,
    ) -> Result<Option<CompiledGrammar>, ApiError> {
        let Some(grammar) = grammar.cloned() else { return Ok(None) };
        served.tokenizer()?;
        let (model, ends) = (served.model.clone(), served.model.end_tokens());
        let grammars = self.engine.grammars().clone();
        if let Some(compiled) = grammars.get(&grammar, &model, &ends) {
            return Ok(Some(compiled));
        }
        let compile = move || Ok(grammars.compile(&grammar, &model, &ends)?);
        let compiled = self.grammar_work.run(scope, compile).await;
        Ok(Some(compiled.map_err(|error| error.with_grammar_field(field))?))
    }

    /// Runs work over so many bytes of text for a key: outside the async runtime, and in the background where the text is long.
    pub async fn over_text<R: Send + 'static>(
        &self,
        scope: &str,
        bytes: usize,
        work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
    ) -> Result<R, ApiError> {
        match bytes < LONG_TEXT {
            true => blocking(work).await,
            false => self.text_work.run(scope, work).await,
        }
    }

    /// Returns the client that requests in a scope are of.
    pub fn client(&self, scope: &str) -> Client {
        self.credentials.current().keys.share(scope).or(self.per_key).client(scope)
    }

    /// Returns how many choices of requests in a scope may run and wait at once.
    pub fn max_choices(&self, scope: &str) -> usize {
        let Client { most_running, most_waiting, .. } = self.client(scope);
        let of_key = most_waiting.map(|waiting| waiting.saturating_add(most_running.unwrap_or(usize::MAX)));
        of_key.map_or(self.limits.max_choices, |most| most.min(self.limits.max_choices))
    }
}

/// Routes of one group.
pub(crate) type Routes = Router<Arc<App>>;
