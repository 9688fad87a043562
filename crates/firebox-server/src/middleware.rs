//! Middleware of all routes: keys, origins and common headers.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use crate::allowed_origins::AllowedOrigins;
use crate::api_keys::Identity;
use crate::app::App;
use crate::error::ApiError;
use crate::extract::{Admin, Caller, IgnoredFields};

/// Rejects requests without a valid key.
pub(crate) async fn authenticate(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let credentials = app.credentials.current();
    match credentials.keys.identify(text(request.headers(), &header::AUTHORIZATION)) {
        Some(Identity { scope, is_admin }) => {
            request.extensions_mut().insert(Caller(scope));
            // Without keys, all that reach this machine alone are its users.
            if is_admin || (credentials.keys.is_open() && app.is_local) {
                request.extensions_mut().insert(Admin);
            }
            next.run(request).await
        }
        None => ApiError::invalid_key().into_response(),
    }
}

/// The header that names the fields of a request that had no effect.
const IGNORED: HeaderName = HeaderName::from_static("x-firebox-ignored");

/// Names the fields of a request that had no effect.
pub(crate) async fn name_ignored_fields(mut request: Request, next: Next) -> Response {
    let ignored = IgnoredFields::default();
    request.extensions_mut().insert(ignored.clone());
    let mut response = next.run(request).await;
    if let Some(Ok(names)) = ignored.0.get().map(|names| HeaderValue::from_str(names)) {
        response.headers_mut().insert(IGNORED, names);
    }
    response
}

/// Seconds that a browser may cache a preflight response.
const PREFLIGHT_MAX_AGE: &str = "600";

/// Rejects requests from pages of other sites, which browsers would send to this machine. Accepts the server's
/// own origin and the allowed ones, and rejects host names that a DNS rebinding attack could point to this
/// machine.
pub(crate) async fn check_origin(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let allowed = allowed_origin(request.headers(), &app.allowed_origins);
    let is_preflight_request = is_preflight(request.method(), request.headers());
    let mut response =
        match check_origin_and_host(request.headers(), authority, app.checks_hosts(), &app.allowed_origins) {
            Ok(()) if allowed.is_some() && is_preflight_request => preflight(request.headers()),
            Ok(()) => next.run(request).await,
            Err(error) => error.into_response(),
        };
    if response.status() == StatusCode::METHOD_NOT_ALLOWED {
        response = method_not_allowed(&path, &response);
    }
    // Nothing may be cached unless a route allows it.
    let headers = response.headers_mut();
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(origin) = allowed {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static("retry-after, x-firebox-ignored"),
        );
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    response
}

/// Returns the request's origin if it is an allowed one.
fn allowed_origin(headers: &HeaderMap, allowed_origins: &AllowedOrigins) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    origin.to_str().is_ok_and(|origin| allowed_origins.has_origin(origin)).then(|| origin.clone())
}

/// Returns true for a CORS preflight request, which has no key.
fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    *method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// Headers by which a browser asks whether a public page may reach a private network, and the server's answer.
const REQUEST_PRIVATE_NETWORK: &str = "access-control-request-private-network";
const ALLOW_PRIVATE_NETWORK: &str = "access-control-allow-private-network";

/// Answers a preflight request. All headers are allowed, as clients of OpenAI's API add their own.
fn preflight(headers: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let allows = response.headers_mut();
    allows.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE"));
    if let Some(wanted) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        allows.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
    }
    if headers.contains_key(REQUEST_PRIVATE_NETWORK) {
        allows.insert(ALLOW_PRIVATE_NETWORK, HeaderValue::from_static("true"));
    }
    allows.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_MAX_AGE));
    response
}

