//! The server's routes within another axum program.

use std::sync::Arc;

use axum::Router;
use firebox_engine::Engine;
use firebox_runtime::Model;
use firebox_runtime::schedule::AdmissionConfig;
use firebox_runtime::telemetry::Telemetry;
use tokio::sync::Semaphore;

use crate::app::App;
use crate::background_work::BackgroundWork;
use crate::body_memory::BodyMemory;
use crate::catalog::Catalog;
use crate::connection::Limits;
use crate::credentials::{CredentialStore, Credentials};
use crate::engine_watchers::EngineWatchers;
use crate::error::ServerError;
use crate::model_spec::ModelSpec;
use crate::router::router;
use crate::server_config::ServerConfig;
use crate::sessions::registry::SessionRegistry;
use crate::stop_handle::StopHandle;

/// The name of the memory budget that models share.
const SHARED_BUDGET: &str = "all models";

/// The API of a [`Server`](crate::Server) as routes of another axum program, which accepts the connections.
///
/// ```no_run
/// use axum::Router;
/// use axum::routing::get;
/// use firebox_runtime::{Model, device};
/// use firebox_server::{EmbeddedServer, ServerConfig};
///
/// let model = Model::open("models/pocket", &device("cpu")?)?;
/// let firebox = EmbeddedServer::new(ServerConfig::default(), vec![("pocket".into(), model)])?;
/// let program: Router = Router::new().route("/hello", get(|| async { "hello" })).merge(firebox.router());
/// # Ok::<(), firebox_server::ServerError>(())
/// ```
#[derive(Debug, Clone)]
pub struct EmbeddedServer {
    app: Arc<App>,
}

impl EmbeddedServer {
    /// Creates an engine and adds the models under their names.
    ///
    /// The other program accepts the connections, so [`max_clients`](ServerConfig::max_clients),
    /// [`client_timeout`](ServerConfig::client_timeout) and [`shutdown_grace`](ServerConfig::shutdown_grace)
    /// have no effect, and neither have [`certificate`](ServerConfig::certificate) and
    /// [`credential_source`](ServerConfig::credential_source). [`address`](ServerConfig::address) only tells whether the program
    /// listens on a loopback address: if it does, or if no key is needed, requests to other host names are rejected unless
    /// [`allowed_origins`](ServerConfig::allowed_origins) allows them.
    pub fn new(config: ServerConfig, models: Vec<(String, Model)>) -> Result<Self, ServerError> {
        Self::with_models(
            config,
            models.into_iter().map(|(name, model)| ModelSpec::new(name, model)).collect(),
        )
    }

    /// Creates an engine for models with options of their own, some of which may be opened on first use.
    pub fn with_models(config: ServerConfig, models: Vec<ModelSpec>) -> Result<Self, ServerError> {
        let AdmissionConfig { most_running, most_waiting, .. } = config.engine.admission;
        let (engine, telemetry) = (Engine::start(config.engine)?, Telemetry::default());
        let body_memory =
            BodyMemory::new(config.max_bodies_bytes, config.max_body_bytes, config.memory.as_ref());
        if let Some(memory) = &config.memory {
            telemetry.watch_budget(SHARED_BUDGET, memory);
        }
        let max_choices = most_running.max(1).saturating_add(most_waiting);
        let limits = Limits {
            body: config.max_body_bytes,
            head_timeout: config.client_timeout,
            write_timeout: config.client_timeout,
            request_timeout: config.request_timeout,
            strict_fields: config.strict_fields,
            max_choices,
            ..Limits::default()
        };
        let grammar_work = BackgroundWork::new(engine.grammars().config().most_compiling);
        let app = App {
            catalog: Catalog::new(models, config.pipelines, &engine, &telemetry)?,
            engine,
            telemetry,
            credentials: CredentialStore::new(Credentials {
                keys: config.keys,
                certificate: config.certificate,
            }),
            per_key: config.per_key,
            limits,
            grammar_work,
            text_work: BackgroundWork::new(1),
            encoder_permits: Arc::new(Semaphore::new(1)),
            encoder_places: Arc::new(Semaphore::new(max_choices.min(Semaphore::MAX_PERMITS))),
            body_memory,
            sessions: SessionRegistry::new(config.sessions),
            watchers: EngineWatchers::default(),
            stop: StopHandle::new(),
            started: crate::ids::unix_time(),
            is_local: config.address.ip().is_loopback(),
            allowed_origins: config.allowed_origins,
        };
        Ok(Self { app: Arc::new(app) })
    }

    /// Returns the routes of the API and the console. They include a fallback, so the program that merges them
    /// cannot have one.
    ///
    /// They run on any tokio runtime with timers. The engine's threads run as long as a router or this value
    /// exists.
    pub fn router(&self) -> Router {
        router(self.app.clone())
    }

