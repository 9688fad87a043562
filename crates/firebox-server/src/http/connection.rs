use std::future::poll_fn;
use std::io;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::request::{Buffer, Method, NEVER, Request, Unread};
use super::response::{Body, Chunks, Response, Status};

/// What may come while a request is answered, for the one after it.
const MOST_AHEAD: usize = 64 << 10;
/// A client that was refused may be sending still, and would not read what it is told before it is done.
const LINGER: Duration = Duration::from_secs(2);

/// How much and how long a client may take.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Bytes of a body.
    pub body: usize,
    /// From the first byte of a request to the end of its headers.
    pub head_time: Duration,
    /// From there to the end of its body.
    pub body_time: Duration,
    /// From one request of a connection to the next.
    pub idle_time: Duration,
    /// For taking what is sent next.
    pub write_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body: 8 << 20,
            head_time: Duration::from_secs(10),
            body_time: Duration::from_secs(60),
            idle_time: Duration::from_secs(75),
            write_time: Duration::from_secs(30),
        }
    }
}

/// Answers the requests of a connection, one after the other, until the client leaves or the server is to stop. A request
/// whose client has left is dropped where it is.
pub(crate) async fn serve<S, F>(
    mut stream: S,
    limits: &Limits,
    mut stopping: watch::Receiver<bool>,
    answer: impl Fn(Request) -> F,
) where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Response>,
{
    let mut buffer = Buffer::default();
    loop {
        let idle = Instant::now() + limits.idle_time;
        if buffer.0.is_empty() {
            tokio::select! {
                read = buffer.fill(&mut stream, idle) => if !matches!(read, Ok(1..)) { return },
                _ = stopping.wait_for(|stop| *stop) => return,
            }
        }
        let mut request = match Request::read(&mut stream, &mut buffer, limits).await {
            Ok(request) => request,
            Err(Unread::Gone) => return,
            Err(Unread::Refused(status, why)) => return refuse(&mut stream, limits, status, why).await,
        };
        request.keeps &= !*stopping.borrow();
        let (keeps, chunks, only_head) = (request.keeps, request.chunks, request.method == Method::Head);
        let response = tokio::select! {
            response = answer(request) => response,
            () = left(&mut stream, &mut buffer) => return,
        };
        let keeps = keeps && (chunks || matches!(response.body, Body::Whole(_)));
        let sent = send(&mut stream, &mut buffer, response, limits, (keeps, chunks, only_head)).await;
        if sent.is_err() || !keeps {
            let _ = timeout(LINGER, stream.shutdown()).await;
            return;
        }
    }
}

/// Ends when the client has left.
async fn left(stream: &mut (impl AsyncRead + Unpin), buffer: &mut Buffer) {
    while buffer.0.len() < MOST_AHEAD {
        if !matches!(buffer.fill(stream, Instant::now() + NEVER).await, Ok(1..)) {
            return;
        }
    }
    // Who sends more without waiting for an answer is noticed by not taking it.
    std::future::pending().await
}

async fn send(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    buffer: &mut Buffer,
    response: Response,
    limits: &Limits,
    (keeps, chunks, only_head): (bool, bool, bool),
) -> io::Result<()> {
    let mut bytes = response.head(keeps, chunks);
    match response.body {
        _ if only_head => write(stream, &bytes, limits).await,
        Body::Whole(body) => {
            bytes.extend(body);
            write(stream, &bytes, limits).await
        }
        Body::Stream(mut body) => {
            write(stream, &bytes, limits).await?;
            while let Some(chunk) = next_chunk(&mut *body, stream, buffer).await? {
                if !chunks {
                    write(stream, &chunk, limits).await?;
                } else if !chunk.is_empty() {
                    let framed = [format!("{:x}\r\n", chunk.len()).as_bytes(), &chunk, b"\r\n"].concat();
                    write(stream, &framed, limits).await?;
                }
            }
            if chunks { write(stream, b"0\r\n\r\n", limits).await } else { Ok(()) }
        }
    }
}

async fn next_chunk(
    body: &mut dyn Chunks,
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Buffer,
) -> io::Result<Option<Vec<u8>>> {
    tokio::select! {
        chunk = poll_fn(|context| body.poll_chunk(context)) => Ok(chunk),
        () = left(stream, buffer) => Err(io::ErrorKind::ConnectionReset.into()),
    }
}

async fn write(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8], limits: &Limits) -> io::Result<()> {
    let writing = async {
        stream.write_all(bytes).await?;
        stream.flush().await
    };
    timeout(limits.write_time, writing).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Says why a request was not read, and goes on reading for a while so that the client gets to see it.
async fn refuse(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    limits: &Limits,
    status: Status,
    why: &str,
) {
    let error = json!({ "message": why, "type": "invalid_request_error", "param": null, "code": null });
    let response = Response::json(status, &json!({ "error": error }));
    let sent = send(stream, &mut Buffer::default(), response, limits, (false, true, false)).await;
    if sent.is_ok() && stream.shutdown().await.is_ok() {
        let mut waste = vec![0; 64 << 10];
        let drain = async { while matches!(stream.read(&mut waste).await, Ok(1..)) {} };
        let _ = timeout(LINGER, drain).await;
    }
}
