//! Answers that come in events of server and client, as browsers call them.

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

/// What ends a stream of events in OpenAI's API, however it went.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// What goes wrong for longer than this has no status of its own any more.
const SOON: Duration = Duration::from_secs(1);
/// Proxies give up a connection on which nothing came for a minute.
const SILENCE: Duration = Duration::from_secs(15);
/// A comment, which clients pass over.
const WAITING: &[u8] = b": waiting\n\n";

type Answered = Result<Response, ApiError>;

/// What is sent: each item is one event or several, lines and all. Dropping the response drops the stream, and with it
/// whatever its events come from.
pub(crate) fn response(stream: impl Stream<Item = Result<Vec<u8>, Infallible>> + Send + 'static) -> Response {
    sent(Body::from_stream(Audible::new(stream, SILENCE)))
}

/// Answers a request that may have asked for events. Of an answer in events that is not there soon only the head is sent, and
/// the events come when there are any. What goes wrong by then is an event, with `last` behind it.
pub(crate) async fn soon(
    streams: bool,
    last: &'static str,
    answer: impl Future<Output = Answered> + Send + 'static,
) -> Answered {
    if !streams {
        return answer.await;
    }
    let mut answer = Box::pin(answer);
    let begun = timeout(SOON, &mut answer).await;
    match begun {
        Ok(answered) => answered,
        Err(_) => Ok(sent(Body::from_stream(Audible::new(Late::Coming { answer, last }, SILENCE)))),
    }
}

fn sent(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        // Proxies that collect what they pass on would defeat the purpose.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, body).into_response()
}

/// An answer in events that was not there soon.
enum Late {
    Coming { answer: Pin<Box<dyn Future<Output = Answered> + Send>>, last: &'static str },
    There(BodyDataStream),
}

impl Stream for Late {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match &mut *self {
                Self::There(events) => return Pin::new(events).poll_next(context),
                Self::Coming { answer, last } => {
                    let body = match ready!(answer.as_mut().poll(context)) {
                        Ok(response) => response.into_body(),
                        Err(error) => Body::from(error.event() + *last),
                    };
                    *self = Self::There(body.into_data_stream());
                }
            }
        }
    }
}

/// A stream that says at times that it goes on while there is nothing to say.
struct Audible<S> {
    stream: Pin<Box<S>>,
    silence: Duration,
    over: Pin<Box<Sleep>>,
}

impl<S> Audible<S> {
    fn new(stream: S, silence: Duration) -> Self {
        Self { stream: Box::pin(stream), silence, over: Box::pin(sleep(silence)) }
    }
}

impl<S, T, E> Stream for Audible<S>
where
    S: Stream<Item = Result<T, E>>,
    T: From<&'static [u8]>,
{
    type Item = Result<T, E>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { stream, silence, over } = &mut *self;
        let next = match stream.as_mut().poll_next(context) {
            Poll::Pending => {
                ready!(over.as_mut().poll(context));
                Some(Ok(WAITING.into()))
            }
            Poll::Ready(next) => next,
        };
        over.as_mut().reset(Instant::now() + *silence);
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
    fn what_fails_at_once_has_a_status_and_what_fails_later_an_event() {
        run(async {
            let failed = || ApiError::conflict("busy");
            let at_once = soon(true, DONE, ready(Err::<Response, _>(failed()))).await;
            assert_eq!(at_once.unwrap_err(), failed());
            let (fail, failing) = oneshot::channel::<()>();
            let later = async move {
                let _ = failing.await;
                Err::<Response, _>(failed())
            };
            let answer = soon(true, DONE, later).await.unwrap();
            assert_eq!(answer.status(), StatusCode::OK);
            drop(fail);
            let events = to_bytes(answer.into_body(), 1 << 10).await.unwrap();
            assert_eq!(events, failed().event() + DONE);
        });
    }

    #[test]
    fn silence_is_broken_again_and_again() {
        struct Nothing;
        impl Stream for Nothing {
            type Item = Result<Vec<u8>, Infallible>;
            fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
                Poll::Pending
            }
        }
        run(async {
            let mut stream = Audible::new(Nothing, Duration::from_millis(5));
            for _ in 0..3 {
                let said = poll_fn(|context| Pin::new(&mut stream).poll_next(context)).await;
                assert_eq!(said, Some(Ok(WAITING.to_vec())));
            }
            let late = Late::Coming { answer: Box::pin(pending()), last: DONE };
            let mut stream = Audible::new(late, Duration::from_millis(5));
            let said = poll_fn(|context| Pin::new(&mut stream).poll_next(context)).await;
            assert_eq!(said.unwrap().unwrap(), WAITING);
        });
    }
}
