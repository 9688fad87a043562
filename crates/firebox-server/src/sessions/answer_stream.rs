//! Answers a question in a session, whole or as a stream of events.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::response::Response;
use firebox_engine::{Engine, Event, Request, ResponseStream};
use firebox_runtime::Piece;
use firebox_text::{AnswerPart, AnswerReader, Tokenizer};
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::registry::{SessionGuard, SessionHandle};
use super::session_tree::{PendingQuestion, PreparedQuestion};
use super::transcript::Said;
use crate::error::ApiError;
use crate::response_meta::finish_reason;
use crate::sse::{self, DONE};

/// Events that the client has not read yet; generation waits while there are more.
const EVENT_BACKLOG: usize = 64;

/// An event of an answer.
#[derive(Debug)]
enum AnswerEvent {
    Waiting(usize),
    Thought(String),
    Text(String),
    /// The end, with the whole answer.
    Done(Value),
    Failed(ApiError),
}

/// An answer in a session. A task of its own runs it to its end and then returns the session. A client that
/// disconnects cancels the answer; the text so far stays in the session.
#[derive(Debug)]
pub(crate) struct AnswerStream {
    events: Receiver<AnswerEvent>,
    is_over: bool,
}

impl AnswerStream {
    /// Submits the question with a request that lacks its prompt, and waits until the engine accepts it.
    pub async fn begin(
        guard: SessionGuard,
        engine: &Engine,
        content: String,
        mut request: Request,
    ) -> Result<Self, ApiError> {
        let (guard, asked) = guard.change(move |tree| tree.ask(&content)).await?;
        let PreparedQuestion { session, prompt, asked, room, .. } = asked;
        let most = request.config.max_tokens;
        request.config.max_tokens = Some(most.map_or(room, |most| most.min(room)));
        let served = guard.tree.served.clone();
        let tokenizer = served.tokenizer()?.clone();
        let mut reader = served.script.template().answer_reader(&tokenizer, &prompt, None);
        if request.config.grammar.is_some() {
            reader = reader.without_thoughts();
        }
        let reading = Reading { reader, tokenizer, said: Said::default() };
        request.prompt = prompt;
        let mut response = engine.generate(request.in_session(session));
        let first = match next(&mut response).await {
            Some(Event::Failed(failure)) => return Err(failure.error.into()),
            first => first,
        };
        let (sender, events) = channel(EVENT_BACKLOG);
        tokio::spawn(run_to_end(guard, asked, reading, response, first, sender));
        Ok(Self { events, is_over: false })
    }

    /// Waits for the whole answer.
    pub async fn collect(mut self) -> Result<Value, ApiError> {
        while let Some(event) = self.events.recv().await {
            match event {
                AnswerEvent::Done(value) => return Ok(value),
                AnswerEvent::Failed(error) => return Err(error),
                AnswerEvent::Waiting(_) | AnswerEvent::Thought(_) | AnswerEvent::Text(_) => {}
            }
        }
        Err(ApiError::stopping())
    }

    /// Streams the answer.
    pub fn into_response(self) -> Response {
        sse::response(self)
    }
}

impl Stream for AnswerStream {
    type Item = Result<Vec<u8>, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let event = ready!(self.events.poll_recv(context))
            .unwrap_or_else(|| AnswerEvent::Failed(ApiError::stopping()));
        let data = |value: Value| format!("data: {value}\n\n");
        self.is_over = matches!(event, AnswerEvent::Done(_) | AnswerEvent::Failed(_));
        let text = match event {
            AnswerEvent::Waiting(place) => data(json!({ "type": "waiting", "place": place })),
            AnswerEvent::Thought(text) => data(json!({ "type": "reasoning", "text": text })),
            AnswerEvent::Text(text) => data(json!({ "type": "delta", "text": text })),
            AnswerEvent::Done(mut value) => {
                value["type"] = "done".into();
                data(value) + DONE
            }
            AnswerEvent::Failed(error) => error.event() + DONE,
        };
        Poll::Ready(Some(Ok(text.into_bytes())))
    }
}

