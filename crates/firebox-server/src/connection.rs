//! HTTP connections, with limits on what a slow or hostile client can use.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, Request, Response, header};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Sleep, sleep, timeout};
use tower::ServiceExt as _;

use crate::client_slots::Activity;
use crate::error::ApiError;

const MAX_HEADERS: usize = 64;
/// Limit of a request line with its headers.
const MAX_HEAD_BYTES: usize = 32 << 10;
/// Limit of each buffer of a connection.
const MAX_BUFFER_BYTES: usize = 64 << 10;
/// How long to read from a rejected client. It may still be sending, and would not read the response before it
/// is done.
const LINGER: Duration = Duration::from_secs(2);

/// How much data and time a client may use.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Bytes of a body.
    pub body: usize,
    /// Time for the headers of a request, from the end of the previous request.
    pub head_timeout: Duration,
    /// Time for the body, from the end of the headers.
    pub body_timeout: Duration,
    /// Time without progress while sending a response.
    pub write_timeout: Duration,
    /// Time for a request with its response; unlimited if absent.
    pub request_timeout: Option<Duration>,
    /// Choices of a model that may run and wait at once.
    pub max_choices: usize,
    /// Refuses fields that have no effect, instead of naming them in the response.
    pub strict_fields: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body: 8 << 20,
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(30),
            request_timeout: None,
            max_choices: usize::MAX,
            strict_fields: false,
        }
    }
}

