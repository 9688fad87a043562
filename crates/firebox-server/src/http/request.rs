use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{Instant, timeout_at};

use super::Limits;
use super::response::Status;

const MOST_HEADERS: usize = 64;
/// Of a request line and its headers.
const LONGEST_HEAD: usize = 32 << 10;
/// Of a line that says how long a chunk is, extensions included.
const LONGEST_CHUNK_LINE: usize = 256;
const READ: usize = 16 << 10;

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Get,
    Head,
    Post,
    Other,
}

/// A request as it came, with its body.
#[derive(Debug)]
pub(crate) struct Request {
    pub method: Method,
    /// Without the query, escapes undone.
    pub path: String,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Whether the connection serves another one after this.
    pub keeps: bool,
    /// Whether an answer may come in chunks.
    pub chunks: bool,
}

/// Why no request came of what was read.
#[derive(Debug)]
pub(crate) enum Unread {
    /// Nobody wants anything any more, or is too slow to say what.
    Gone,
    /// It makes no sense, and this is said of it.
    Refused(Status, &'static str),
}

impl From<std::io::Error> for Unread {
    fn from(_: std::io::Error) -> Self {
        Self::Gone
    }
}

/// Bytes of a connection that were read and not used.
#[derive(Debug, Default)]
pub(crate) struct Buffer(pub Vec<u8>);

impl Buffer {
    /// Reads more. No more may come before `until`.
    pub async fn fill(
        &mut self,
        from: &mut (impl AsyncRead + Unpin),
        until: Instant,
    ) -> Result<usize, Unread> {
        self.0.reserve(READ);
        match timeout_at(until, from.read_buf(&mut self.0)).await {
            Ok(read) => Ok(read?),
            Err(_) => Err(Unread::Refused(Status::TIMEOUT, "the request did not come in time")),
        }
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        let rest = self.0.split_off(count);
        std::mem::replace(&mut self.0, rest)
    }
}

impl Request {
    /// The value of a header, if it is there once or more.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(other, _)| other.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    /// Reads a request of a connection on which something has come.
    pub async fn read(
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        buffer: &mut Buffer,
        limits: &Limits,
    ) -> Result<Self, Unread> {
        let until = Instant::now() + limits.head_time;
        let mut request = loop {
            let whole = Self::parse(&buffer.0)?;
            if whole.as_ref().map_or(buffer.0.len(), |(_, length)| *length) > LONGEST_HEAD {
                return Err(Unread::Refused(Status::HEADERS_TOO_LARGE, "the headers are too long"));
            }
            if let Some((request, length)) = whole {
                buffer.take(length);
                break request;
            }
            if buffer.fill(stream, until).await? == 0 {
                return Err(Unread::Gone);
            }
        };
        let until = Instant::now() + limits.body_time;
        request.body = request.read_body(stream, buffer, limits, until).await?;
        Ok(request)
    }

    /// The head of a request without its body, and how long it is; nothing while it is not whole.
    fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, Unread> {
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut head = httparse::Request::new(&mut headers);
        let length = match head.parse(bytes) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => {
                return Err(Unread::Refused(Status::HEADERS_TOO_LARGE, "there are too many headers"));
            }
            Err(_) => return Err(Unread::Refused(Status::BAD_REQUEST, "this is no HTTP/1.1 request")),
        };
        let method = match head.method {
            Some("GET") => Method::Get,
            Some("HEAD") => Method::Head,
            Some("POST") => Method::Post,
            _ => Method::Other,
        };
        let target = head.path.unwrap_or_default();
        let path = target.split(['?', '#']).next().unwrap_or_default();
        let Some(path) = unescaped(path) else {
            return Err(Unread::Refused(Status::BAD_REQUEST, "the path is not UTF-8"));
        };
        let headers = head
            .headers
            .iter()
            .map(|header| (header.name.to_owned(), String::from_utf8_lossy(header.value).trim().to_owned()));
        let is_1_1 = head.version == Some(1);
        let mut request = Self {
            method,
            path,
            headers: headers.collect(),
            body: Vec::new(),
            keeps: is_1_1,
            chunks: is_1_1,
        };
        if let Some(connection) = request.header("connection") {
            let says = |word: &str| connection.split(',').any(|one| one.trim().eq_ignore_ascii_case(word));
            request.keeps = (is_1_1 || says("keep-alive")) && !says("close");
        }
        Ok(Some((request, length)))
    }

