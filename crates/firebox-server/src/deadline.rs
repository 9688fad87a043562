//! How long a request may take as a whole.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use hyper::body::Frame;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use crate::app::App;
use crate::error::ApiError;
use crate::events::DONE;

/// Ends requests that take longer than they may: with an error where nothing was answered yet, and events with a last one
/// that says so. What answers them is dropped, which gives its place to others.
pub(crate) async fn keep(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let Some(most) = app.limits.request_time else { return next.run(request).await };
    let end = Instant::now() + most;
    let last = if request.uri().path() == "/v1/responses" { "" } else { DONE };
    let Ok(response) = timeout_at(end, next.run(request)).await else {
        return ApiError::late(most).into_response();
    };
    let streams = |response: &Response| {
        let kind = response.headers().get(header::CONTENT_TYPE);
        kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
    };
    // Anything else is there as a whole.
    if !streams(&response) {
        return response;
    }
    response.map(|body| Body::new(Timed { body: Some(body), end: Box::pin(sleep_until(end)), most, last }))
}

/// Events until the time is over.
struct Timed {
    body: Option<Body>,
    end: Pin<Box<Sleep>>,
    most: Duration,
    /// What streams of this kind end with.
    last: &'static str,
}

impl HttpBody for Timed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body: Some(body), end, .. } = &mut *self else { return Poll::Ready(None) };
        // First, because there may always be something to say.
        if end.as_mut().poll(context).is_pending() {
            return Pin::new(body).poll_frame(context);
        }
        self.body = None;
        let told = ApiError::late(self.most).event() + self.last;
        Poll::Ready(Some(Ok(Frame::data(told.into()))))
    }
}
