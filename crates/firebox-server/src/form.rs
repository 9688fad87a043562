use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};

use firebox_runtime::Piece;
use firebox_runtime::engine::Event;
use firebox_text::Tokenizer;
use serde_json::{Value, json};

use crate::answers::{Answers, Heading, reason};
use crate::error::ApiError;
use crate::http::Chunks;
use crate::likelihood::{self, OfCompletion};

/// What answers look like: those of a chat, or of a completion.
#[derive(Debug, Clone)]
pub(crate) struct Form {
    pub heading: Heading,
    pub is_chat: bool,
    /// Absent where only token ids are known.
    pub tokenizer: Option<Arc<Tokenizer>>,
}

/// What has been said of one answer.
#[derive(Debug, Default)]
struct Said {
    characters: usize,
    of_chat: Vec<Value>,
    of_completion: OfCompletion,
    /// Whether anybody has been told whose words these are.
    introduced: bool,
}

impl Said {
    /// Takes a token's log-probabilities in. Whether there were any.
    fn note(&mut self, form: &Form, piece: &Piece) -> bool {
        let mut any = false;
        if let (Some(token), Some(found), Some(tokenizer)) = (piece.token, &piece.logprobs, &form.tokenizer) {
            any = true;
            if form.is_chat {
                self.of_chat.push(likelihood::of_chat(tokenizer, token, found));
            } else {
                self.of_completion.push(tokenizer, token, found, self.characters);
            }
        }
        self.characters += piece.text.chars().count();
        any
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
        let mut said: Vec<Said> = (0..answers.len()).map(|_| Said::default()).collect();
        let mut likely = false;
        let mut choices = vec![Value::Null; answers.len()];
        while let Some((index, event)) = answers.next().await {
            match event {
                Event::Waiting { .. } => {}
                Event::Piece(piece) => likely |= said[index].note(&self, &piece),
                Event::Failed(failure) => return Err(failure.error.into()),
                Event::Finished(outcome) => {
                    let summary = &outcome.summary;
                    let logprobs = said[index].logprobs(&self, likely);
                    let finish = reason(summary.finish);
                    choices[index] = self.choice(index, &summary.text, logprobs, finish);
                }
            }
        }
        let object = if self.is_chat { "chat.completion" } else { "text_completion" };
        let mut value = self.heading.with(object, Value::Array(choices));
        value["usage"] = answers.usage.value();
        Ok(value)
    }

    fn choice(&self, index: usize, text: &str, logprobs: Value, finish: &str) -> Value {
        if !self.is_chat {
            return json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish });
        }
        let message = json!({ "role": "assistant", "content": text, "refusal": null });
        json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish })
    }

    /// A part of an answer.
    fn part(&self, index: usize, text: Option<&str>, logprobs: Value, finish: Option<&str>) -> Value {
        if !self.is_chat {
            let text = text.unwrap_or_default();
            return json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish });
        }
        let delta = text.map_or_else(|| json!({}), |text| json!({ "content": text }));
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
        let said = (0..answers.len()).map(|_| Said::default()).collect();
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
                let any = self.said[index].note(&self.form, &piece);
                if any || !piece.text.is_empty() {
                    let logprobs = self.said[index].logprobs(&self.form, any);
                    let part = self.form.part(index, Some(&piece.text), logprobs, None);
                    self.say(json!([part]), Value::Null);
                }
            }
            Event::Finished(outcome) => {
                let finish = reason(outcome.summary.finish);
                let part = self.form.part(index, None, Value::Null, Some(finish));
                self.say(json!([part]), Value::Null);
            }
            Event::Failed(failure) => {
                self.ready.push_back(line(&ApiError::from(failure.error).value()));
                self.over = true;
            }
        }
    }
}

impl Chunks for Streaming {
    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<u8>>> {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                return Poll::Ready(Some(ready));
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
                        self.say(json!([]), self.answers.usage.value());
                    }
                    self.ready.push_back(b"data: [DONE]\n\n".to_vec());
                }
            }
        }
    }
}

fn line(value: &Value) -> Vec<u8> {
    format!("data: {value}\n\n").into_bytes()
}
