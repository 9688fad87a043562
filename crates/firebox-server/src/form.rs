use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use firebox_runtime::Piece;
use firebox_runtime::engine::Event;
use firebox_text::{Detokenizer, Tokenizer};
use futures_core::Stream;
use serde_json::{Value, json};

use crate::answers::{Answers, Heading, reason};
use crate::error::ApiError;
use crate::events::DONE;
use crate::likelihood::{self, OfCompletion};
use crate::listener::{Heard, Listener, Listening};

/// What answers look like: those of a chat, or of a completion.
#[derive(Debug, Clone)]
pub(crate) struct Form {
    pub heading: Heading,
    pub is_chat: bool,
    /// Absent where only token ids are known.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Absent where no tools can be called.
    pub listening: Option<Listening>,
}

/// What has been said of one answer.
#[derive(Debug, Default)]
struct Said {
    listener: Listener,
    text: String,
    calls: Vec<Value>,
    /// What its tokens come to, whether it has been handed out or not.
    decoded: Option<Detokenizer>,
    characters: usize,
    of_chat: Vec<Value>,
    of_completion: OfCompletion,
    /// Whether anybody has been told whose words these are.
    introduced: bool,
}

impl Said {
    fn new(form: &Form) -> Self {
        Self { listener: Listener::new(form.listening.as_ref()), ..Self::default() }
    }

    /// Keeps what was heard.
    fn keep(&mut self, heard: Vec<Heard>) {
        for heard in heard {
            match heard {
                Heard::Text(text) => self.text.push_str(&text),
                Heard::Call(call) => self.calls.push(call.value()),
                Heard::Calling(_) | Heard::Arguments { .. } => {}
            }
        }
    }

    /// Takes a token's log-probabilities in. Whether there were any.
    fn note(&mut self, form: &Form, piece: &Piece) -> bool {
        let (Some(token), Some(found), Some(tokenizer)) = (piece.token, &piece.logprobs, &form.tokenizer)
        else {
            return false;
        };
        if form.is_chat {
            self.of_chat.push(likelihood::of_chat(tokenizer, token, found));
        } else {
            self.of_completion.push(tokenizer, token, found, self.characters);
            let decoded = self.decoded.get_or_insert_with(|| Detokenizer::continuing(tokenizer, true));
            self.characters += decoded.push(token).chars().count();
        }
        true
    }

    /// What was taken in since this was last asked.
    fn logprobs(&mut self, form: &Form, any: bool) -> Value {
        match (any, form.is_chat) {
            (false, _) => Value::Null,
            (true, true) => json!({ "content": std::mem::take(&mut self.of_chat), "refusal": null }),
            (true, false) => std::mem::take(&mut self.of_completion).value(),
        }
    }
}

impl Form {
    /// Everything at once, when it is there.
    pub async fn whole(self, mut answers: Answers) -> Result<Value, ApiError> {
        let mut said: Vec<Said> = (0..answers.len()).map(|_| Said::new(&self)).collect();
        let mut likely = false;
        let mut choices = vec![Value::Null; answers.len()];
        while let Some((index, event)) = answers.next().await {
            match event {
                Event::Waiting { .. } => {}
                Event::Piece(piece) => {
                    let said = &mut said[index];
                    likely |= said.note(&self, &piece);
                    let heard = said.listener.hear(&piece, self.tokenizer.as_deref());
                    said.keep(heard);
                }
                Event::Failed(failure) => return Err(answers.refusal(index, failure.error)),
                Event::Finished(outcome) => {
                    let said = &mut said[index];
                    let heard = said.listener.end();
                    said.keep(heard);
                    let logprobs = said.logprobs(&self, likely);
                    let finish = reason(outcome.summary.finish, said.listener.calls());
                    choices[index] = self.choice(index, said, logprobs, finish);
                }
            }
        }
        let object = if self.is_chat { "chat.completion" } else { "text_completion" };
        let mut value = self.heading.with(object, Value::Array(choices));
        value["usage"] = answers.usage.value();
        Ok(value)
    }

