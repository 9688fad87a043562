//! `/v1/completions`: continues texts.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing;
use serde_json::Value;

use crate::answer_parser::AnswerFormat;
use crate::app::{App, Routes};
use crate::body_memory::ParsedBody;
use crate::catalog::SelectedModel;
use crate::choices::Choices;
use crate::completion_format::{CompletionFormat, CompletionStream};
use crate::error::ApiError;
use crate::extract::{Caller, JsonBody};
use crate::json_fields::JsonFields;
use crate::model_routing;
use crate::prompt_length;
use crate::response_meta::ResponseMeta;
use crate::sampling_params::{self, ResponseOptions};
#[cfg(test)]
use crate::schema::{Completion, CompletionRequest, StreamEvent};
use crate::served_model::ServedModel;
use crate::sse;

/// OpenAI's defaults and limits.
const DEFAULT_MAX_TOKENS: usize = 16;
const MAX_LOGPROBS: u64 = 20;

pub(crate) fn routes() -> Routes {
    Routes::new().route("/v1/completions", routing::post(complete))
}

/// A prompt as text or tokens.
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    /// Returns the length of its text.
    fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(_) => 0,
        }
    }

    pub fn encode(self, served: &ServedModel) -> Result<Vec<u32>, ApiError> {
        match self {
            Self::Text(text) => {
                let tokenizer = served.tokenizer()?;
                if let Some(context) = served.context {
                    prompt_length::check(tokenizer, &[&text], context)?;
                }
                Ok(tokenizer.encode(&text, true)?)
            }
            Self::Tokens(tokens) => Ok(tokens),
        }
    }
}

/// Continues texts.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/completions",
    tag = "text",
    request_body = CompletionRequest,
    responses((status = 200, description = "How the texts go on, or events with its parts", content((Completion = "application/json"), (StreamEvent = "text/event-stream"))), ApiError)
))]
pub(crate) async fn complete(
    State(app): State<Arc<App>>,
    Caller(scope): Caller,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    sse::respond(body["stream"] == true, sse::DONE, answer(app, scope, body)).await
}

async fn answer(app: Arc<App>, scope: String, body: ParsedBody) -> Result<Response, ApiError> {
    let fields = JsonFields::new(&body)?;
    let question = || {
        Ok(prompts(&fields, "prompt")?.into_iter().find_map(|prompt| match prompt {
            Prompt::Text(text) => Some(text),
            Prompt::Tokens(_) => None,
        }))
    };
    let attempt = |selected| answer_by(&app, &scope, &fields, selected);
    model_routing::answer(&app, fields.string("model")?, question, attempt).await
}

async fn answer_by(
    app: &App,
    scope: &str,
    fields: &JsonFields<'_>,
    selected: SelectedModel,
) -> Result<Response, ApiError> {
    let prompts = prompts(fields, "prompt")?;
    let response_options = ResponseOptions::new(fields)?;
    response_options.check_count(prompts.len(), app.max_choices(scope))?;
    let lacking = [("echo", Value::Bool(false)), ("suffix", "".into()), ("best_of", 1.into())];
    fields.reject_unsupported(lacking, "is not supported; leave it out")?;
    let mut config = sampling_params::generation_config(fields, &selected.served)?;
    config.continues = true;
    if ["max_tokens", "max_completion_tokens"].iter().all(|field| fields.get(field).is_none()) {
        config.max_tokens = Some(DEFAULT_MAX_TOKENS);
    }
    config.logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)?.map(|most| most as usize);
    let (field, grammar) = (sampling_params::grammar_field(fields), config.grammar.as_ref());
    let compiled = app.compile_grammar(field, grammar, &selected.served, scope).await?;
    let served = selected.served.clone();
    let bytes = prompts.iter().map(Prompt::bytes).sum();
    let encode = move || prompts.into_iter().map(|prompt| prompt.encode(&served)).collect();
    let prompts: Vec<Vec<u32>> = app.over_text(scope, bytes, encode).await?;
    if prompts.iter().any(Vec::is_empty) {
        return Err(fields.error("prompt", "is empty"));
    }
    let tokenizer = selected.served.tokenizer().ok().cloned();
    let choices = Choices::begin(app, &selected, scope, prompts, &config, compiled, response_options).await?;
    let format = CompletionFormat {
        meta: ResponseMeta::new("cmpl", &selected.name),
        is_chat: false,
        tokenizer,
        answer: AnswerFormat::default(),
    };
    if response_options.stream {
        return Ok(sse::response(CompletionStream::new(format, choices, response_options.include_usage)));
    }
    Ok(Json(format.collect(choices).await?).into_response())
}

/// Reads one or several prompts, as text or token ids.
pub(crate) fn prompts(fields: &JsonFields<'_>, field: &str) -> Result<Vec<Prompt>, ApiError> {
    let prompts: Vec<Prompt> = match fields.get(field) {
        Some(Value::Array(values)) if matches!(values.first(), Some(Value::Number(_))) => {
            vec![Prompt::Tokens(fields.tokens(field, values)?)]
        }
        Some(Value::Array(values)) if matches!(values.first(), Some(Value::Array(_))) => {
            let of = |(index, value): (usize, &Value)| {
                let field = format!("{field}[{index}]");
                let Value::Array(values) = value else {
                    return Err(fields.error(&field, "expected a list of token ids"));
                };
                Ok(Prompt::Tokens(fields.tokens(&field, values)?))
            };
            values.iter().enumerate().map(of).collect::<Result<_, _>>()?
        }
        _ => fields.strings(field)?.into_iter().map(|text| Prompt::Text(text.to_owned())).collect(),
    };
    if prompts.is_empty() {
        return Err(fields.error(field, "is missing"));
    }
    Ok(prompts)
}
