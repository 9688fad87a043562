//! What every request passes before it is answered, and every answer before it is sent.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use crate::Neighbours;
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

/// Seconds that a browser may remember what pages of an origin may ask.
const REMEMBERED: &str = "600";

/// Refuses pages of other sites, which a browser lets talk to this machine. A page has no business here whose origin is
/// neither the server itself nor one that was allowed, nor one that had its own name changed into this machine's address.
pub(crate) async fn neighbours(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let allowed = allowed_origin(request.headers(), &app.neighbours);
    let only_asks_whether = is_preflight(request.method(), request.headers());
    let mut response = match expect_neighbour(request.headers(), authority, app.is_local, &app.neighbours) {
        Ok(()) if allowed.is_some() && only_asks_whether => preflight(request.headers()),
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
    if let Some(origin) = allowed {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("retry-after"));
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    response
}

/// The origin of a page, where that is one of those that were allowed.
fn allowed_origin(headers: &HeaderMap, neighbours: &Neighbours) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    origin.to_str().is_ok_and(|origin| neighbours.has_origin(origin)).then(|| origin.clone())
}

/// Whether a browser asks what a page may ask. It sends no key along.
fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    *method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// What a browser asks beside, before it lets a page of the open web reach into a network that is private, and what it is
/// answered.
const ASKS_FOR_PRIVATE: &str = "access-control-request-private-network";
const ALLOWS_PRIVATE: &str = "access-control-allow-private-network";

/// All that there is may be asked, with whatever headers: clients of OpenAI's API have some of their own.
fn preflight(headers: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let allows = response.headers_mut();
    allows.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE"));
    if let Some(wanted) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        allows.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
    }
    if headers.contains_key(ASKS_FOR_PRIVATE) {
        allows.insert(ALLOWS_PRIVATE, HeaderValue::from_static("true"));
    }
    allows.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(REMEMBERED));
    response
}

/// Who asks by HTTP/2 says in the address which host is meant, and in no header.
fn expect_neighbour(
    headers: &HeaderMap,
    authority: Option<&str>,
    is_local: bool,
    neighbours: &Neighbours,
) -> Result<(), ApiError> {
    let named = headers.get(header::HOST).map(|host| host.to_str().unwrap_or_default()).or(authority);
    let host = named.unwrap_or_default();
    if let Some(origin) = headers.get(header::ORIGIN) {
        let of = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, of)| of);
        let is_own = of.is_some_and(|of| of.eq_ignore_ascii_case(host));
        if !is_own && allowed_origin(headers, neighbours).is_none() {
            return Err(ApiError::stranger(
                "pages of other sites may not use this server; --allow-origin ORIGIN lets those of one in",
            ));
        }
    }
    let is_named = match headers.get(header::HOST) {
        // One that is no text is a name as well, and nobody's here.
        Some(host) => !host.is_empty(),
        None => authority.is_some(),
    };
    if is_local && is_named && !neighbours.has_host(host) {
        return Err(ApiError::stranger(
            "this server is only for the machine it runs on; use localhost, or start it with --allow-host HOST",
        ));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn expect_neighbour(
        headers: &HeaderMap,
        authority: Option<&str>,
        is_local: bool,
    ) -> Result<(), ApiError> {
        super::expect_neighbour(headers, authority, is_local, &Neighbours::default())
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

    #[test]
    fn a_private_network_is_opened_to_who_asks_for_it() {
        let mut headers = HeaderMap::new();
        assert_eq!(preflight(&headers).headers().get(ALLOWS_PRIVATE), None);
        headers.insert(ASKS_FOR_PRIVATE, HeaderValue::from_static("true"));
        assert_eq!(preflight(&headers).headers()[ALLOWS_PRIVATE], "true");
    }

    #[test]
    fn an_origin_that_is_allowed_opens_no_other_name() {
        let neighbours = Neighbours::new(["https://app.example".to_owned()], None).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(header::ORIGIN, HeaderValue::from_static("https://app.example"));
        headers.insert(header::HOST, HeaderValue::from_static("localhost:8080"));
        assert!(super::expect_neighbour(&headers, None, true, &neighbours).is_ok());
        headers.insert(header::HOST, HeaderValue::from_static("evil.example"));
        assert!(super::expect_neighbour(&headers, None, true, &neighbours).is_err());
        headers.insert(header::ORIGIN, HeaderValue::from_static("null"));
        assert!(super::expect_neighbour(&headers, None, false, &neighbours).is_err());
    }
}
