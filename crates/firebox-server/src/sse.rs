//! Responses as server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse as _, Response};
use futures_core::Stream;
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::error::ApiError;

/// Ends every stream of OpenAI's chat and text completions.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// A response that takes longer starts as a stream, and later errors are events.
const STATUS_DEADLINE: Duration = Duration::from_secs(1);
/// Interval of comments that keep a silent connection open. Proxies close one after about a minute.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// A comment, which clients skip.
const KEEP_ALIVE_COMMENT: &[u8] = b": waiting\n\n";

type ResponseResult = Result<Response, ApiError>;

/// Responds with a stream whose items are whole events. Dropping the response drops the stream.
pub(crate) fn response(stream: impl Stream<Item = Result<Vec<u8>, Infallible>> + Send + 'static) -> Response {
    sent(Body::from_stream(KeepAlive::new(stream, KEEP_ALIVE_INTERVAL)))
}

/// Responds to a request that may have asked for a stream. If the response takes longer than `STATUS_DEADLINE`,
/// the headers are sent at once; an error after that is an event, followed by `last`.
pub(crate) async fn respond(
    streams: bool,
    last: &'static str,
    answer: impl Future<Output = ResponseResult> + Send + 'static,
) -> ResponseResult {
    if !streams {
        return answer.await;
    }
    let mut answer = Box::pin(answer);
    let begun = timeout(STATUS_DEADLINE, &mut answer).await;
    match begun {
        Ok(answered) => answered,
        Err(_) => Ok(sent(Body::from_stream(KeepAlive::new(
            DelayedResponse::Pending { answer, last },
            KEEP_ALIVE_INTERVAL,
        )))),
    }
}

fn sent(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        // Keeps proxies from buffering the events.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, body).into_response()
}

/// The body of a response whose headers were sent early.
enum DelayedResponse {
    Pending { answer: Pin<Box<dyn Future<Output = ResponseResult> + Send>>, last: &'static str },
    Streaming(BodyDataStream),
}

impl Stream for DelayedResponse {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match &mut *self {
                Self::Streaming(events) => return Pin::new(events).poll_next(context),
                Self::Pending { answer, last } => {
                    let body = match ready!(answer.as_mut().poll(context)) {
                        Ok(response) => response.into_body(),
                        Err(error) => Body::from(error.event() + *last),
                    };
                    *self = Self::Streaming(body.into_data_stream());
                }
            }
        }
    }
}

/// A stream that emits a comment after a time of silence.
struct KeepAlive<S> {
    stream: Pin<Box<S>>,
    interval: Duration,
    timer: Pin<Box<Sleep>>,
}

impl<S> KeepAlive<S> {
    fn new(stream: S, interval: Duration) -> Self {
        Self { stream: Box::pin(stream), interval, timer: Box::pin(sleep(interval)) }
    }
}

impl<S, T, E> Stream for KeepAlive<S>
where
    S: Stream<Item = Result<T, E>>,
    T: From<&'static [u8]>,
{
    type Item = Result<T, E>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { stream, interval, timer } = &mut *self;
        let next = match stream.as_mut().poll_next(context) {
            Poll::Pending => {
                ready!(timer.as_mut().poll(context));
                Some(Ok(KEEP_ALIVE_COMMENT.into()))
            }
            Poll::Ready(next) => next,
        };
        timer.as_mut().reset(Instant::now() + *interval);
        Poll::Ready(next)
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, poll_fn, ready};

    use axum::body::to_bytes;
    use axum::http::StatusCode;
    use tokio::sync::oneshot;

    use super::*;

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    #[test]
    fn early_errors_have_a_status_and_late_errors_an_event() {
        run(async {
            let failed = || ApiError::conflict("busy");
            let at_once = respond(true, DONE, ready(Err::<Response, _>(failed()))).await;
            assert_eq!(at_once.unwrap_err(), failed());
            let (fail, failing) = oneshot::channel::<()>();
            let later = async move {
                let _ = failing.await;
                Err::<Response, _>(failed())
            };
            let answer = respond(true, DONE, later).await.unwrap();
            assert_eq!(answer.status(), StatusCode::OK);
            drop(fail);
            let events = to_bytes(answer.into_body(), 1 << 10).await.unwrap();
            assert_eq!(events, failed().event() + DONE);
        });
    }

    #[test]
    fn comments_are_sent_repeatedly() {
        struct Nothing;
        impl Stream for Nothing {
            type Item = Result<Vec<u8>, Infallible>;
            fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
                Poll::Pending
            }
        }
        run(async {
            let mut stream = KeepAlive::new(Nothing, Duration::from_millis(5));
            for _ in 0..3 {
                let said = poll_fn(|context| Pin::new(&mut stream).poll_next(context)).await;
                assert_eq!(said, Some(Ok(KEEP_ALIVE_COMMENT.to_vec())));
            }
            let late = DelayedResponse::Pending { answer: Box::pin(pending()), last: DONE };
            let mut stream = KeepAlive::new(late, Duration::from_millis(5));
            let said = poll_fn(|context| Pin::new(&mut stream).poll_next(context)).await;
            assert_eq!(said.unwrap().unwrap(), KEEP_ALIVE_COMMENT);
        });
    }
}
