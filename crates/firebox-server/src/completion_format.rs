//! Builds chat and text completions, whole or as a stream of chunks.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use firebox_engine::Event;
use firebox_runtime::Piece;
use firebox_text::{Detokenizer, Tokenizer};
use futures_core::Stream;
use serde_json::{Value, json};

use crate::answer_parser::{AnswerFormat, AnswerParser, OutputPart};
use crate::choices::Choices;
use crate::error::ApiError;
use crate::logprobs::{self, CompletionLogprobs};
use crate::response_meta::{ResponseMeta, finish_reason};
use crate::sse::DONE;

/// The format of responses: chat or text completions.
#[derive(Debug, Clone)]
pub(crate) struct CompletionFormat {
    pub meta: ResponseMeta,
    pub is_chat: bool,
    /// Absent for models without a tokenizer.
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub answer: AnswerFormat,
}

/// The accumulated output of one choice.
#[derive(Debug, Default)]
struct ChoiceState {
    parser: AnswerParser,
    thought: String,
    text: String,
    calls: Vec<Value>,
    /// Decodes the tokens to count the characters before each.
    detokenizer: Option<Detokenizer>,
    characters: usize,
    chat_logprobs: Vec<Value>,
    completion_logprobs: CompletionLogprobs,
    /// True once the role was sent.
    has_role: bool,
}

impl ChoiceState {
    fn new(format: &CompletionFormat) -> Self {
        Self { parser: AnswerParser::new(&format.answer), ..Self::default() }
    }

    /// Appends parsed output.
    fn append(&mut self, parts: Vec<OutputPart>) {
        for part in parts {
            match part {
                OutputPart::Thought(thought) => self.thought.push_str(&thought),
                OutputPart::Text(text) => self.text.push_str(&text),
                OutputPart::CallEnd(call) => self.calls.push(call.value()),
                OutputPart::CallStart(_) | OutputPart::Arguments { .. } => {}
            }
        }
    }

    /// Records a token's log-probabilities, and returns true if it has any.
    fn record_logprobs(&mut self, format: &CompletionFormat, piece: &Piece) -> bool {
        let (Some(token), Some(found), Some(tokenizer)) = (piece.token, &piece.logprobs, &format.tokenizer)
        else {
            return false;
        };
        if format.is_chat {
            self.chat_logprobs.push(logprobs::chat_logprob(tokenizer, token, found));
        } else {
            self.completion_logprobs.push(tokenizer, token, found, self.characters);
            let detokenizer =
                self.detokenizer.get_or_insert_with(|| Detokenizer::continuing(tokenizer, true));
            self.characters += detokenizer.push(token).chars().count();
        }
        true
    }

    /// Takes the log-probabilities recorded since the last call.
    fn take_logprobs(&mut self, format: &CompletionFormat, any: bool) -> Value {
        match (any, format.is_chat) {
            (false, _) => Value::Null,
            (true, true) => json!({ "content": std::mem::take(&mut self.chat_logprobs), "refusal": null }),
            (true, false) => std::mem::take(&mut self.completion_logprobs).value(),
        }
    }
}

impl CompletionFormat {
    /// Waits for all choices and returns the whole response.
    pub async fn collect(self, mut choices: Choices) -> Result<Value, ApiError> {
        let mut states: Vec<ChoiceState> = (0..choices.len()).map(|_| ChoiceState::new(&self)).collect();
        let mut likely = false;
        let mut values = vec![Value::Null; choices.len()];
        while let Some((index, event)) = choices.next().await {
            match event {
                Event::Piece(piece) => {
                    let state = &mut states[index];
                    likely |= state.record_logprobs(&self, &piece);
                    let parts = state.parser.push(&piece, self.tokenizer.as_deref());
                    state.append(parts);
                }
                Event::Failed(failure) => return Err(choices.error_of(index, failure.error)),
                Event::Finished(outcome) => {
                    let state = &mut states[index];
                    let parts = state.parser.finish();
                    state.append(parts);
                    choices.usage.thought += state.parser.thought_tokens();
                    let logprobs = state.take_logprobs(&self, likely);
                    let finish = finish_reason(outcome.summary.finish, state.parser.calls());
                    values[index] = self.choice(index, state, logprobs, finish);
                }
                _ => {}
            }
        }
        let object = if self.is_chat { "chat.completion" } else { "text_completion" };
        let mut value = self.meta.with(object, Value::Array(values));
        value["usage"] = choices.usage.value();
        Ok(value)
    }