    async fn read_body(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        buffer: &mut Buffer,
        limits: &Limits,
        until: Instant,
    ) -> Result<Vec<u8>, Unread> {
        let refuse = |why| Err(Unread::Refused(Status::BAD_REQUEST, why));
        let mut lengths = self.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        let (length, another) = (lengths.next(), lengths.next());
        let encoding = self.header("transfer-encoding");
        if another.is_some() || (length.is_some() && encoding.is_some()) {
            return refuse("the length of the body is given twice");
        }
        let length = match length {
            // The parser of the standard library takes a sign, and HTTP does not.
            Some((_, text)) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => {
                // More digits than a number has are more bytes than anybody takes.
                Some(text.parse::<usize>().unwrap_or(usize::MAX))
            }
            Some(_) => return refuse("content-length is no number"),
            None => None,
        };
        let chunked = match encoding {
            None => false,
            Some(encoding) if encoding.eq_ignore_ascii_case("chunked") => true,
            Some(_) => {
                return Err(Unread::Refused(Status::NOT_IMPLEMENTED, "this transfer-encoding is not known"));
            }
        };
        if length.is_some_and(|length| length > limits.body) {
            return Err(Unread::Refused(Status::TOO_LARGE, "the body is too large"));
        }
        let comes = chunked || length.is_some_and(|length| length > 0);
        if comes && self.header("expect").is_some_and(|expect| expect.eq_ignore_ascii_case("100-continue")) {
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        if chunked {
            return read_chunks(stream, buffer, limits, until).await;
        }
        let length = length.unwrap_or(0);
        fill_to(stream, buffer, length, until).await?;
        Ok(buffer.take(length))
    }
}

async fn fill_to(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Buffer,
    length: usize,
    until: Instant,
) -> Result<(), Unread> {
    while buffer.0.len() < length {
        if buffer.fill(stream, until).await? == 0 {
            return Err(Unread::Gone);
        }
    }
    Ok(())
}

async fn read_chunks(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Buffer,
    limits: &Limits,
    until: Instant,
) -> Result<Vec<u8>, Unread> {
    const BROKEN: Unread = Unread::Refused(Status::BAD_REQUEST, "the chunks of the body make no sense");
    let mut body = Vec::new();
    loop {
        let line = read_line(stream, buffer, until).await?;
        let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
        if digits.is_empty() || digits.len() > 15 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(BROKEN);
        }
        let digits = std::str::from_utf8(digits).map_err(|_| BROKEN)?;
        let length = usize::from_str_radix(digits, 16).map_err(|_| BROKEN)?;
        if length == 0 {
            // What may follow says nothing of use.
            for _ in 0..MOST_HEADERS {
                if read_line(stream, buffer, until).await?.is_empty() {
                    return Ok(body);
                }
            }
            return Err(BROKEN);
        }
        if length > limits.body - body.len() {
            return Err(Unread::Refused(Status::TOO_LARGE, "the body is too large"));
        }
        fill_to(stream, buffer, length + 2, until).await?;
        body.extend(buffer.take(length));
        if buffer.take(2) != b"\r\n" {
            return Err(BROKEN);
        }
    }
}

async fn read_line(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Buffer,
    until: Instant,
) -> Result<Vec<u8>, Unread> {
    loop {
        if let Some(at) = buffer.0.windows(2).position(|pair| pair == b"\r\n") {
            let line = buffer.take(at);
            buffer.take(2);
            return Ok(line);
        }
        if buffer.0.len() > LONGEST_CHUNK_LINE {
            return Err(Unread::Refused(Status::BAD_REQUEST, "the chunks of the body make no sense"));
        }
        if buffer.fill(stream, until).await? == 0 {
            return Err(Unread::Gone);
        }
    }
}

/// A path without `%2F` and the like; nothing where that is no text.
fn unescaped(path: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let escaped = (byte == b'%').then(|| after.get(..2)).flatten();
        let escaped = escaped.filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let escaped =
            escaped.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(escaped.unwrap_or(byte));
        rest = &after[if escaped.is_some() { 2 } else { 0 }..];
    }
    String::from_utf8(bytes).ok()
}

/// Until when something may take, where it may take forever.
pub(crate) const NEVER: Duration = Duration::from_secs(60 * 60 * 24 * 365);

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, body: usize) -> Result<Request, Unread> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut stream = tokio::io::join(text.as_bytes(), tokio::io::sink());
            let limits = Limits { body, ..Limits::default() };
            Request::read(&mut stream, &mut Buffer::default(), &limits).await
        })
    }

    #[track_caller]
    fn refused(text: &str, expected: Status) {
        match read(text, 16) {
            Err(Unread::Refused(status, _)) => assert_eq!(status, expected, "{text:?}"),
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn bodies_come_by_length_and_in_chunks() {
        let request = read("POST /a%2Fb?x=1 HTTP/1.1\r\nContent-Length: 4\r\n\r\nfourmore", 16).unwrap();
        assert_eq!((request.path.as_str(), request.body.as_slice()), ("/a/b", b"four".as_slice()));
        assert!(request.keeps && request.chunks);
        let text = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3;x=y\r\nabc\r\n1\r\nd\r\n0\r\n\r\n";
        let request = read(text, 16).unwrap();
        assert_eq!(request.body, b"abcd");
        assert!(!request.keeps);
        assert!(!read("GET / HTTP/1.0\r\n\r\n", 16).unwrap().keeps);
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        let post = |headers: &str, body: &str| format!("POST / HTTP/1.1\r\n{headers}\r\n\r\n{body}");
        refused(&post("Content-Length: 1\r\nContent-Length: 2", "ab"), Status::BAD_REQUEST);
        refused(&post("Content-Length: 1\r\nTransfer-Encoding: chunked", "0\r\n\r\n"), Status::BAD_REQUEST);
        refused(&post("Content-Length: +1", "a"), Status::BAD_REQUEST);
        refused(&post("Transfer-Encoding: gzip, chunked", "0\r\n\r\n"), Status::NOT_IMPLEMENTED);
        refused(&post("Transfer-Encoding: chunked", "-1\r\n"), Status::BAD_REQUEST);
        refused(&post("Transfer-Encoding: chunked", "2\r\nabc\r\n"), Status::BAD_REQUEST);
        refused(&post("Transfer-Encoding: chunked", "ffffffffffffff\r\n"), Status::TOO_LARGE);
        refused(&post("Transfer-Encoding: chunked", "11\r\n"), Status::TOO_LARGE);
        refused(&post("Content-Length: 99999999999999999999999", ""), Status::TOO_LARGE);
        refused("nonsense\r\n\r\n", Status::BAD_REQUEST);
        refused(&post(&"X: y\r\n".repeat(70), ""), Status::HEADERS_TOO_LARGE);
        refused(&post(&format!("X: {}", "y".repeat(40 << 10)), ""), Status::HEADERS_TOO_LARGE);
        refused("GET /%ff HTTP/1.1\r\n\r\n", Status::BAD_REQUEST);
        assert!(matches!(read("POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nfo", 16), Err(Unread::Gone)));
    }
}
