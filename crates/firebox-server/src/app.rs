use firebox_runtime::engine::Engine;
use firebox_runtime::telemetry::{self, Telemetry};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

use crate::catalog::Catalog;
use crate::error::ApiError;
use crate::http::{Method, Request, Response, Status};
use crate::{Keys, chat, completions, tokens, vectors};

/// All that requests need.
#[derive(Debug)]
pub(crate) struct App {
    pub catalog: Catalog,
    pub engine: Engine,
    pub telemetry: Telemetry,
    pub keys: Keys,
    /// Vectors are computed beside the engine, for one request at a time.
    pub embedding: Semaphore,
    pub stopping: watch::Receiver<bool>,
    /// When it began.
    pub began: u64,
    /// Whether only this machine is listened to.
    pub is_local: bool,
}

impl App {
    /// What is answered to a request, whatever it is.
    pub async fn answer(&self, request: Request) -> Response {
        match self.route(&request).await {
            Ok(response) => response,
            Err(error) => {
                let response = error.response();
                match (error.status, allowed(&request.path)) {
                    (Status::NOT_ALLOWED, Some(allowed)) => response.with_header("allow", allowed),
                    _ => response,
                }
            }
        }
    }

    async fn route(&self, request: &Request) -> Result<Response, ApiError> {
        self.expect_neighbour(request)?;
        let path = request.path.trim_end_matches('/');
        match allowed(path) {
            None => return Err(ApiError::no_page(path)),
            Some("POST") if request.method != Method::Post => {
                return Err(ApiError::not_allowed("send this as POST"));
            }
            Some("GET, HEAD") if !matches!(request.method, Method::Get | Method::Head) => {
                return Err(ApiError::not_allowed("ask for this by GET"));
            }
            Some(_) => {}
        }
        match path {
            "/health" => return Ok(Response::json(Status::OK, &json!({ "status": "ok" }))),
            "/ready" if *self.stopping.borrow() => return Err(ApiError::over()),
            "/ready" => return Ok(Response::json(Status::OK, &json!({ "status": "ready" }))),
            _ => {}
        }
        let scope = self.keys.scope(request.header("authorization")).ok_or_else(ApiError::key)?;
        if request.method != Method::Post {
            return self.look(path).await;
        }
        let body: Value = serde_json::from_slice(&request.body)
            .map_err(|error| ApiError::invalid(format!("the body is no JSON: {error}")))?;
        match path {
            "/v1/chat/completions" => chat::complete(self, &body, &scope).await,
            "/v1/completions" => completions::complete(self, &body, &scope).await,
            "/v1/embeddings" => vectors::embed(self, &body).await,
            "/v1/rerank" | "/rerank" => vectors::rerank(self, &body).await,
            "/tokenize" => tokens::tokenize(self, &body).await,
            _ => tokens::detokenize(self, &body).await,
        }
    }

    async fn look(&self, path: &str) -> Result<Response, ApiError> {
        if path == "/metrics" {
            return Ok(Response::text(
                telemetry::CONTENT_TYPE,
                telemetry::render(&self.telemetry.snapshot()),
            ));
        }
        if let Some(name) = path.strip_prefix("/v1/models/") {
            return Ok(Response::json(Status::OK, &self.catalog.find(Some(name))?.value(self.began)));
        }
        let mut models = Vec::new();
        for name in self.catalog.names() {
            // A head may have gone since it was listed.
            if let Ok(chosen) = self.catalog.find(Some(&name)) {
                models.push(chosen.value(self.began));
            }
        }
        Ok(Response::json(Status::OK, &json!({ "object": "list", "data": models })))
    }

    /// Refuses pages of other sites, which a browser lets talk to this machine. A page has no business here whose origin
    /// is not the server itself, nor one that had its own name changed into this machine's address.
    fn expect_neighbour(&self, request: &Request) -> Result<(), ApiError> {
        let host = request.header("host").unwrap_or_default();
        if let Some(origin) = request.header("origin") {
            let of = origin.split_once("://").map(|(_, of)| of);
            if !of.is_some_and(|of| of.eq_ignore_ascii_case(host)) {
                return Err(ApiError::stranger("pages of other sites may not use this server"));
            }
        }
        if self.is_local && !host.is_empty() && !names_this_machine(host) {
            return Err(ApiError::stranger("this server is only for the machine it runs on; use localhost"));
        }
        Ok(())
    }
}

/// How a path may be asked for, if it is one.
fn allowed(path: &str) -> Option<&'static str> {
    match path.trim_end_matches('/') {
        "/health" | "/ready" | "/metrics" | "/v1/models" => Some("GET, HEAD"),
        "/v1/chat/completions"
        | "/v1/completions"
        | "/v1/embeddings"
        | "/v1/rerank"
        | "/rerank"
        | "/tokenize"
        | "/detokenize" => Some("POST"),
        path if path.starts_with("/v1/models/") => Some("GET, HEAD"),
        _ => None,
    }
}

/// Whether a host, with a port or without, is this machine by a name that nobody else can have.
fn names_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((inner, _)) => inner,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

/// Does what takes long on a thread of its own.
pub(crate) async fn blocking<R: Send + 'static>(
    act: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    match tokio::task::spawn_blocking(act).await {
        Ok(done) => done,
        Err(_) => Err(ApiError::internal("the request could not be worked on; the server's log says more")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_nobody_can_take_are_this_machine() {
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1:8080", "[::1]:80", "192.168.0.1", "[::1]"] {
            assert!(names_this_machine(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", ":80"] {
            assert!(!names_this_machine(host), "{host}");
        }
    }
}