    fn choice(&self, index: usize, state: &mut ChoiceState, logprobs: Value, finish: &str) -> Value {
        let (text, calls) = (std::mem::take(&mut state.text), std::mem::take(&mut state.calls));
        if !self.is_chat {
            return json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish });
        }
        let silent = text.is_empty() && !calls.is_empty();
        let content = if silent { Value::Null } else { text.into() };
        let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
        if !state.thought.is_empty() {
            message["reasoning_content"] = std::mem::take(&mut state.thought).into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish })
    }

    /// Builds a chunk of a choice. Neither the end of a choice nor that of a call adds content.
    fn part(&self, index: usize, part: Option<&OutputPart>, logprobs: Value, finish: Option<&str>) -> Value {
        if !self.is_chat {
            let text = if let Some(OutputPart::Text(text)) = part { text } else { "" };
            return json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish });
        }
        let delta = match part {
            None | Some(OutputPart::CallEnd(_)) => json!({}),
            Some(OutputPart::Thought(thought)) => json!({ "reasoning_content": thought }),
            Some(OutputPart::Text(text)) => json!({ "content": text }),
            Some(OutputPart::CallStart(call)) => json!({ "tool_calls": [call.start_value()] }),
            Some(OutputPart::Arguments { index, piece }) => {
                json!({ "tool_calls": [{ "index": index, "function": { "arguments": piece } }] })
            }
        };
        json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish })
    }
}

/// A response streamed as server-sent events.
pub(crate) struct CompletionStream {
    format: CompletionFormat,
    choices: Choices,
    states: Vec<ChoiceState>,
    /// True if the stream ends with the token counts.
    usage: bool,
    pending: VecDeque<Vec<u8>>,
    is_over: bool,
}

impl CompletionStream {
    pub fn new(format: CompletionFormat, choices: Choices, usage: bool) -> Self {
        let states = (0..choices.len()).map(|_| ChoiceState::new(&format)).collect();
        Self { format, choices, states, usage, pending: VecDeque::new(), is_over: false }
    }

    fn push(&mut self, choices: Value, usage: Value) {
        let object = if self.format.is_chat { "chat.completion.chunk" } else { "text_completion" };
        let mut value = self.format.meta.with(object, choices);
        if self.usage {
            value["usage"] = usage;
        }
        self.pending.push_back(line(&value));
    }

    fn handle(&mut self, index: usize, event: Event) {
        if self.format.is_chat && !std::mem::replace(&mut self.states[index].has_role, true) {
            let delta = json!({ "role": "assistant", "content": "" });
            let part = json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null });
            self.push(json!([part]), Value::Null);
        }
        match event {
            Event::Piece(piece) => {
                let state = &mut self.states[index];
                let any = state.record_logprobs(&self.format, &piece);
                let mut parts =
                    without_call_ends(state.parser.push(&piece, self.format.tokenizer.as_deref()));
                let mut logprobs = state.take_logprobs(&self.format, any);
                if any && parts.is_empty() {
                    parts.push(OutputPart::Text(String::new()));
                }
                for part in parts {
                    let part = self.format.part(index, Some(&part), logprobs.take(), None);
                    self.push(json!([part]), Value::Null);
                }
            }
            Event::Finished(outcome) => {
                let parser = &mut self.states[index].parser;
                let parts = without_call_ends(parser.finish());
                let finish = finish_reason(outcome.summary.finish, parser.calls());
                self.choices.usage.thought += parser.thought_tokens();
                for part in parts {
                    let part = self.format.part(index, Some(&part), Value::Null, None);
                    self.push(json!([part]), Value::Null);
                }
                let part = self.format.part(index, None, Value::Null, Some(finish));
                self.push(json!([part]), Value::Null);
            }
            Event::Failed(failure) => {
                let error = self.choices.error_of(index, failure.error);
                self.pending.push_back((error.event() + DONE).into_bytes());
                self.is_over = true;
            }
            _ => {}
        }
    }
}

impl Stream for CompletionStream {
    type Item = Result<Vec<u8>, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pending) = self.pending.pop_front() {
                return Poll::Ready(Some(Ok(pending)));
            }
            if self.is_over {
                return Poll::Ready(None);
            }
            match self.choices.poll_event(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some((index, event))) => self.handle(index, event),
                Poll::Ready(None) => {
                    self.is_over = true;
                    if self.usage {
                        let usage = self.choices.usage.value();
                        self.push(json!([]), usage);
                    }
                    self.pending.push_back(DONE.into());
                }
            }
        }
    }
}

/// Drops the ends of calls, which streams do not report.
fn without_call_ends(mut parts: Vec<OutputPart>) -> Vec<OutputPart> {
    parts.retain(|part| !matches!(part, OutputPart::CallEnd(_)));
    parts
}

fn line(value: &Value) -> Vec<u8> {
    format!("data: {value}\n\n").into_bytes()
}
