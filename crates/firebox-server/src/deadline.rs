//! The time limit of a whole request.

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
use crate::sse::DONE;

/// Ends requests that exceed the limit: with an error before the response started, else with a last event.
/// Dropping the handler cancels generation.
pub(crate) async fn enforce(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let Some(most) = app.limits.request_timeout else { return next.run(request).await };
    let end = Instant::now() + most;
    let last = if request.uri().path() == "/v1/responses" { "" } else { DONE };
    let Ok(response) = timeout_at(end, next.run(request)).await else {
        return ApiError::deadline_exceeded(most).into_response();
    };
    let streams = |response: &Response| {
        let kind = response.headers().get(header::CONTENT_TYPE);
        kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
    };
    // Other responses are complete already, or their bodies are written as they are computed.
    if response.body().size_hint().exact().is_some() {
        return response;
    }
    let last = streams(&response).then_some(last);
    response.map(|body| {
        Body::new(BodyWithDeadline { body: Some(body), end: Box::pin(sleep_until(end)), most, last })
    })
}

/// A body that ends at a deadline.
struct BodyWithDeadline {
    body: Option<Body>,
    end: Pin<Box<Sleep>>,
    most: Duration,
    /// The text that ends streams of events; other bodies break off.
    last: Option<&'static str>,
}

impl HttpBody for BodyWithDeadline {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body: Some(body), end, .. } = &mut *self else { return Poll::Ready(None) };
        // Checked first, as the stream may always have data.
        if end.as_mut().poll(context).is_pending() {
            return Pin::new(body).poll_frame(context);
        }
        self.body = None;
        let exceeded = ApiError::deadline_exceeded(self.most);
        Poll::Ready(Some(match self.last {
            Some(last) => Ok(Frame::data((exceeded.event() + last).into())),
            None => Err(axum::Error::new(std::io::Error::other(exceeded.message()))),
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// Polls a body that always has data, once after the other.
    fn frames(end: Instant) -> [Option<String>; 2] {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _inside = runtime.enter();
        let mut body = BodyWithDeadline {
            body: Some(Body::from("data: piece\n\n")),
            end: Box::pin(sleep_until(end)),
            most: Duration::from_secs(3),
            last: Some(DONE),
        };
        let mut context = Context::from_waker(Waker::noop());
        [(), ()].map(|()| match Pin::new(&mut body).poll_frame(&mut context) {
            Poll::Ready(frame) => {
                frame.map(|frame| String::from_utf8(frame.unwrap().into_data().unwrap().into()).unwrap())
            }
            Poll::Pending => panic!("there is data"),
        })
    }

    #[test]
    fn a_stream_ends_with_an_error_at_its_deadline() {
        let now = Instant::now();
        let [first, second] = frames(now + Duration::from_secs(3600));
        assert_eq!((first.as_deref(), second), (Some("data: piece\n\n"), None));
        let [first, second] = frames(now);
        let told = first.unwrap();
        assert!(told.contains("longer than the 3 s") && told.ends_with(DONE), "{told}");
        assert_eq!(second, None);
    }
}
