//! What every request passes before it is answered, and every answer before it is sent.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use crate::app::App;
use crate::asked::Caller;
use crate::error::ApiError;

/// Lets those in who have a key.
pub(crate) async fn admit(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    match app.keys.scope(text(request.headers(), &header::AUTHORIZATION)) {
        Some(scope) => {
            request.extensions_mut().insert(Caller(scope));
            next.run(request).await
        }
        None => ApiError::key().into_response(),
    }
}

/// Refuses pages of other sites, which a browser lets talk to this machine. A page has no business here whose origin is
/// not the server itself, nor one that had its own name changed into this machine's address.
pub(crate) async fn neighbours(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let mut response = match expect_neighbour(request.headers(), authority, app.is_local) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    if response.status() == StatusCode::METHOD_NOT_ALLOWED {
        response = explained(&path, &response);
    }
    // Nothing here is for the next one to see, unless it says so itself.
    let headers = response.headers_mut();
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Who asks by HTTP/2 says in the address which host is meant, and in no header.
fn expect_neighbour(headers: &HeaderMap, authority: Option<&str>, is_local: bool) -> Result<(), ApiError> {
    let named = headers.get(header::HOST).map(|host| host.to_str().unwrap_or_default()).or(authority);
    let host = named.unwrap_or_default();
    if let Some(origin) = headers.get(header::ORIGIN) {
        let of = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, of)| of);
        if !of.is_some_and(|of| of.eq_ignore_ascii_case(host)) {
            return Err(ApiError::stranger("pages of other sites may not use this server"));
        }
    }
    let is_named = match headers.get(header::HOST) {
        // One that is no text is a name as well, and nobody's here.
        Some(host) => !host.is_empty(),
        None => authority.is_some(),
    };
    if is_local && is_named && !names_this_machine(host) {
        return Err(ApiError::stranger("this server is only for the machine it runs on; use localhost"));
    }
    Ok(())
}

/// An answer to a request by a method that its path does not know.
fn explained(path: &str, response: &Response) -> Response {
    let allowed = text(response.headers(), &header::ALLOW).unwrap_or_default();
    let mut explained = ApiError::not_allowed(&format!("{path} is there for {allowed} only")).into_response();
    if let Some(allow) = response.headers().get(header::ALLOW) {
        explained.headers_mut().insert(header::ALLOW, allow.clone());
    }
    explained
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Whether a host, with a port or without, is this machine by a name that nobody else can have.
fn names_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((inner, _)) => inner,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
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

    #[test]
    fn a_host_that_is_no_text_is_nobody() {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_bytes(b"evil\xff").unwrap());
        assert!(expect_neighbour(&headers, None, true).is_err());
        headers.insert(header::ORIGIN, HeaderValue::from_bytes(b"http://evil\xff").unwrap());
        assert!(expect_neighbour(&headers, None, true).is_err());
        assert!(expect_neighbour(&HeaderMap::new(), None, true).is_ok());
    }

    #[test]
    fn where_no_header_names_the_host_the_address_does() {
        let (here, elsewhere) = (Some("localhost:8080"), Some("evil.example:8080"));
        let mut headers = HeaderMap::new();
        assert!(expect_neighbour(&headers, here, true).is_ok());
        assert!(expect_neighbour(&headers, elsewhere, true).is_err());
        assert!(expect_neighbour(&headers, elsewhere, false).is_ok());
        headers.insert(header::ORIGIN, HeaderValue::from_static("https://localhost:8080"));
        assert!(expect_neighbour(&headers, here, true).is_ok(), "the console is of this server");
        assert!(expect_neighbour(&headers, elsewhere, false).is_err());
        headers.insert(header::HOST, HeaderValue::from_static("evil.example"));
        assert!(expect_neighbour(&headers, here, true).is_err());
    }
}