    /// Returns the names of the models, and of their heads as `model:head`.
    pub fn names(&self) -> Vec<String> {
        self.app.catalog.names()
    }

    /// Returns the handle that ends endless streams and makes `/ready` refuse.
    pub fn stop(&self) -> StopHandle {
        self.app.stop.clone()
    }

    /// Returns the credentials, for a program that changes them.
    pub fn credentials(&self) -> CredentialStore {
        self.app.credentials.clone()
    }

    /// Returns the engine, for a program that uses it as well or reports temperatures to it. It runs as long as
    /// a clone exists.
    pub fn engine(&self) -> Engine {
        self.app.engine.clone()
    }

    pub(crate) fn app(&self) -> Arc<App> {
        self.app.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use axum::body::{Body, to_bytes};
    use axum::http::{Request, StatusCode};
    use axum::routing::get;
    use firebox_runtime::device;
    use tower::ServiceExt as _;

    use super::*;
    use crate::api_keys::ApiKeys;

    fn embedded(config: ServerConfig) -> EmbeddedServer {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
        let model = Model::open(root, &device("cpu").unwrap()).unwrap();
        EmbeddedServer::new(config, vec![("small".into(), model)]).unwrap()
    }

    #[test]
    fn every_body_of_the_fuzzing_corpus_is_answered() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let model = root.join("tests/fixtures/gguf/llama/model.gguf");
        let model = Model::open(model, &device("cpu").unwrap()).unwrap();
        let request_timeout = Some(std::time::Duration::from_secs(60));
        let config = ServerConfig { request_timeout, ..ServerConfig::default() };
        let program = EmbeddedServer::new(config, vec![("small".into(), model)]).unwrap().router();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let bodies = std::fs::read_dir(root.join("fuzz/corpus/http_body")).unwrap();
        let answered = bodies
            .filter(|body| {
                let body = std::fs::read(body.as_ref().unwrap().path()).unwrap();
                firebox_testing::checks::http_body::check(&program, &runtime, &body)
            })
            .count();
        assert!(answered > 0);
    }

    /// Requests a path with a host and maybe a key.
    fn fetch(program: &Router, path: &str, host: &str, key: Option<&str>) -> (StatusCode, String) {
        let request = Request::get(path).header("host", host);
        let request = match key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let answer = program.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
            let status = answer.status();
            let body = to_bytes(answer.into_body(), 1 << 20).await.unwrap();
            (status, String::from_utf8(body.to_vec()).unwrap())
        })
    }

    #[test]
    fn routes_merge_with_those_of_a_program() {
        let keys = ApiKeys::new(["secret".to_owned()]).unwrap();
        let firebox = embedded(ServerConfig { keys, ..ServerConfig::default() });
        let own = Router::new().route("/hello", get(|| async { "hello" }));
        let program = own.merge(firebox.router());
        assert_eq!(firebox.names(), ["small"]);
        assert_eq!(fetch(&program, "/hello", "localhost", None), (StatusCode::OK, "hello".into()));
        assert_eq!(fetch(&program, "/v1/models", "localhost", None).0, StatusCode::UNAUTHORIZED);
        let (status, models) = fetch(&program, "/v1/models", "localhost", Some("secret"));
        assert!(status == StatusCode::OK && models.contains("\"small\""), "{models}");
        let (status, error) = fetch(&program, "/nowhere", "localhost", None);
        assert!(status == StatusCode::NOT_FOUND && error.contains("there is nothing at /nowhere"), "{error}");

        let stop = firebox.stop();
        drop(firebox);
        assert_eq!(fetch(&program, "/ready", "localhost", None).0, StatusCode::OK);
        stop.stop();
        assert_eq!(fetch(&program, "/ready", "localhost", None).0, StatusCode::SERVICE_UNAVAILABLE);
    }

    #[test]
    fn a_loopback_address_and_a_lack_of_keys_limit_host_names() {
        for (address, key, expected) in [
            ("127.0.0.1:80", Some("secret"), StatusCode::FORBIDDEN),
            ("0.0.0.0:80", Some("secret"), StatusCode::OK),
            ("0.0.0.0:80", None, StatusCode::FORBIDDEN),
        ] {
            let keys = ApiKeys::new(key.map(str::to_owned)).unwrap();
            let config = ServerConfig { address: address.parse().unwrap(), keys, ..ServerConfig::default() };
            let program = Router::new().route("/hello", get(|| async {})).merge(embedded(config).router());
            assert_eq!(fetch(&program, "/health", "example.org", None).0, expected, "{address}");
            // The checks apply to the server's own routes alone.
            assert_eq!(fetch(&program, "/hello", "example.org", None).0, StatusCode::OK);
        }
    }
}