async fn next(response: &mut ResponseStream) -> Option<Event> {
    poll_fn(|context| Pin::new(&mut *response).poll_next(context)).await
}

/// Reads an answer as it arrives.
struct Reading {
    reader: AnswerReader,
    tokenizer: Arc<Tokenizer>,
    said: Said,
}

impl Reading {
    fn push(&mut self, piece: &Piece) -> Vec<AnswerEvent> {
        let parts = self.reader.push_token(&piece.text, piece.token, &self.tokenizer);
        self.events(parts)
    }

    fn finish(&mut self) -> Vec<AnswerEvent> {
        let parts = self.reader.finish();
        self.events(parts)
    }

    fn events(&mut self, parts: Vec<AnswerPart>) -> Vec<AnswerEvent> {
        let event = |part| match part {
            AnswerPart::Thought(thought) => {
                self.said.thoughts.push_str(&thought);
                Some(AnswerEvent::Thought(thought))
            }
            AnswerPart::Text(text) => {
                self.said.text.push_str(&text);
                Some(AnswerEvent::Text(text))
            }
            // There are no tools.
            AnswerPart::CallStart(_) | AnswerPart::Arguments(_) | AnswerPart::Call(_) => None,
        };
        parts.into_iter().filter_map(event).collect()
    }
}

/// Runs an answer to its end and stores it in the session.
async fn run_to_end(
    guard: SessionGuard,
    asked: PendingQuestion,
    mut reading: Reading,
    mut response: ResponseStream,
    mut first: Option<Event>,
    events: Sender<AnswerEvent>,
) {
    let mut has_client = true;
    loop {
        let event = match first.take() {
            Some(event) => Some(event),
            None if has_client => tokio::select! {
                event = next(&mut response) => event,
                () = events.closed() => {
                    has_client = false;
                    response.cancel();
                    continue;
                }
            },
            None => next(&mut response).await,
        };
        let end = match event {
            Some(Event::Waiting { place }) => {
                let _ = events.send(AnswerEvent::Waiting(place)).await;
                continue;
            }
            Some(Event::Piece(piece)) => {
                for event in reading.push(&piece) {
                    let _ = events.send(event).await;
                }
                continue;
            }
            Some(Event::Finished(outcome)) => {
                for event in reading.finish() {
                    let _ = events.send(event).await;
                }
                let summary = &outcome.summary;
                let said = std::mem::take(&mut reading.said);
                let mut value = json!({
                    "answer": said.text,
                    "reasoning_content": said.thoughts(),
                    "finish_reason": finish_reason(summary.finish, 0),
                    "usage": {
                        "prompt_tokens": summary.prompt_tokens,
                        "completion_tokens": summary.tokens.len(),
                        "total_tokens": summary.prompt_tokens + summary.tokens.len(),
                        "prompt_tokens_details": { "cached_tokens": outcome.cached_tokens },
                    },
                    "ttft_ms": summary.ttft_ms,
                    "tokens_per_second": summary.decode_tps,
                });
                match guard.change(move |tree| tree.answered(asked, said, *outcome)).await {
                    Ok((done, ())) => {
                        value["session"] = release(done);
                        AnswerEvent::Done(value)
                    }
                    Err(error) => AnswerEvent::Failed(error),
                }
            }
            Some(Event::Failed(failure)) => {
                drop(guard);
                AnswerEvent::Failed(failure.error.into())
            }
            Some(_) => continue,
            None => AnswerEvent::Failed(ApiError::stopping()),
        };
        let _ = events.send(end).await;
        return;
    }
}

/// Releases the session and returns its state.
fn release(guard: SessionGuard) -> Value {
    let held: Arc<SessionHandle> = guard.release();
    held.value()
}
