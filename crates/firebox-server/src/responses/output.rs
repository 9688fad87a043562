use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use firebox_runtime::Finish;
use firebox_runtime::engine::Event;
use firebox_text::Tokenizer;
use futures_core::Stream;
use serde_json::{Value, json};

use crate::answers::{Answers, Usage};
use crate::error::ApiError;
use crate::listener::{Call, Heard, Listener};
use crate::turn::Answered;

/// What is answered, item by item: messages and calls of tools.
pub(super) struct Output {
    /// The response as far as it came, without its items.
    about: Value,
    answers: Answers,
    listener: Listener,
    tokenizer: Arc<Tokenizer>,
    items: Vec<Value>,
    /// The message that is being said: its id and its text.
    open: Option<(String, String)>,
    /// The id of the call that is being made.
    calling: String,
    /// Events nobody has been told of. Nobody is where all is told at once.
    ready: Option<VecDeque<Vec<u8>>>,
    events: u64,
    over: bool,
}

impl Output {
    pub fn new(about: Value, answered: Answered) -> Self {
        Self {
            about,
            listener: Listener::new(answered.listening.as_ref()),
            answers: answered.answers,
            tokenizer: answered.tokenizer,
            items: Vec::new(),
            open: None,
            calling: String::new(),
            ready: None,
            events: 0,
            over: false,
        }
    }

    /// Everything at once, when it is there.
    pub async fn whole(mut self) -> Result<Value, ApiError> {
        while let Some((index, event)) = self.answers.next().await {
            if let Event::Failed(failure) = event {
                return Err(self.answers.refusal(index, failure.error));
            }
            self.took(index, event);
        }
        Ok(self.response())
    }

    /// All of it in events, as it comes.
    pub fn streamed(mut self) -> Self {
        self.ready = Some(VecDeque::new());
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response();
            self.tell(kind, json!({ "response": response }));
        }
        self
    }

    /// The response as it is now.
    fn response(&self) -> Value {
        let mut response = self.about.clone();
        response["output"] = self.items.clone().into();
        response
    }

    fn tell(&mut self, kind: &str, mut event: Value) {
        let Some(ready) = &mut self.ready else { return };
        event["type"] = kind.into();
        event["sequence_number"] = self.events.into();
        self.events += 1;
        ready.push_back(format!("event: {kind}\ndata: {event}\n\n").into_bytes());
    }

    fn took(&mut self, index: usize, event: Event) {
        match event {
            Event::Waiting { .. } => {}
            Event::Piece(piece) => {
                for heard in self.listener.hear(&piece, Some(&self.tokenizer)) {
                    self.say(heard, "completed");
                }
            }
            Event::Finished(outcome) => {
                let cut = outcome.summary.finish == Finish::Length;
                let status = if cut { "incomplete" } else { "completed" };
                for heard in self.listener.end() {
                    self.say(heard, status);
                }
                if self.items.is_empty() && self.open.is_none() {
                    self.speak("");
                }
                self.close(status);
                self.about["usage"] = usage(self.answers.usage);
                self.about["status"] = status.into();
                if cut {
                    self.about["incomplete_details"] = json!({ "reason": "max_output_tokens" });
                }
                let response = self.response();
                let kind = if cut { "response.incomplete" } else { "response.completed" };
                self.tell(kind, json!({ "response": response }));
            }
            Event::Failed(failure) => {
                let error = self.answers.refusal(index, failure.error).value();
                for heard in self.listener.end() {
                    self.say(heard, "incomplete");
                }
                self.close("incomplete");
                self.about["status"] = "failed".into();
                self.about["error"] = json!({ "code": "server_error", "message": error["error"]["message"] });
                let response = self.response();
                self.tell("response.failed", json!({ "response": response }));
                self.over = true;
            }
        }
    }

    /// Takes in what was heard; a call that ends with it ends so.
    fn say(&mut self, heard: Heard, status: &str) {
        match heard {
            Heard::Text(text) => self.speak(&text),
            Heard::Calling(call) => self.begin(&call),
            Heard::Arguments { piece, .. } => {
                let at = self.items.len();
                let delta = json!({ "item_id": self.calling, "output_index": at, "delta": piece });
                self.tell("response.function_call_arguments.delta", delta);
            }
            Heard::Call(call) => self.call(&call, status),
        }
    }

    fn speak(&mut self, text: &str) {
        let at = self.items.len();
        if self.open.is_none() {
            let id = format!("msg_{}", crate::unique());
            let item = message(&id, "in_progress", json!([]));
            self.tell("response.output_item.added", json!({ "output_index": at, "item": item }));
            let part = json!({ "item_id": id, "output_index": at, "content_index": 0, "part": spoken("") });
            self.tell("response.content_part.added", part);
            self.open = Some((id, String::new()));
        }
        let Some((id, said)) = &mut self.open else { return };
        said.push_str(text);
        let delta = json!({
            "item_id": *id, "output_index": at, "content_index": 0, "delta": text, "logprobs": [],
        });
        self.tell("response.output_text.delta", delta);
    }

    /// Ends the message that is being said, if there is one.
    fn close(&mut self, status: &str) {
        let Some((id, text)) = self.open.take() else { return };
        let at = self.items.len();
        let done = json!({
            "item_id": id, "output_index": at, "content_index": 0, "text": text, "logprobs": [],
        });
        self.tell("response.output_text.done", done);
        let part = spoken(&text);
        let done = json!({ "item_id": id, "output_index": at, "content_index": 0, "part": part });
        self.tell("response.content_part.done", done);
        let item = message(&id, status, json!([part]));
        self.tell("response.output_item.done", json!({ "output_index": at, "item": item }));
        self.items.push(item);
    }

    /// Begins a call.
    fn begin(&mut self, call: &Call) {
        self.close("completed");
        self.calling = format!("fc_{}", crate::unique());
        let item = called(&self.calling, call, "in_progress");
        self.tell("response.output_item.added", json!({ "output_index": self.items.len(), "item": item }));
    }

    /// Ends the call that was begun.
    fn call(&mut self, call: &Call, status: &str) {
        let at = self.items.len();
        let done = json!({
            "item_id": self.calling, "output_index": at, "name": call.name, "arguments": call.arguments,
        });
        self.tell("response.function_call_arguments.done", done);
        let item = called(&self.calling, call, status);
        self.tell("response.output_item.done", json!({ "output_index": at, "item": item }));
        self.items.push(item);
    }
}

impl Stream for Output {
    type Item = Result<Vec<u8>, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(ready) = self.ready.as_mut().and_then(VecDeque::pop_front) {
                return Poll::Ready(Some(Ok(ready)));
            }
            if self.over {
                return Poll::Ready(None);
            }
            match self.answers.poll_event(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some((index, event))) => self.took(index, event),
                Poll::Ready(None) => self.over = true,
            }
        }
    }
}

fn message(id: &str, status: &str, content: Value) -> Value {
    json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": content })
}

fn called(id: &str, call: &Call, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "status": status, "call_id": call.id, "name": call.name,
        "arguments": call.arguments,
    })
}

fn spoken(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": { "cached_tokens": usage.cached },
        "output_tokens": usage.completion,
        "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": usage.prompt + usage.completion,
    })
}
