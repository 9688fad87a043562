//! Checks that any body at any route is answered or refused with a reason, and never causes a server error.

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Method, Request, StatusCode};
use serde_json::Value;
use tokio::runtime::Runtime;
use tower::ServiceExt as _;

/// The routes. Those with an `{id}` are requested for a new session.
const ROUTES: [&str; 14] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/tokenize",
    "/detokenize",
    "/v1/heads",
    "/v1/sessions",
    "/v1/sessions/{id}/say",
    "/v1/sessions/{id}/fork",
    "/v1/sessions/{id}/rewind",
    "/v1/sessions/{id}/head",
    "/v1/sessions/{id}/facts",
];

/// The most bytes of a response from a model with a short context.
const MAX_BYTES: usize = 8 << 20;

/// Checks an input whose first byte selects the route; the rest is the body. Returns whether it succeeded.
pub fn check(program: &Router, runtime: &Runtime, input: &[u8]) -> bool {
    let [route, body @ ..] = input else { return false };
    let route = ROUTES[usize::from(*route) % ROUTES.len()];
    let ask = |method: Method, path: &str, body: &[u8]| {
        runtime.block_on(asked(program.clone(), method, path, body.to_vec()))
    };
    let (status, said) = if let Some((before, behind)) = route.split_once("{id}") {
        let (status, begun) = ask(Method::POST, "/v1/sessions", br#"{"model": "small"}"#);
        assert!(status.is_success(), "{status}: {}", String::from_utf8_lossy(&begun));
        let begun: Value = serde_json::from_slice(&begun).expect("a session is JSON");
        let session = format!("{before}{}", begun["id"].as_str().expect("a session has an id"));
        let answer = ask(Method::POST, &format!("{session}{behind}"), body);
        let (status, _) = ask(Method::DELETE, &session, b"");
        assert!(status.is_success(), "{status}");
        answer
    } else {
        ask(Method::POST, route, body)
    };
    if status.is_success() {
        if route == "/v1/sessions"
            && let Ok(begun) = serde_json::from_slice::<Value>(&said)
            && let Some(id) = begun["id"].as_str()
        {
            ask(Method::DELETE, &format!("{route}/{id}"), b"");
        }
        return true;
    }
    let late = [StatusCode::SERVICE_UNAVAILABLE, StatusCode::GATEWAY_TIMEOUT];
    assert!(
        status.is_client_error() || late.contains(&status),
        "{status}: {}",
        String::from_utf8_lossy(&said)
    );
    let said: Value = serde_json::from_slice(&said).expect("an error is JSON");
    assert!(said["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{said}");
    false
}

async fn asked(program: Router, method: Method, path: &str, body: Vec<u8>) -> (StatusCode, Bytes) {
    let request = Request::builder().method(method).uri(path).header("host", "localhost");
    let request =
        request.header("content-type", "application/json").body(Body::from(body)).expect("a request");
    let answer = match program.oneshot(request).await {
        Ok(answer) => answer,
        Err(never) => match never {},
    };
    let status = answer.status();
    (status, to_bytes(answer.into_body(), MAX_BYTES).await.expect("an answer that ends"))
}