/// Serves the requests of a connection until the client disconnects or the server stops. A request is dropped
/// when its client disconnects.
pub(crate) async fn serve<S>(
    stream: S,
    router: Router,
    limits: &Limits,
    activity: Activity,
    mut stopping: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let unread = Arc::new(AtomicBool::new(false));
    let unread_flag = unread.clone();
    let service = service_fn(move |request| {
        let (active, router, unread) = (activity.begin_request(), router.clone(), unread_flag.clone());
        Box::pin(
            async move { Ok::<_, Infallible>(active.with_response(answer(router, request, unread).await?)) },
        )
    });
    let stream = TokioIo::new(WriteTimeout { stream, timeout_after: limits.write_timeout, waiting: None });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_headers(MAX_HEADERS)
        .max_header_size(MAX_HEAD_BYTES)
        .max_buf_size(MAX_BUFFER_BYTES)
        .serve_connection(stream, service);
    let mut told = false;
    let ended = loop {
        tokio::select! {
            ended = poll_fn(|context| connection.poll_without_shutdown(context)) => break ended,
            _ = stopping.wait_for(|stop| *stop), if !told => {
                told = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    let parts = connection.into_parts();
    let mut stream = parts.io.into_inner();
    let refused = match ended {
        Ok(()) => unread.load(Ordering::Relaxed),
        // Without any bytes of a request, the connection was idle.
        Err(error) if error.is_timeout() && !parts.read_buf.is_empty() => {
            stream.write_all(&request_timeout_response()).await.is_ok()
        }
        Err(error) => error.is_parse(),
    };
    if timeout(LINGER, stream.shutdown()).await.is_ok() && refused {
        let mut discarded = vec![0; 64 << 10];
        let drain = async { while matches!(stream.read(&mut discarded).await, Ok(1..)) {} };
        let _ = timeout(LINGER, drain).await;
    }
}

/// The response to a client that sends its headers too slowly. Hyper sends none.
fn request_timeout_response() -> Vec<u8> {
    let body = ApiError::request_timeout("the request did not come in time").value().to_string();
    let head = "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: ";
    format!("{head}{}\r\n\r\n{body}", body.len()).into_bytes()
}

async fn answer(
    router: Router,
    request: Request<Incoming>,
    unread: Arc<AtomicBool>,
) -> Result<Response<Body>, Infallible> {
    let is_read = Arc::new(AtomicBool::new(request.body().is_end_stream()));
    let mut request = request.map(|body| TrackedBody { body, is_read: is_read.clone() });
    strip_trailing_slash(&mut request);
    let mut response = router.oneshot(request).await?;
    if !is_read.load(Ordering::Relaxed) {
        unread.store(true, Ordering::Relaxed);
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

/// Treats a path with a trailing `/` like one without.
fn strip_trailing_slash<B>(request: &mut Request<B>) {
    let path = request.uri().path();
    let kept = path.trim_end_matches('/');
    if kept.len() == path.len() || kept.is_empty() {
        return;
    }
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let mut parts = request.uri().clone().into_parts();
    if let Ok(path) = format!("{kept}{query}").parse() {
        parts.path_and_query = Some(path);
    }
    if let Ok(uri) = parts.try_into() {
        *request.uri_mut() = uri;
    }
}

/// A body that records whether all of it was read.
struct TrackedBody {
    body: Incoming,
    is_read: Arc<AtomicBool>,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.is_read.store(true, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream whose writes fail after a time without progress.
struct WriteTimeout<S> {
    stream: S,
    timeout_after: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    fn poll_timeout<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let timeout_after = self.timeout_after;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(timeout_after)));
        ready!(waiting.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.poll_timeout(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.poll_timeout(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.poll_timeout(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.poll_timeout(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_slots::ClientSlots;
    use axum::routing::{get, post};
    use tokio::io::duplex;

    /// Returns the response of an echo server to these bytes.
    fn answered(sent: &str) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (mut client, server) = duplex(1 << 20);
            let echo = |body: Bytes| async move { body };
            let router =
                Router::new().route("/echo", post(echo)).route("/deaf", post(|| async { "no" })).route(
                    "/where/{*path}",
                    get(|axum::extract::Path(path): axum::extract::Path<String>| async { path }),
                );
            let (_stop, stopping) = watch::channel(false);
            let limits = Limits { head_timeout: Duration::from_millis(200), ..Limits::default() };
            let talk = async move {
                client.write_all(sent.as_bytes()).await.unwrap();
                let mut all = Vec::new();
                let _ = client.read_to_end(&mut all).await;
                String::from_utf8(all).unwrap()
            };
            let activity = ClientSlots::new(1).activity();
            tokio::join!(serve(server, router, &limits, activity, stopping), talk).1
        })
    }

    #[track_caller]
    fn ends(sent: &str, status: &str, body: &str) {
        let found = answered(sent);
        assert!(found.starts_with(&format!("HTTP/1.1 {status}")), "{sent:?}: {found}");
        assert!(found.ends_with(body), "{sent:?}: {found}");
    }

    #[test]
    fn bodies_are_read_by_length_and_in_chunks() {
        let close = "Host: a\r\nConnection: close\r\n";
        ends(&format!("POST /echo HTTP/1.1\r\n{close}Content-Length: 4\r\n\r\nfour"), "200", "\r\n\r\nfour");
        let chunks = "Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n1\r\nd\r\n0\r\n\r\n";
        ends(&format!("POST /echo HTTP/1.1\r\n{close}{chunks}"), "200", "\r\n\r\nabcd");
        ends(&format!("GET /where/a%2Fb/ HTTP/1.1\r\n{close}\r\n"), "200", "\r\n\r\na/b");
    }

    #[test]
    fn ambiguous_and_oversized_requests_are_rejected() {
        let post = |headers: &str| format!("POST /echo HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n");
        for headers in [
            "Content-Length: 1\r\nContent-Length: 2",
            "Content-Length: +1",
            "Content-Length: 99999999999999999999999",
            "Transfer-Encoding: chunked, gzip",
            "Bad Name: x",
        ] {
            ends(&post(headers), "400", "");
        }
        ends("nonsense\r\n\r\n", "400", "");
        ends(&post(&"X: y\r\n".repeat(70)), "431", "");
        ends(&post(&format!("X: {}", "y".repeat(40 << 10))), "431", "");
    }

    #[test]
    fn a_partly_read_body_closes_the_connection() {
        let whole = "POST /deaf HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nfour";
        let found = answered(whole);
        assert!(found.contains("connection: close") && found.ends_with("no"), "{found}");
    }

    #[test]
    fn an_idle_connection_is_closed_and_an_unfinished_request_times_out() {
        assert_eq!(answered(""), "");
        ends("GET /ec", "408", "}");
    }
}
