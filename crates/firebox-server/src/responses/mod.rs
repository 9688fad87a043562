//! `/v1/responses`

mod input;
mod output;
mod schema;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use firebox_runtime::Grammar;
use serde_json::{Value, json};
use utoipa_axum::routes;

use crate::app::{App, Routes};
use crate::asked::{Asked, Caller};
use crate::chat;
use crate::error::ApiError;
use crate::events;
use crate::fields::Fields;
use crate::schema::StreamEvent;
use crate::tools::Tools;
use crate::turn::Turn;
use crate::wishes::{self, Delivery};
use output::Output;
use schema::{ResponseBody, ResponseRequest};

/// What chats have under another name.
const OF_CHATS: [(&str, &str); 5] = [
    ("max_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", FORM),
    ("json_schema", FORM),
    ("grammar", FORM),
];

/// Where the form of an answer is asked for.
const FORM: &str = "text.format";

pub(crate) fn routes() -> Routes {
    Routes::new().routes(routes!(respond))
}

/// An answer in the newer form of OpenAI's API, whole or in events. Nothing of it is kept.
#[utoipa::path(
    post,
    path = "/v1/responses",
    tag = "text",
    request_body = ResponseRequest,
    responses(
        (status = 200, description = "The answer, or events with its parts",
            content((ResponseBody = "application/json"), (StreamEvent = "text/event-stream"))),
        ApiError
    )
)]
async fn respond(
    State(app): State<Arc<App>>,
    Caller(scope): Caller,
    Asked(body): Asked,
) -> Result<Response, ApiError> {
    // Its streams end with the response as a whole.
    events::soon(body["stream"] == true, "", answer(app, scope, body)).await
}

async fn answer(app: Arc<App>, scope: String, body: Value) -> Result<Response, ApiError> {
    let fields = Fields::of(&body)?;
    for field in ["previous_response_id", "conversation", "prompt"] {
        if fields.get(field).is_some() {
            return Err(fields.wrong(field, "nothing is kept here; send the whole conversation as `input`"));
        }
    }
    if fields.truth("background")?.unwrap_or(false) {
        return Err(fields.wrong("background", "is not there; leave it out, or stream"));
    }
    for (field, here) in OF_CHATS {
        if fields.get(field).is_some() {
            return Err(fields.wrong(field, format!("is for chats; here it is `{here}`")));
        }
    }
    let chosen = app.catalog.find(fields.text("model")?).await?;
    let messages = input::messages(&fields)?;
    let tools = Tools::of(&fields)?;
    let options = chat::options(&fields, &tools)?;
    let mut config = wishes::config(&fields, &chosen.served)?;
    config.max_tokens = wishes::most_tokens(&fields, "max_output_tokens")?;
    config.grammar = format(&fields)?;
    let stream = fields.truth("stream")?.unwrap_or(false);
    let about = about(&fields, &chosen.name, config.sampler.temperature, config.sampler.top_p);
    let turn = Turn { chosen, messages, options, tools, config, form: FORM };
    let answered = turn.begin(&app, &scope, Delivery { each: 1, stream, usage: true }).await?;
    let output = Output::new(about, answered);
    if stream {
        return Ok(events::response(output.streamed()));
    }
    Ok(Json(output.whole().await?).into_response())
}

/// The form of an answer, which is elsewhere than in chats.
fn format(fields: &Fields<'_>) -> Result<Option<Grammar>, ApiError> {
    let Some(text) = fields.object("text")? else { return Ok(None) };
    let Some(format) = text.object("format")? else { return Ok(None) };
    wishes::form(&format, &format)
}

/// What is told of a response beside what was answered: for the most part what it was asked for by.
fn about(fields: &Fields<'_>, model: &str, temperature: f32, top_p: f32) -> Value {
    let or = |field: &str, unless: Value| fields.get(field).cloned().unwrap_or(unless);
    json!({
        "id": format!("resp_{}", crate::unique()),
        "object": "response",
        "created_at": crate::now(),
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
        "reasoning": { "effort": null, "summary": null },
        "service_tier": "default",
        "store": false,
        "temperature": temperature,
        "text": or("text", json!({ "format": { "type": "text" } })),
        "tool_choice": or("tool_choice", "auto".into()),
        "tools": or("tools", json!([])),
        "top_p": top_p,
        "truncation": "disabled",
        "usage": null,
        "user": or("user", Value::Null),
    })
}
