use std::task::{Context, Poll};

use serde_json::Value;

/// How a request ended, as a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub u16);

impl Status {
    pub const OK: Self = Self(200);
    pub const BAD_REQUEST: Self = Self(400);
    pub const UNAUTHORIZED: Self = Self(401);
    pub const FORBIDDEN: Self = Self(403);
    pub const NOT_FOUND: Self = Self(404);
    pub const NOT_ALLOWED: Self = Self(405);
    pub const TIMEOUT: Self = Self(408);
    pub const TOO_LARGE: Self = Self(413);
    pub const TOO_MANY: Self = Self(429);
    pub const HEADERS_TOO_LARGE: Self = Self(431);
    pub const INTERNAL: Self = Self(500);
    pub const NOT_IMPLEMENTED: Self = Self(501);
    pub const UNAVAILABLE: Self = Self(503);

    fn words(self) -> &'static str {
        match self.0 {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            413 => "Content Too Large",
            429 => "Too Many Requests",
            431 => "Request Header Fields Too Large",
            501 => "Not Implemented",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        }
    }
}

/// What comes piece by piece. Dropping it ends whatever the pieces come from.
pub(crate) trait Chunks: Send {
    /// The next piece, or nothing at the end.
    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>>;
}

/// What is answered.
pub(crate) enum Body {
    Whole(Vec<u8>),
    Stream(Box<dyn Chunks>),
}

/// An answer.
pub(crate) struct Response {
    pub status: Status,
    pub content_type: &'static str,
    /// Further headers. None of them comes from a request.
    pub headers: Vec<(&'static str, &'static str)>,
    pub body: Body,
}

impl Response {
    pub fn json(status: Status, value: &Value) -> Self {
        let body = Body::Whole(value.to_string().into_bytes());
        Self { status, content_type: "application/json", headers: Vec::new(), body }
    }

    pub fn text(content_type: &'static str, text: String) -> Self {
        Self { status: Status::OK, content_type, headers: Vec::new(), body: Body::Whole(text.into_bytes()) }
    }

    /// Events of server and client, as browsers call them.
    pub fn events(chunks: Box<dyn Chunks>) -> Self {
        Self {
            status: Status::OK,
            content_type: "text/event-stream",
            // Proxies that collect what they pass on would defeat the purpose.
            headers: vec![("x-accel-buffering", "no")],
            body: Body::Stream(chunks),
        }
    }

    pub fn with_header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.push((name, value));
        self
    }

    /// All that comes before the body.
    pub fn head(&self, keeps: bool, chunks: bool) -> Vec<u8> {
        let Self { status, content_type, .. } = self;
        let mut head =
            format!("HTTP/1.1 {} {}\r\ncontent-type: {content_type}\r\n", status.0, status.words());
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        // Nothing here is for the next one to see.
        head.push_str("cache-control: no-store\r\nx-content-type-options: nosniff\r\n");
        match &self.body {
            Body::Whole(body) => head.push_str(&format!("content-length: {}\r\n", body.len())),
            Body::Stream(_) if chunks => head.push_str("transfer-encoding: chunked\r\n"),
            Body::Stream(_) => {}
        }
        head.push_str(if keeps { "connection: keep-alive\r\n\r\n" } else { "connection: close\r\n\r\n" });
        head.into_bytes()
    }
}
