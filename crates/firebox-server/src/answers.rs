use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use firebox_model::ModelError;
use firebox_runtime::engine::{Answering, Event};
use firebox_runtime::{CacheError, Finish, GenerationConfig, PAGE_TOKENS, RuntimeError};
use futures_core::Stream as _;
use serde_json::{Value, json};

use crate::app::App;
use crate::catalog::Chosen;
use crate::error::ApiError;
use crate::wishes::Delivery;

/// The answers to one request. Dropping them ends those that are under way.
#[derive(Debug)]
pub(crate) struct Answers {
    choices: Vec<Choice>,
    /// Whose turn it is to be asked first, so that nobody is kept waiting by the others.
    turn: usize,
    /// Tokens that the model can ever have pages for, as far as that is planned.
    planned: usize,
    pub usage: Usage,
}

/// One of them.
#[derive(Debug)]
struct Choice {
    answering: Answering,
    /// What it said before anybody was told.
    first: Option<Event>,
    over: bool,
    /// Tokens of its prompt.
    prompt: usize,
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
        app: &App,
        chosen: &Chosen,
        scope: &str,
        prompts: Vec<Vec<u32>>,
        config: &GenerationConfig,
        delivery: Delivery,
    ) -> Result<Self, ApiError> {
        let mut choices = Vec::new();
        let mut usage = Usage::default();
        let planned = app.catalog.most_tokens(&chosen.served.model);
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
                let answering = app.engine.generate(request);
                let (prompt, counts) = (prompt.len(), nth == 0);
                choices.push(Choice { answering, first: None, over: false, prompt, counts });
            }
        }
        // Of all at once: who is refused is not to wait for others whose prompts are read.
        poll_fn(|context| {
            let mut all_known = true;
            for choice in choices.iter_mut().filter(|choice| choice.first.is_none()) {
                match Pin::new(&mut choice.answering).poll_next(context) {
                    Poll::Ready(Some(Event::Failed(failure))) => {
                        return Poll::Ready(Err(refusal(failure.error, choice.prompt, planned)));
                    }
                    Poll::Ready(first) => choice.first = first,
                    Poll::Pending => all_known = false,
                }
            }
            if all_known { Poll::Ready(Ok(())) } else { Poll::Pending }
        })
        .await?;
        Ok(Self { choices, turn: 0, planned, usage })
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

    /// What is told of one of them that has failed.
    pub fn refusal(&self, index: usize, error: RuntimeError) -> ApiError {
        refusal(error, self.choices[index].prompt, self.planned)
    }

    /// Waits for the next event.
    pub async fn next(&mut self) -> Option<(usize, Event)> {
        poll_fn(|context| self.poll_event(context)).await
    }
}

/// Who found no page may ask again once others have given some back. But who has a prompt that is longer than all pages there are,
/// with everything given up for them that can be, and than those that were ever planned, is never going to fit.
fn refusal(error: RuntimeError, prompt: usize, planned: usize) -> ApiError {
    let room = match &error {
        RuntimeError::Cache(CacheError::PoolExhausted { pages })
        | RuntimeError::Model(ModelError::Cache(CacheError::PoolExhausted { pages })) => {
            planned.max(pages.saturating_mul(PAGE_TOKENS))
        }
        _ => return error.into(),
    };
    if prompt < room { error.into() } else { ApiError::no_room(prompt + 1, room) }
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

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    #[test]
    fn only_what_could_fit_later_may_be_asked_again() {
        let full = |pages| RuntimeError::from(CacheError::PoolExhausted { pages });
        let within = |pages| RuntimeError::from(ModelError::Cache(CacheError::PoolExhausted { pages }));
        for (prompt, pages, planned, status) in [
            (10 * PAGE_TOKENS - 1, 10, 512, StatusCode::SERVICE_UNAVAILABLE),
            (10 * PAGE_TOKENS, 10, 512, StatusCode::BAD_REQUEST),
            // Others have the pages that were planned.
            (10 * PAGE_TOKENS, 2, 11 * PAGE_TOKENS, StatusCode::SERVICE_UNAVAILABLE),
            (11 * PAGE_TOKENS, 2, 11 * PAGE_TOKENS, StatusCode::BAD_REQUEST),
            // Nobody has planned anything.
            (1 << 20, 10, usize::MAX, StatusCode::SERVICE_UNAVAILABLE),
        ] {
            for error in [full(pages), within(pages)] {
                let told = refusal(error, prompt, planned);
                assert_eq!(told.status, status, "{prompt} tokens, {pages} pages, {planned} planned");
            }
        }
        let told = refusal(full(3), 500, 0).value();
        let long = ApiError::from(RuntimeError::ContextFull { tokens: 500, context: 384 }).value();
        for field in ["code", "type", "param"] {
            assert_eq!(told["error"][field], long["error"][field], "{field}");
        }
        let message = told["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("501 tokens") && message.contains("384") && message.contains("--memory"),
            "{message}"
        );
        let other = refusal(RuntimeError::EngineOver, 1 << 20, 0);
        assert_eq!(other, ApiError::over());
    }
}