/// Checks the origin and the host. HTTP/2 names the host in the URI's authority and in no header.
fn check_origin_and_host(
    headers: &HeaderMap,
    authority: Option<&str>,
    checks_hosts: bool,
    allowed_origins: &AllowedOrigins,
) -> Result<(), ApiError> {
    let named = headers.get(header::HOST).map(|host| host.to_str().unwrap_or_default()).or(authority);
    let host = named.unwrap_or_default();
    if let Some(origin) = headers.get(header::ORIGIN) {
        let of = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, of)| of);
        let is_own = of.is_some_and(|of| of.eq_ignore_ascii_case(host));
        if !is_own && allowed_origin(headers, allowed_origins).is_none() {
            return Err(ApiError::forbidden(
                "pages of other sites may not use this server; allow one with --allow-origin ORIGIN",
            ));
        }
    }
    let is_named = match headers.get(header::HOST) {
        // A host that is not text is never an allowed one.
        Some(host) => !host.is_empty(),
        None => authority.is_some(),
    };
    if checks_hosts && is_named && !allowed_origins.has_host(host) {
        return Err(ApiError::forbidden(
            "this server accepts requests to this machine's own names only; use localhost or its address, or start it with \
             --allow-host HOST",
        ));
    }
    Ok(())
}

/// Explains a response to a method that the path does not support.
fn method_not_allowed(path: &str, response: &Response) -> Response {
    let allowed = text(response.headers(), &header::ALLOW).unwrap_or_default();
    let mut method_not_allowed =
        ApiError::method_not_allowed(&format!("{path} supports {allowed} only")).into_response();
    if let Some(allow) = response.headers().get(header::ALLOW) {
        method_not_allowed.headers_mut().insert(header::ALLOW, allow.clone());
    }
    method_not_allowed
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_origin_and_host(
        headers: &HeaderMap,
        authority: Option<&str>,
        is_local: bool,
    ) -> Result<(), ApiError> {
        super::check_origin_and_host(headers, authority, is_local, &AllowedOrigins::default())
    }

    #[test]
    fn a_host_that_is_not_text_is_rejected() {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_bytes(b"evil\xff").unwrap());
        assert!(check_origin_and_host(&headers, None, true).is_err());
        headers.insert(header::ORIGIN, HeaderValue::from_bytes(b"http://evil\xff").unwrap());
        assert!(check_origin_and_host(&headers, None, true).is_err());
        assert!(check_origin_and_host(&HeaderMap::new(), None, true).is_ok());
    }

    #[test]
    fn the_authority_replaces_a_missing_host_header() {
        let (here, elsewhere) = (Some("localhost:8080"), Some("evil.example:8080"));
        let mut headers = HeaderMap::new();
        assert!(check_origin_and_host(&headers, here, true).is_ok());
        assert!(check_origin_and_host(&headers, elsewhere, true).is_err());
        assert!(check_origin_and_host(&headers, elsewhere, false).is_ok());
        headers.insert(header::ORIGIN, HeaderValue::from_static("https://localhost:8080"));
        assert!(check_origin_and_host(&headers, here, true).is_ok(), "the console is of this server");
        assert!(check_origin_and_host(&headers, elsewhere, false).is_err());
        headers.insert(header::HOST, HeaderValue::from_static("evil.example"));
        assert!(check_origin_and_host(&headers, here, true).is_err());
    }

    #[test]
    fn private_network_access_is_granted_on_request() {
        let mut headers = HeaderMap::new();
        assert_eq!(preflight(&headers).headers().get(ALLOW_PRIVATE_NETWORK), None);
        headers.insert(REQUEST_PRIVATE_NETWORK, HeaderValue::from_static("true"));
        assert_eq!(preflight(&headers).headers()[ALLOW_PRIVATE_NETWORK], "true");
    }

    #[test]
    fn an_allowed_origin_allows_no_other_host() {
        let allowed_origins = AllowedOrigins::new(["https://app.example".to_owned()], None).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(header::ORIGIN, HeaderValue::from_static("https://app.example"));
        headers.insert(header::HOST, HeaderValue::from_static("localhost:8080"));
        assert!(super::check_origin_and_host(&headers, None, true, &allowed_origins).is_ok());
        headers.insert(header::HOST, HeaderValue::from_static("evil.example"));
        assert!(super::check_origin_and_host(&headers, None, true, &allowed_origins).is_err());
        headers.insert(header::ORIGIN, HeaderValue::from_static("null"));
        assert!(super::check_origin_and_host(&headers, None, false, &allowed_origins).is_err());
    }
}
