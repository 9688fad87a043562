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

use crate::error::ApiError;

const MOST_HEADERS: usize = 64;
/// Of a request line and its headers.
const LONGEST_HEAD: usize = 32 << 10;
/// What may lie in memory of one connection, read and to be written.
const LARGEST_BUFFER: usize = 64 << 10;
/// A client that was refused may be sending still, and would not read what it is told before it is done.
const LINGER: Duration = Duration::from_secs(2);

/// How much and how long a client may take.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Bytes of a body.
    pub body: usize,
    /// For the headers of a request, counted from the end of the one before.
    pub head_time: Duration,
    /// From there to the end of its body.
    pub body_time: Duration,
    /// For taking anything of what is sent.
    pub write_time: Duration,
    /// For a request as a whole, its answer included; as long as it takes, where none is said.
    pub request_time: Option<Duration>,
    /// Answers of a model that run and wait at once.
    pub answers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body: 8 << 20,
            head_time: Duration::from_secs(30),
            body_time: Duration::from_secs(60),
            write_time: Duration::from_secs(30),
            request_time: None,
            answers: usize::MAX,
        }
    }
}

/// Answers the requests of a connection, one after the other, until the client leaves or the server is to stop. A request
/// whose client has left is dropped where it is.
pub(crate) async fn serve<S>(stream: S, router: Router, limits: &Limits, mut stopping: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let unread = Arc::new(AtomicBool::new(false));
    let noted = unread.clone();
    let service = service_fn(move |request| Box::pin(answer(router.clone(), request, noted.clone())));
    let stream = TokioIo::new(Patient { stream, patience: limits.write_time, waiting: None });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time)
        .max_headers(MOST_HEADERS)
        .max_header_size(LONGEST_HEAD)
        .max_buf_size(LARGEST_BUFFER)
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
        // Who has not begun a request was only waiting.
        Err(error) if error.is_timeout() && !parts.read_buf.is_empty() => {
            stream.write_all(&dribbled()).await.is_ok()
        }
        Err(error) => error.is_parse(),
    };
    if timeout(LINGER, stream.shutdown()).await.is_ok() && refused {
        let mut waste = vec![0; 64 << 10];
        let drain = async { while matches!(stream.read(&mut waste).await, Ok(1..)) {} };
        let _ = timeout(LINGER, drain).await;
    }
}

/// What is told to who sends headers too slowly; hyper tells them nothing.
fn dribbled() -> Vec<u8> {
    let body = ApiError::slow("the request did not come in time").value().to_string();
    let head = "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: ";
    format!("{head}{}\r\n\r\n{body}", body.len()).into_bytes()
}

async fn answer(
    router: Router,
    request: Request<Incoming>,
    unread: Arc<AtomicBool>,
) -> Result<Response<Body>, std::convert::Infallible> {
    let came = Arc::new(AtomicBool::new(request.body().is_end_stream()));
    let mut request = request.map(|body| Noted { body, came: came.clone() });
    tidy(&mut request);
    let mut response = router.oneshot(request).await?;
    if !came.load(Ordering::Relaxed) {
        unread.store(true, Ordering::Relaxed);
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

/// A path means the same with a `/` at its end.
fn tidy<B>(request: &mut Request<B>) {
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

/// A body of which it is known whether all of it was read.
struct Noted {
    body: Incoming,
    came: Arc<AtomicBool>,
}

impl HttpBody for Noted {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.came.store(true, Ordering::Relaxed);
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

/// A stream that fails once what is written was not taken for a while.
struct Patient<S> {
    stream: S,
    patience: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    fn wait<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let patience = self.patience;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(waiting.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.wait(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.wait(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.wait(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.wait(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::{get, post};
    use tokio::io::duplex;

    /// What is answered to these bytes by a server that echoes.
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
            let limits = Limits { head_time: Duration::from_millis(200), ..Limits::default() };
            let talk = async move {
                client.write_all(sent.as_bytes()).await.unwrap();
                let mut all = Vec::new();
                let _ = client.read_to_end(&mut all).await;
                String::from_utf8(all).unwrap()
            };
            tokio::join!(serve(server, router, &limits, stopping), talk).1
        })
    }

    #[track_caller]
    fn ends(sent: &str, status: &str, body: &str) {
        let found = answered(sent);
        assert!(found.starts_with(&format!("HTTP/1.1 {status}")), "{sent:?}: {found}");
        assert!(found.ends_with(body), "{sent:?}: {found}");
    }

    #[test]
    fn bodies_come_by_length_and_in_chunks() {
        let close = "Host: a\r\nConnection: close\r\n";
        ends(&format!("POST /echo HTTP/1.1\r\n{close}Content-Length: 4\r\n\r\nfour"), "200", "\r\n\r\nfour");
        let chunks = "Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n1\r\nd\r\n0\r\n\r\n";
        ends(&format!("POST /echo HTTP/1.1\r\n{close}{chunks}"), "200", "\r\n\r\nabcd");
        ends(&format!("GET /where/a%2Fb/ HTTP/1.1\r\n{close}\r\n"), "200", "\r\n\r\na/b");
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
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
    fn who_is_not_heard_out_is_told_that_it_was_the_last() {
        let whole = "POST /deaf HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nfour";
        let found = answered(whole);
        assert!(found.contains("connection: close") && found.ends_with("no"), "{found}");
    }

    #[test]
    fn who_never_begins_is_left_without_a_word_and_who_never_ends_is_told() {
        assert_eq!(answered(""), "");
        ends("GET /ec", "408", "}");
    }
}
