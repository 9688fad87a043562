//! The output of `/v1/responses`, whole or as a stream of events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use firebox_engine::Event;
use firebox_runtime::Finish;
use firebox_text::Tokenizer;
use futures_core::Stream;
use serde_json::{Value, json};

use crate::answer_parser::{AnswerParser, OutputPart, ToolCall};
use crate::choices::{Choices, Usage};
use crate::conversation_request::ConversationResponse;
use crate::error::ApiError;
use crate::logprobs::chat_logprob;

/// The output items of a response: reasoning, messages and function calls.
pub(super) struct Output {
    /// The response without its output items.
    response_base: Value,
    choices: Choices,
    parser: AnswerParser,
    tokenizer: Arc<Tokenizer>,
    items: Vec<Value>,
    open_item: Option<OpenItem>,
    /// Log-probabilities of tokens whose text has not been added.
    pending_logprobs: Vec<Value>,
    /// Id of the open call's item.
    call_id: String,
    /// Events to be sent; absent unless the response is streamed.
    pending: Option<VecDeque<Vec<u8>>>,
    events: u64,
    is_over: bool,
}

/// An item whose text may go on.
struct OpenItem {
    kind: ItemKind,
    id: String,
    text: String,
    logprobs: Vec<Value>,
}

/// The kind of an item that has a text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ItemKind {
    Message,
    Reasoning,
}

impl ItemKind {
    fn id_prefix(self) -> &'static str {
        match self {
            Self::Message => "msg",
            Self::Reasoning => "rs",
        }
    }

    /// The name of its text in events and parts.
    fn text(self) -> &'static str {
        match self {
            Self::Message => "output_text",
            Self::Reasoning => "reasoning_text",
        }
    }

    fn item(self, id: &str, status: &str, content: Value) -> Value {
        match self {
            Self::Message => {
                json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": content })
            }
            Self::Reasoning => {
                json!({ "id": id, "type": "reasoning", "status": status, "summary": [], "content": content })
            }
        }
    }

    fn part(self, text: &str, logprobs: Vec<Value>) -> Value {
        let mut part = json!({ "type": self.text(), "text": text });
        if self == Self::Message {
            part["annotations"] = json!([]);
            part["logprobs"] = logprobs.into();
        }
        part
    }
}

impl Output {
    pub fn new(response_base: Value, response: ConversationResponse) -> Self {
        Self {
            response_base,
            parser: AnswerParser::new(&response.answer),
            choices: response.choices,
            tokenizer: response.tokenizer,
            items: Vec::new(),
            open_item: None,
            pending_logprobs: Vec::new(),
            call_id: String::new(),
            pending: None,
            events: 0,
            is_over: false,
        }
    }

    /// Waits for the whole response.
    pub async fn collect(mut self) -> Result<Value, ApiError> {
        while let Some((index, event)) = self.choices.next().await {
            if let Event::Failed(failure) = event {
                return Err(self.choices.error_of(index, failure.error));
            }
            self.handle(index, event);
        }
        Ok(self.response())
    }