    fn choice(&self, index: usize, said: &mut Said, logprobs: Value, finish: &str) -> Value {
        let (text, calls) = (std::mem::take(&mut said.text), std::mem::take(&mut said.calls));
        if !self.is_chat {
            return json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish });
        }
        let silent = text.is_empty() && !calls.is_empty();
        let content = if silent { Value::Null } else { text.into() };
        let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish })
    }

    /// A part of an answer; its end says nothing any more, nor does that of a call.
    fn part(&self, index: usize, heard: Option<&Heard>, logprobs: Value, finish: Option<&str>) -> Value {
        if !self.is_chat {
            let text = if let Some(Heard::Text(text)) = heard { text } else { "" };
            return json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish });
        }
        let delta = match heard {
            None | Some(Heard::Call(_)) => json!({}),
            Some(Heard::Text(text)) => json!({ "content": text }),
            Some(Heard::Calling(call)) => json!({ "tool_calls": [call.beginning()] }),
            Some(Heard::Arguments { index, piece }) => {
                json!({ "tool_calls": [{ "index": index, "function": { "arguments": piece } }] })
            }
        };
        json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish })
    }
}

/// Answers as they come, in events of which each is a line.
pub(crate) struct Streaming {
    form: Form,
    answers: Answers,
    said: Vec<Said>,
    /// Whether it ends with how many tokens it took.
    usage: bool,
    ready: VecDeque<Vec<u8>>,
    over: bool,
}

impl Streaming {
    pub fn new(form: Form, answers: Answers, usage: bool) -> Self {
        let said = (0..answers.len()).map(|_| Said::new(&form)).collect();
        Self { form, answers, said, usage, ready: VecDeque::new(), over: false }
    }

    fn say(&mut self, choices: Value, usage: Value) {
        let object = if self.form.is_chat { "chat.completion.chunk" } else { "text_completion" };
        let mut value = self.form.heading.with(object, choices);
        if self.usage {
            value["usage"] = usage;
        }
        self.ready.push_back(line(&value));
    }

    fn took(&mut self, index: usize, event: Event) {
        if self.form.is_chat && !std::mem::replace(&mut self.said[index].introduced, true) {
            let delta = json!({ "role": "assistant", "content": "" });
            let part = json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null });
            self.say(json!([part]), Value::Null);
        }
        match event {
            Event::Waiting { .. } => {}
            Event::Piece(piece) => {
                let said = &mut self.said[index];
                let any = said.note(&self.form, &piece);
                let mut heard = told(said.listener.hear(&piece, self.form.tokenizer.as_deref()));
                let mut logprobs = said.logprobs(&self.form, any);
                if any && heard.is_empty() {
                    heard.push(Heard::Text(String::new()));
                }
                for heard in heard {
                    let part = self.form.part(index, Some(&heard), logprobs.take(), None);
                    self.say(json!([part]), Value::Null);
                }
            }
            Event::Finished(outcome) => {
                let listener = &mut self.said[index].listener;
                let heard = told(listener.end());
                let finish = reason(outcome.summary.finish, listener.calls());
                for heard in heard {
                    let part = self.form.part(index, Some(&heard), Value::Null, None);
                    self.say(json!([part]), Value::Null);
                }
                let part = self.form.part(index, None, Value::Null, Some(finish));
                self.say(json!([part]), Value::Null);
            }
            Event::Failed(failure) => {
                let error = self.answers.refusal(index, failure.error);
                self.ready.push_back((error.event() + DONE).into_bytes());
                self.over = true;
            }
        }
    }
}

impl Stream for Streaming {
    type Item = Result<Vec<u8>, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(ready)));
            }
            if self.over {
                return Poll::Ready(None);
            }
            match self.answers.poll_event(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some((index, event))) => self.took(index, event),
                Poll::Ready(None) => {
                    self.over = true;
                    if self.usage {
                        let usage = self.answers.usage.value();
                        self.say(json!([]), usage);
                    }
                    self.ready.push_back(DONE.into());
                }
            }
        }
    }
}

/// What a stream tells of. That a call has come to its end is told by what follows.
fn told(mut heard: Vec<Heard>) -> Vec<Heard> {
    heard.retain(|heard| !matches!(heard, Heard::Call(_)));
    heard
}

fn line(value: &Value) -> Vec<u8> {
    format!("data: {value}\n\n").into_bytes()
}
