//! The body of a response with vectors, written as they are computed.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use firebox_runtime::TextVector;
use futures_core::Stream;
use serde_json::json;

use crate::error::ApiError;
use crate::text_vectors::TextVectors;

/// A list of embeddings in OpenAI's format. The vectors are written one by one, so that the response takes no more memory
/// than one of them beside those that are computed together.
#[derive(Debug)]
pub(crate) struct EmbeddingBody {
    vectors: TextVectors,
    /// Vectors that are computed and not written.
    computed: VecDeque<TextVector>,
    /// Whether vectors are written as the base64 of their bytes.
    is_packed: bool,
    written: usize,
    /// What follows the vectors; absent once it is written.
    end: Option<String>,
}

impl EmbeddingBody {
    /// Waits for the first vectors, so that an error has a status. Later ones end the connection.
    pub async fn response(
        mut vectors: TextVectors,
        model: &str,
        is_packed: bool,
    ) -> Result<Response, ApiError> {
        let computed = vectors.next().await.transpose()?.unwrap_or_default().into();
        let usage = json!({ "prompt_tokens": vectors.tokens, "total_tokens": vectors.tokens });
        let end = Some(format!("],\"model\":{},\"usage\":{usage}}}", json!(model)));
        let body = Self { vectors, computed, is_packed, written: 0, end };
        Ok(([(header::CONTENT_TYPE, "application/json")], Body::from_stream(body)).into_response())
    }

    /// Returns a vector as an entry of the list.
    fn entry(&mut self, TextVector { text, vector, .. }: &TextVector) -> String {
        let opening = if self.written == 0 { "{\"object\":\"list\",\"data\":[" } else { "," };
        self.written += 1;
        let mut entry = format!("{opening}{{\"object\":\"embedding\",\"index\":{text},\"embedding\":");
        if self.is_packed {
            let bytes: Vec<u8> = vector.iter().flat_map(|element| element.to_le_bytes()).collect();
            entry.push('"');
            BASE64_STANDARD.encode_string(bytes, &mut entry);
            entry.push_str("\"}");
        } else {
            let mut separator = '[';
            for element in vector {
                entry.push(separator);
                // The shortest number that is read back as the same one; JSON has none for others.
                let _ = if element.is_finite() { write!(entry, "{element}") } else { write!(entry, "null") };
                separator = ',';
            }
            entry.push_str("]}");
        }
        entry
    }
}

impl Stream for EmbeddingBody {
    type Item = Result<String, io::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(vector) = self.computed.pop_front() {
                return Poll::Ready(Some(Ok(self.entry(&vector))));
            }
            if self.end.is_none() {
                return Poll::Ready(None);
            }
            match ready!(self.vectors.poll_next(context)) {
                Some(Ok(vectors)) => self.computed = vectors.into(),
                Some(Err(error)) => {
                    self.end = None;
                    return Poll::Ready(Some(Err(io::Error::other(error.message()))));
                }
                None => return Poll::Ready(self.end.take().map(Ok)),
            }
        }
    }
}