    /// Turns the response into a stream of events.
    pub fn into_stream(mut self) -> Self {
        self.pending = Some(VecDeque::new());
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response();
            self.emit(kind, json!({ "response": response }));
        }
        self
    }

    /// Returns the response so far.
    fn response(&self) -> Value {
        let mut response = self.response_base.clone();
        response["output"] = self.items.clone().into();
        response
    }

    fn emit(&mut self, kind: &str, mut event: Value) {
        let Some(pending) = &mut self.pending else { return };
        event["type"] = kind.into();
        event["sequence_number"] = self.events.into();
        self.events += 1;
        pending.push_back(format!("event: {kind}\ndata: {event}\n\n").into_bytes());
    }

    fn handle(&mut self, index: usize, event: Event) {
        match event {
            Event::Piece(piece) => {
                if let (Some(token), Some(found)) = (piece.token, &piece.logprobs) {
                    self.pending_logprobs.push(chat_logprob(&self.tokenizer, token, found));
                }
                for part in self.parser.push(&piece, Some(&self.tokenizer)) {
                    self.add_part(part, "completed");
                }
            }
            Event::Finished(outcome) => {
                let cut = matches!(outcome.summary.finish, Finish::Length | Finish::Repetition);
                let status = if cut { "incomplete" } else { "completed" };
                for part in self.parser.finish() {
                    self.add_part(part, status);
                }
                if self.items.is_empty() && self.open_item.is_none() {
                    self.add_text(ItemKind::Message, "");
                }
                self.close_item(status);
                self.choices.usage.thought += self.parser.thought_tokens();
                self.response_base["usage"] = usage(self.choices.usage);
                self.response_base["status"] = status.into();
                if cut {
                    self.response_base["incomplete_details"] = json!({ "reason": "max_output_tokens" });
                }
                let response = self.response();
                let kind = if cut { "response.incomplete" } else { "response.completed" };
                self.emit(kind, json!({ "response": response }));
            }
            Event::Failed(failure) => {
                let error = self.choices.error_of(index, failure.error).value();
                for part in self.parser.finish() {
                    self.add_part(part, "incomplete");
                }
                self.close_item("incomplete");
                self.response_base["status"] = "failed".into();
                self.response_base["error"] =
                    json!({ "code": "server_error", "message": error["error"]["message"] });
                let response = self.response();
                self.emit("response.failed", json!({ "response": response }));
                self.is_over = true;
            }
            _ => {}
        }
    }

    /// Adds a part of the answer; `status` is that of a call that it ends.
    fn add_part(&mut self, part: OutputPart, status: &str) {
        match part {
            OutputPart::Thought(thought) => self.add_text(ItemKind::Reasoning, &thought),
            OutputPart::Text(text) => self.add_text(ItemKind::Message, &text),
            OutputPart::CallStart(call) => self.begin_call(&call),
            OutputPart::Arguments { piece, .. } => {
                let at = self.items.len();
                let delta = json!({ "item_id": self.call_id, "output_index": at, "delta": piece });
                self.emit("response.function_call_arguments.delta", delta);
            }
            OutputPart::CallEnd(call) => self.end_call(&call, status),
        }
    }

    /// Adds text to the open item, or to a new one if that is of another kind.
    fn add_text(&mut self, kind: ItemKind, text: &str) {
        if self.open_item.as_ref().is_some_and(|open| open.kind != kind) {
            self.close_item("completed");
        }
        let at = self.items.len();
        if self.open_item.is_none() {
            let id = format!("{}_{}", kind.id_prefix(), crate::ids::random_id());
            let item = kind.item(&id, "in_progress", json!([]));
            self.emit("response.output_item.added", json!({ "output_index": at, "item": item }));
            let part = kind.part("", Vec::new());
            let part = json!({ "item_id": id, "output_index": at, "content_index": 0, "part": part });
            self.emit("response.content_part.added", part);
            self.open_item = Some(OpenItem { kind, id, text: String::new(), logprobs: Vec::new() });
        }
        let Some(open) = &mut self.open_item else { return };
        open.text.push_str(text);
        let logprobs = std::mem::take(&mut self.pending_logprobs);
        let mut delta = json!({ "item_id": open.id, "output_index": at, "content_index": 0, "delta": text });
        if kind == ItemKind::Message {
            delta["logprobs"] = logprobs.clone().into();
        }
        open.logprobs.extend(logprobs);
        self.emit(&format!("response.{}.delta", kind.text()), delta);
    }

    /// Ends the open item, if any.
    fn close_item(&mut self, status: &str) {
        let rest = std::mem::take(&mut self.pending_logprobs);
        let Some(OpenItem { kind, id, text, mut logprobs }) = self.open_item.take() else { return };
        // The last tokens may have no text.
        logprobs.extend(rest);
        let at = self.items.len();
        let mut done = json!({ "item_id": id, "output_index": at, "content_index": 0, "text": text });
        if kind == ItemKind::Message {
            done["logprobs"] = logprobs.clone().into();
        }
        self.emit(&format!("response.{}.done", kind.text()), done);
        let part = kind.part(&text, logprobs);
        let done = json!({ "item_id": id, "output_index": at, "content_index": 0, "part": part });
        self.emit("response.content_part.done", done);
        let item = kind.item(&id, status, json!([part]));
        self.emit("response.output_item.done", json!({ "output_index": at, "item": item }));
        self.items.push(item);
    }

    /// Starts a call.
    fn begin_call(&mut self, call: &ToolCall) {
        self.close_item("completed");
        self.call_id = format!("fc_{}", crate::ids::random_id());
        let item = function_call(&self.call_id, call, "in_progress");
        self.emit("response.output_item.added", json!({ "output_index": self.items.len(), "item": item }));
    }

    /// Ends the open call.
    fn end_call(&mut self, call: &ToolCall, status: &str) {
        // The tokens of a call belong to no text.
        self.pending_logprobs.clear();
        let at = self.items.len();
        let done = json!({
            "item_id": self.call_id, "output_index": at, "name": call.name, "arguments": call.arguments,
        });
        self.emit("response.function_call_arguments.done", done);
        let item = function_call(&self.call_id, call, status);
        self.emit("response.output_item.done", json!({ "output_index": at, "item": item }));
        self.items.push(item);
    }
}

impl Stream for Output {
    type Item = Result<Vec<u8>, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pending) = self.pending.as_mut().and_then(VecDeque::pop_front) {
                return Poll::Ready(Some(Ok(pending)));
            }
            if self.is_over {
                return Poll::Ready(None);
            }
            match self.choices.poll_event(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some((index, event))) => self.handle(index, event),
                Poll::Ready(None) => self.is_over = true,
            }
        }
    }
}

fn function_call(id: &str, call: &ToolCall, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "status": status, "call_id": call.id, "name": call.name,
        "arguments": call.arguments,
    })
}

fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": { "cached_tokens": usage.cached },
        "output_tokens": usage.completion,
        "output_tokens_details": { "reasoning_tokens": usage.thought },
        "total_tokens": usage.prompt + usage.completion,
    })
}
