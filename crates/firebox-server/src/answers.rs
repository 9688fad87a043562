use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use firebox_runtime::engine::{Answering, Engine, Event};
use firebox_runtime::{Finish, GenerationConfig};
use futures_core::Stream as _;
use serde_json::{Value, json};

use crate::catalog::Chosen;
use crate::error::ApiError;
use crate::wishes::Delivery;

/// The answers to one request. Dropping them ends those that are under way.
#[derive(Debug)]
pub(crate) struct Answers {
    choices: Vec<Choice>,
    /// Whose turn it is to be asked first, so that nobody is kept waiting by the others.
    turn: usize,
    pub usage: Usage,
}

/// One of them.
#[derive(Debug)]
struct Choice {
    answering: Answering,
    /// What it said before anybody was told.
    first: Option<Event>,
    over: bool,
    /// Whether it is the first to its prompt, whose tokens count once.
    counts: bool,
}

/// Tokens that a request took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub prompt: usize,
    /// Of these, those that did not have to go through the layers.
    pub cached: usize,
    pub completion: usize,
}

impl Usage {
    pub fn value(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": { "cached_tokens": self.cached },
        })
    }
}

impl Answers {
    /// Asks for answers to every prompt, and waits until it is known of all of them that they come.
    pub async fn begin(
        engine: &Engine,
        chosen: &Chosen,
        scope: &str,
        prompts: Vec<Vec<u32>>,
        config: &GenerationConfig,
        delivery: Delivery,
    ) -> Result<Self, ApiError> {
        let mut choices = Vec::new();
        let mut usage = Usage::default();
        for prompt in prompts {
            usage.prompt += prompt.len();
            for nth in 0..delivery.each {
                let mut config = config.clone();
                // The same seed would give the same answer.
                config.sampler.seed = config.sampler.seed.wrapping_add(nth as u64);
                let request = chosen.served.request(prompt.clone()).with_config(config);
                let mut request = request.in_scope(scope);
                if let Some(head) = &chosen.head {
                    request = request.wearing(head);
                }
                let answering = engine.generate(request);
                choices.push(Choice { answering, first: None, over: false, counts: nth == 0 });
            }
        }
        // Of all at once: who is refused is not to wait for others whose prompts are read.
        poll_fn(|context| {
            let mut all_known = true;
            for choice in choices.iter_mut().filter(|choice| choice.first.is_none()) {
                match Pin::new(&mut choice.answering).poll_next(context) {
                    Poll::Ready(Some(Event::Failed(failure))) => {
                        return Poll::Ready(Err(ApiError::from(failure.error)));
                    }
                    Poll::Ready(first) => choice.first = first,
                    Poll::Pending => all_known = false,
                }
            }
            if all_known { Poll::Ready(Ok(())) } else { Poll::Pending }
        })
        .await?;
        Ok(Self { choices, turn: 0, usage })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.choices.len()
    }

    /// What one of them says next; nothing once all have ended.
    pub fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Event)>> {
        let count = self.choices.len();
        for step in 0..count {
            let index = (self.turn + step) % count;
            let choice = &mut self.choices[index];
            if choice.over {
                continue;
            }
            let event = match choice.first.take() {
                Some(event) => Some(event),
                None => match Pin::new(&mut choice.answering).poll_next(context) {
                    Poll::Ready(event) => event,
                    Poll::Pending => continue,
                },
            };
            let Some(event) = event else {
                choice.over = true;
                continue;
            };
            choice.over = event.is_last();
            if let Event::Finished(outcome) = &event {
                self.usage.completion += outcome.summary.tokens.len();
                if choice.counts {
                    self.usage.cached += outcome.cached_tokens;
                }
            }
            self.turn = index + 1;
            return Poll::Ready(Some((index, event)));
        }
        if self.choices.iter().all(|choice| choice.over) { Poll::Ready(None) } else { Poll::Pending }
    }

    /// Waits for the next event.
    pub async fn next(&mut self) -> Option<(usize, Event)> {
        poll_fn(|context| self.poll_event(context)).await
    }
}

/// Why an answer ended that called so many tools, in OpenAI's words.
pub(crate) fn reason(finish: Finish, calls: usize) -> &'static str {
    match finish {
        Finish::Length => "length",
        Finish::Stop if calls > 0 => "tool_calls",
        Finish::Stop | Finish::Cancelled => "stop",
    }
}

/// What everything that is said of one request begins with.
#[derive(Debug, Clone)]
pub(crate) struct Heading {
    pub id: String,
    pub created: u64,
    pub model: Arc<str>,
}

impl Heading {
    pub fn new(kind: &str, model: &str) -> Self {
        Self { id: format!("{kind}-{}", crate::unique()), created: crate::now(), model: model.into() }
    }

    /// An object of a request, with its choices.
    pub fn with(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": &*self.model,
            "choices": choices,
        })
    }
}
