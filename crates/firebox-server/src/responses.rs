//! `/v1/responses`: OpenAI's newer API for conversations.

mod input;
mod output;
#[cfg(test)]
mod schema;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing;
use firebox_runtime::Grammar;
use serde_json::{Value, json};

use crate::app::{App, Routes};
use crate::body_memory::ParsedBody;
use crate::catalog::SelectedModel;
use crate::chat;
use crate::conversation_request::ConversationRequest;
use crate::error::ApiError;
use crate::extract::{Caller, JsonBody};
use crate::json_fields::JsonFields;
use crate::model_routing;
use crate::sampling_params::{self, ResponseOptions};
#[cfg(test)]
use crate::schema::StreamEvent;
use crate::sse;
use crate::tools::Tools;
use output::Output;
#[cfg(test)]
use schema::{ResponseBody, ResponseRequest};

/// Fields of chat completions, with their names here.
const CHAT_ONLY_FIELDS: [(&str, &str); 5] = [
    ("max_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", FORMAT_FIELD),
    ("json_schema", FORMAT_FIELD),
    ("grammar", FORMAT_FIELD),
];

/// The field that selects the output format.
const FORMAT_FIELD: &str = "text.format";

pub(crate) fn routes() -> Routes {
    Routes::new().route("/v1/responses", routing::post(respond))
}

/// Answers a conversation in the newer form of OpenAI's API, whole or in events. Nothing is stored.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/responses",
    tag = "text",
    request_body = ResponseRequest,
    responses(
        (status = 200, description = "The answer, or events with its parts",
            content((ResponseBody = "application/json"), (StreamEvent = "text/event-stream"))),
        ApiError
    )
))]
pub(crate) async fn respond(
    State(app): State<Arc<App>>,
    Caller(scope): Caller,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    // Streams end with the whole response, without `[DONE]`.
    sse::respond(body["stream"] == true, "", answer(app, scope, body)).await
}

async fn answer(app: Arc<App>, scope: String, body: ParsedBody) -> Result<Response, ApiError> {
    let fields = JsonFields::new(&body)?;
    for field in ["previous_response_id", "conversation", "prompt"] {
        if fields.get(field).is_some() {
            return Err(
                fields.error(field, "responses are not stored; send the whole conversation as `input`")
            );
        }
    }
    if fields.boolean("background")?.unwrap_or(false) {
        return Err(fields.error("background", "is not supported; leave it out, or stream"));
    }
    for (field, here) in CHAT_ONLY_FIELDS {
        if fields.get(field).is_some() {
            return Err(fields.error(field, format!("is a field of chats; use `{here}`")));
        }
    }
    let question = || Ok(model_routing::question(&input::messages(&fields)?));
    let attempt = |selected| answer_by(&app, &scope, &fields, selected);
    model_routing::answer(&app, fields.string("model")?, question, attempt).await
}

async fn answer_by(
    app: &App,
    scope: &str,
    fields: &JsonFields<'_>,
    selected: SelectedModel,
) -> Result<Response, ApiError> {
    let messages = input::messages(fields)?;
    let tools = Tools::new(fields)?;
    let mut options = chat::options(fields, &tools)?;
    if let Some(reasoning) = fields.object("reasoning")? {
        chat::set_reasoning_effort(&mut options, &reasoning, "effort", &selected.served)?;
    }
    let mut config = sampling_params::generation_config(fields, &selected.served)?;
    config.max_tokens = sampling_params::max_tokens(fields, "max_output_tokens")?;
    config.grammar = format(fields)?;
    config.logprobs = logprobs(fields)?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let lookup = sampling_params::lookup(fields)?;
    let response_base =
        response_base(fields, &selected.name, config.sampler.temperature, config.sampler.top_p);
    let request =
        ConversationRequest { selected, messages, options, tools, config, grammar_field: FORMAT_FIELD };
    let response = request
        .begin(app, scope, ResponseOptions { choices: 1, stream, include_usage: true, lookup })
        .await?;
    let output = Output::new(response_base, response);
    if stream {
        return Ok(sse::response(output.into_stream()));
    }
    Ok(Json(output.collect().await?).into_response())
}

/// Reads the output format.
fn format(fields: &JsonFields<'_>) -> Result<Option<Grammar>, ApiError> {
    let Some(text) = fields.object("text")? else { return Ok(None) };
    let Some(format) = text.object("format")? else { return Ok(None) };
    sampling_params::grammar_of_format(&format, &format)
}

/// What a response may include. There is nothing to include for all but the first: the server runs no tools, and reads no
/// reasoning again.
const INCLUDABLE: [&str; 8] = [
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];

/// The value of `include` that asks for log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

/// Reads how many likely tokens to report beside each, if log-probabilities are included.
fn logprobs(fields: &JsonFields<'_>) -> Result<Option<usize>, ApiError> {
    let mut included = false;
    for (index, value) in fields.list("include")?.unwrap_or_default().iter().enumerate() {
        let known = INCLUDABLE.into_iter().find(|known| value == known);
        let Some(known) = known else {
            let message = format!("{value} is none of {}", INCLUDABLE.join(", "));
            return Err(fields.error(&format!("include[{index}]"), message));
        };
        included |= known == LOGPROBS;
    }
    let most = fields.integer("top_logprobs", 0, chat::MAX_LOGPROBS)?;
    if most.is_some_and(|most| most > 0) && !included {
        return Err(fields.error("top_logprobs", format!("needs `include: [\"{LOGPROBS}\"]`")));
    }
    Ok(included.then_some(most.unwrap_or(0) as usize))
}

/// Builds the response without its output: mostly the request's settings.
fn response_base(fields: &JsonFields<'_>, model: &str, temperature: f32, top_p: f32) -> Value {
    let or = |field: &str, unless: Value| fields.get(field).cloned().unwrap_or(unless);
    let reasoning = or("reasoning", Value::Null);
    json!({
        "id": format!("resp_{}", crate::ids::random_id()),
        "object": "response",
        "created_at": crate::ids::unix_time(),
        "status": "in_progress",
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": or("instructions", Value::Null),
        "max_output_tokens": or("max_output_tokens", Value::Null),
        "metadata": or("metadata", json!({})),
        "model": model,
        "output": [],
        "parallel_tool_calls": or("parallel_tool_calls", true.into()),
        "previous_response_id": null,
        "reasoning": { "effort": reasoning.get("effort"), "summary": null },
        "service_tier": "default",
        "store": false,
        "temperature": temperature,
        "text": or("text", json!({ "format": { "type": "text" } })),
        "tool_choice": or("tool_choice", "auto".into()),
        "tools": or("tools", json!([])),
        "top_logprobs": or("top_logprobs", 0.into()),
        "top_p": top_p,
        "truncation": "disabled",
        "usage": null,
        "user": or("user", Value::Null),
    })
}
