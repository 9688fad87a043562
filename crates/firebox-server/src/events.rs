//! Answers that come in events of server and client, as browsers call them.

use std::convert::Infallible;

use axum::body::Body;
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse as _, Response};
use futures_core::Stream;

/// What is sent: each item is one event or several, lines and all. Dropping the response drops the stream, and with it
/// whatever its events come from.
pub(crate) fn response(stream: impl Stream<Item = Result<Vec<u8>, Infallible>> + Send + 'static) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        // Proxies that collect what they pass on would defeat the purpose.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(stream)).into_response()
}
