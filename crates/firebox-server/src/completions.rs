//! `/v1/completions`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use serde_json::Value;
use utoipa_axum::routes;

use crate::answers::{Answers, Heading};
use crate::app::{App, Routes, blocking};
use crate::asked::{Asked, Caller};
use crate::error::ApiError;
use crate::events;
use crate::fields::Fields;
use crate::form::{Form, Streaming};
use crate::schema::{Completion, CompletionRequest, StreamEvent};
use crate::served::Served;
use crate::wishes::{self, Delivery};

/// What OpenAI's API has where a request says nothing.
const MOST_TOKENS: usize = 16;
const MOST_LOGPROBS: u64 = 20;

pub(crate) fn routes() -> Routes {
    Routes::new().routes(routes!(complete))
}

/// What is to be continued.
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    pub fn encode(self, served: &Served) -> Result<Vec<u32>, ApiError> {
        match self {
            Self::Text(text) => Ok(served.tokenizer()?.encode(&text, true)?),
            Self::Tokens(tokens) => Ok(tokens),
        }
    }
}

/// Texts that are continued.
#[utoipa::path(
    post,
    path = "/v1/completions",
    tag = "text",
    request_body = CompletionRequest,
    responses((status = 200, description = "How the texts go on, or events with its parts", content((Completion = "application/json"), (StreamEvent = "text/event-stream"))), ApiError)
)]
async fn complete(
    State(app): State<Arc<App>>,
    Caller(scope): Caller,
    Asked(body): Asked,
) -> Result<Response, ApiError> {
    events::soon(body["stream"] == true, events::DONE, answer(app, scope, body)).await
}

async fn answer(app: Arc<App>, scope: String, body: Value) -> Result<Response, ApiError> {
    let fields = Fields::of(&body)?;
    let chosen = app.catalog.find(fields.text("model")?).await?;
    let prompts = prompts(&fields, "prompt")?;
    let delivery = Delivery::of(&fields)?;
    delivery.expect_few(prompts.len(), app.limits.answers)?;
    let lacking = [("echo", Value::Bool(false)), ("suffix", "".into()), ("best_of", 1.into())];
    fields.expect_unasked(lacking, "is not there so far; leave it out")?;
    let mut config = wishes::config(&fields, &chosen.served)?;
    config.continues = true;
    if ["max_tokens", "max_completion_tokens"].iter().all(|field| fields.get(field).is_none()) {
        config.max_tokens = Some(MOST_TOKENS);
    }
    config.logprobs = fields.whole("logprobs", 0, MOST_LOGPROBS)?.map(|most| most as usize);
    app.check(wishes::form_field(&fields), config.grammar.as_ref(), &chosen.served).await?;
    let served = chosen.served.clone();
    let prompts = blocking(move || prompts.into_iter().map(|prompt| prompt.encode(&served)).collect());
    let prompts: Vec<Vec<u32>> = prompts.await?;
    if prompts.iter().any(Vec::is_empty) {
        return Err(fields.wrong("prompt", "is empty; there is nothing to continue"));
    }
    let tokenizer = chosen.served.tokenizer().ok().cloned();
    let answers = Answers::begin(&app, &chosen, &scope, prompts, &config, delivery).await?;
    let form =
        Form { heading: Heading::new("cmpl", &chosen.name), is_chat: false, tokenizer, listening: None };
    if delivery.stream {
        return Ok(events::response(Streaming::new(form, answers, delivery.usage)));
    }
    Ok(Json(form.whole(answers).await?).into_response())
}

/// One text or several, or their tokens.
pub(crate) fn prompts(fields: &Fields<'_>, field: &str) -> Result<Vec<Prompt>, ApiError> {
    let prompts: Vec<Prompt> = match fields.get(field) {
        Some(Value::Array(values)) if matches!(values.first(), Some(Value::Number(_))) => {
            vec![Prompt::Tokens(fields.tokens(field, values)?)]
        }
        Some(Value::Array(values)) if matches!(values.first(), Some(Value::Array(_))) => {
            let of = |(index, value): (usize, &Value)| {
                let field = format!("{field}[{index}]");
                let Value::Array(values) = value else {
                    return Err(fields.wrong(&field, "expected a list of token ids"));
                };
                Ok(Prompt::Tokens(fields.tokens(&field, values)?))
            };
            values.iter().enumerate().map(of).collect::<Result<_, _>>()?
        }
        _ => fields.texts(field)?.into_iter().map(|text| Prompt::Text(text.to_owned())).collect(),
    };
    if prompts.is_empty() {
        return Err(fields.wrong(field, "is missing"));
    }
    Ok(prompts)
}
