use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::response::Response;
use firebox_runtime::GenerationConfig;
use firebox_runtime::engine::{Answering, Engine, Event};
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::dialogue::{Asked, Pending};
use super::registry::{Held, Taken};
use crate::answers::reason;
use crate::error::ApiError;
use crate::events::{self, DONE};

/// Events that a client has not taken yet; with more, the answer waits.
const BACKLOG: usize = 64;

/// What is told of an answer.
#[derive(Debug)]
enum Told {
    Waiting(usize),
    Text(String),
    /// The end, with what it came to.
    Done(Value),
    Failed(ApiError),
}

/// An answer in a session. It is kept to its end by a task of its own, because the session is on its way with it; a client
/// that leaves ends the answer, and what was said by then stays.
#[derive(Debug)]
pub(super) struct Saying {
    told: Receiver<Told>,
    over: bool,
}

impl Saying {
    /// Asks the engine, and waits until it is known that an answer comes.
    pub async fn begin(
        taken: Taken,
        engine: &Engine,
        scope: &str,
        content: String,
        mut config: GenerationConfig,
    ) -> Result<Self, ApiError> {
        let (taken, asked) = taken.change(move |dialogue| dialogue.ask(&content)).await?;
        config.max_tokens = Some(config.max_tokens.map_or(asked.room, |most| most.min(asked.room)));
        let Asked { session, prompt, asked, .. } = asked;
        let request = taken.dialogue.served.request(prompt).with_config(config);
        let mut answering = engine.generate(request.in_session(session).in_scope(scope));
        let first = match next(&mut answering).await {
            Some(Event::Failed(failure)) => return Err(failure.error.into()),
            first => first,
        };
        let (sender, told) = channel(BACKLOG);
        tokio::spawn(keep(taken, asked, answering, first, sender));
        Ok(Self { told, over: false })
    }

    /// All of it, once it is there.
    pub async fn whole(mut self) -> Result<Value, ApiError> {
        while let Some(told) = self.told.recv().await {
            match told {
                Told::Done(value) => return Ok(value),
                Told::Failed(error) => return Err(error),
                Told::Waiting(_) | Told::Text(_) => {}
            }
        }
        Err(ApiError::over())
    }

    /// As it comes.
    pub fn stream(self) -> Response {
        events::response(self)
    }
}

impl Stream for Saying {
    type Item = Result<Vec<u8>, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        let told = ready!(self.told.poll_recv(context)).unwrap_or_else(|| Told::Failed(ApiError::over()));
        let event = |value: Value| format!("data: {value}\n\n");
        self.over = matches!(told, Told::Done(_) | Told::Failed(_));
        let events = match told {
            Told::Waiting(place) => event(json!({ "type": "waiting", "place": place })),
            Told::Text(text) => event(json!({ "type": "delta", "text": text })),
            Told::Done(mut value) => {
                value["type"] = "done".into();
                event(value) + DONE
            }
            Told::Failed(error) => error.event() + DONE,
        };
        Poll::Ready(Some(Ok(events.into_bytes())))
    }
}

async fn next(answering: &mut Answering) -> Option<Event> {
    poll_fn(|context| Pin::new(&mut *answering).poll_next(context)).await
}

/// Takes an answer to its end, and the session back.
async fn keep(
    taken: Taken,
    asked: Pending,
    mut answering: Answering,
    mut first: Option<Event>,
    told: Sender<Told>,
) {
    let mut is_heard = true;
    loop {
        let event = match first.take() {
            Some(event) => Some(event),
            None if is_heard => tokio::select! {
                event = next(&mut answering) => event,
                () = told.closed() => {
                    is_heard = false;
                    answering.cancel();
                    continue;
                }
            },
            None => next(&mut answering).await,
        };
        let end = match event {
            Some(Event::Waiting { place }) => {
                let _ = told.send(Told::Waiting(place)).await;
                continue;
            }
            Some(Event::Piece(piece)) => {
                if !piece.text.is_empty() {
                    let _ = told.send(Told::Text(piece.text)).await;
                }
                continue;
            }
            Some(Event::Finished(outcome)) => {
                let summary = &outcome.summary;
                let mut value = json!({
                    "answer": summary.text,
                    "finish_reason": reason(summary.finish, 0),
                    "usage": {
                        "prompt_tokens": summary.prompt_tokens,
                        "completion_tokens": summary.tokens.len(),
                        "total_tokens": summary.prompt_tokens + summary.tokens.len(),
                        "prompt_tokens_details": { "cached_tokens": outcome.cached_tokens },
                    },
                    "ttft_ms": summary.ttft_ms,
                    "tokens_per_second": summary.decode_tps,
                });
                match taken.change(move |dialogue| dialogue.answered(asked, *outcome)).await {
                    Ok((done, ())) => {
                        value["session"] = let_go(done);
                        Told::Done(value)
                    }
                    Err(error) => Told::Failed(error),
                }
            }
            Some(Event::Failed(failure)) => {
                drop(taken);
                Told::Failed(failure.error.into())
            }
            None => Told::Failed(ApiError::over()),
        };
        let _ = told.send(end).await;
        return;
    }
}

/// As the session is once the next request may change it.
fn let_go(taken: Taken) -> Value {
    let held: Arc<Held> = taken.let_go();
    held.value()
}
