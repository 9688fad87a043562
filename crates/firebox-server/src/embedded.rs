use std::sync::Arc;

use axum::Router;
use firebox_runtime::Model;
use firebox_runtime::engine::Engine;
use firebox_runtime::schedule::AdmissionConfig;
use firebox_runtime::telemetry::Telemetry;
use tokio::sync::Semaphore;

use crate::app::{App, router};
use crate::catalog::Catalog;
use crate::connection::Limits;
use crate::engine_state::Watching;
use crate::sessions::Sessions;
use crate::{Offer, ServerConfig, ServerError, Stop};

/// What the memory is called that models share.
const SHARED: &str = "all models";

/// What a [`Server`](crate::Server) answers, as part of another axum program, which listens itself.
///
/// ```no_run
/// use axum::Router;
/// use axum::routing::get;
/// use firebox_runtime::{Model, device};
/// use firebox_server::{Embedded, ServerConfig};
///
/// let model = Model::open("models/pocket", &device("cpu")?)?;
/// let firebox = Embedded::new(ServerConfig::default(), vec![("pocket".into(), model)])?;
/// let program: Router = Router::new().route("/hello", get(|| async { "hello" })).merge(firebox.router());
/// # Ok::<(), firebox_server::ServerError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Embedded {
    app: Arc<App>,
}

impl Embedded {
    /// Takes models in by the names they are asked for, and starts the engine that answers for them.
    ///
    /// Connections are the other program's, and with them how many there are, how long they may take and what becomes of
    /// them in the end: [`most_clients`](ServerConfig::most_clients), [`patience`](ServerConfig::patience) and
    /// [`grace`](ServerConfig::grace) say nothing here. [`address`](ServerConfig::address) is not listened at, but tells
    /// whether only this machine is: then requests to any name are refused but its own and those that
    /// [`neighbours`](ServerConfig::neighbours) have.
    pub fn new(config: ServerConfig, models: Vec<(String, Model)>) -> Result<Self, ServerError> {
        Self::offering(config, models.into_iter().map(|(name, model)| Offer::new(name, model)).collect())
    }

    /// The same for models on terms of their own, some of which may be opened later.
    pub fn offering(config: ServerConfig, offers: Vec<Offer>) -> Result<Self, ServerError> {
        let AdmissionConfig { most_running, most_waiting, .. } = config.host.admission;
        let (engine, telemetry) = (Engine::start(config.host)?, Telemetry::default());
        if let Some(memory) = &config.memory {
            telemetry.watch_budget(SHARED, memory);
        }
        let limits = Limits {
            body: config.largest_body,
            head_time: config.patience,
            write_time: config.patience,
            request_time: config.request_time,
            answers: most_running.max(1).saturating_add(most_waiting),
            ..Limits::default()
        };
        let app = App {
            catalog: Catalog::new(offers, &engine, &telemetry)?,
            engine,
            telemetry,
            keys: config.keys,
            limits,
            grammars: Arc::new(Semaphore::new(1)),
            embedding: Arc::new(Semaphore::new(1)),
            sessions: Sessions::new(config.sessions),
            watching: Watching::default(),
            stop: Stop::new(),
            began: crate::now(),
            is_local: config.address.ip().is_loopback(),
            neighbours: config.neighbours,
        };
        Ok(Self { app: Arc::new(app) })
    }

    /// Its routes, the console at `/` among them. What no route is for is answered as the API answers it; so the program
    /// that merges them has no fallback of its own.
    ///
    /// They are answered on whatever tokio runtime has timers. The engine has threads of its own, for as long as there is
    /// a router or this.
    pub fn router(&self) -> Router {
        router(self.app.clone())
    }

    /// What can be asked for: models, and their heads as `model:head`.
    pub fn names(&self) -> Vec<String> {
        self.app.catalog.names()
    }

    /// What ends the streams that would go on for as long as their clients listen, and has `/ready` refuse.
    pub fn stop(&self) -> Stop {
        self.app.stop.clone()
    }

    /// The engine that answers, for a program that asks it as well, or tells its host how hot it is. It goes on for as long as
    /// anybody has it.
    pub fn engine(&self) -> Engine {
        self.app.engine.clone()
    }

    pub(crate) fn app(&self) -> Arc<App> {
        self.app.clone()
    }
}

#[cfg(test)]
#[path = "../../../fuzz/checks/http_body.rs"]
mod check;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use axum::body::{Body, to_bytes};
    use axum::http::{Request, StatusCode};
    use axum::routing::get;
    use firebox_runtime::device;
    use tower::ServiceExt as _;

    use super::*;
    use crate::Keys;

    fn embedded(config: ServerConfig) -> Embedded {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
        let model = Model::open(root, &device("cpu").unwrap()).unwrap();
        Embedded::new(config, vec![("small".into(), model)]).unwrap()
    }

    #[test]
    fn the_fuzzing_corpus() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let model = root.join("tests/fixtures/gguf/llama/model.gguf");
        let model = Model::open(model, &device("cpu").unwrap()).unwrap();
        let request_time = Some(std::time::Duration::from_secs(60));
        let config = ServerConfig { request_time, ..ServerConfig::default() };
        let program = Embedded::new(config, vec![("small".into(), model)]).unwrap().router();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let bodies = std::fs::read_dir(root.join("fuzz/corpus/http_body")).unwrap();
        let answered = bodies
            .filter(|body| {
                let body = std::fs::read(body.as_ref().unwrap().path()).unwrap();
                check::check(&program, &runtime, &body)
            })
            .count();
        assert!(answered > 0);
    }

    /// What a program says at a path, to who names a host and may have a key.
    fn said(program: &Router, path: &str, host: &str, key: Option<&str>) -> (StatusCode, String) {
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
    fn a_program_has_its_own_routes_beside_these() {
        let keys = Keys::new(["secret".to_owned()]).unwrap();
        let firebox = embedded(ServerConfig { keys, ..ServerConfig::default() });
        let own = Router::new().route("/hello", get(|| async { "hello" }));
        let program = own.merge(firebox.router());
        assert_eq!(firebox.names(), ["small"]);
        assert_eq!(said(&program, "/hello", "localhost", None), (StatusCode::OK, "hello".into()));
        assert_eq!(said(&program, "/v1/models", "localhost", None).0, StatusCode::UNAUTHORIZED);
        let (status, models) = said(&program, "/v1/models", "localhost", Some("secret"));
        assert!(status == StatusCode::OK && models.contains("\"small\""), "{models}");
        let (status, error) = said(&program, "/nowhere", "localhost", None);
        assert!(status == StatusCode::NOT_FOUND && error.contains("there is nothing at /nowhere"), "{error}");

        let stop = firebox.stop();
        drop(firebox);
        assert_eq!(said(&program, "/ready", "localhost", None).0, StatusCode::OK);
        stop.stop();
        assert_eq!(said(&program, "/ready", "localhost", None).0, StatusCode::SERVICE_UNAVAILABLE);
    }

    #[test]
    fn the_address_says_by_which_names_it_may_be_asked() {
        for (address, expected) in [("127.0.0.1:80", StatusCode::FORBIDDEN), ("0.0.0.0:80", StatusCode::OK)] {
            let config = ServerConfig { address: address.parse().unwrap(), ..ServerConfig::default() };
            let program = Router::new().route("/hello", get(|| async {})).merge(embedded(config).router());
            assert_eq!(said(&program, "/health", "example.org", None).0, expected, "{address}");
            // What is the program's own is its own matter.
            assert_eq!(said(&program, "/hello", "example.org", None).0, StatusCode::OK);
        }
    }
}
