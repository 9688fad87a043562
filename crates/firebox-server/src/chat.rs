//! `/v1/chat/completions`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use firebox_text::{Message, TemplateOptions};
use serde_json::Value;
use utoipa_axum::routes;

use crate::answers::Heading;
use crate::app::{App, Routes};
use crate::asked::{Asked, Caller};
use crate::error::ApiError;
use crate::events;
use crate::fields::{Fields, kind};
use crate::form::{Form, Streaming};
use crate::schema::{ChatCompletion, ChatRequest, StreamEvent};
use crate::tools::Tools;
use crate::turn::{Answered, Turn};
use crate::wishes::{self, Delivery};

const MOST_LOGPROBS: u64 = 20;

pub(crate) fn routes() -> Routes {
    Routes::new().routes(routes!(complete))
}

/// Answers in a conversation, whole or as they come.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    tag = "text",
    request_body = ChatRequest,
    responses((status = 200, description = "The answers, or events with their parts", content((ChatCompletion = "application/json"), (StreamEvent = "text/event-stream"))), ApiError)
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
    let messages = messages(&fields)?;
    let tools = Tools::of(&fields)?;
    let options = options(&fields, &tools)?;
    let delivery = Delivery::of(&fields)?;
    delivery.expect_few(1, app.limits.answers)?;
    let mut config = wishes::config(&fields, &chosen.served)?;
    let most = fields.whole("top_logprobs", 0, MOST_LOGPROBS)?;
    let likely = fields.truth("logprobs")?.unwrap_or(false);
    if most.is_some_and(|most| most > 0) && !likely {
        return Err(fields.wrong("top_logprobs", "is only for `logprobs: true`"));
    }
    config.logprobs = likely.then_some(most.unwrap_or(0) as usize);
    let heading = Heading::new("chatcmpl", &chosen.name);
    let turn = Turn { chosen, messages, options, tools, config, form: wishes::form_field(&fields) };
    let Answered { answers, listening, tokenizer } = turn.begin(&app, &scope, delivery).await?;
    let form = Form { heading, is_chat: true, tokenizer: Some(tokenizer), listening };
    if delivery.stream {
        return Ok(events::response(Streaming::new(form, answers, delivery.usage)));
    }
    Ok(Json(form.whole(answers).await?).into_response())
}

/// What was said before, as far as it is something that was said.
pub(crate) fn messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let given = fields.needed_list("messages")?;
    if given.is_empty() {
        return Err(fields.wrong("messages", "there is none"));
    }
    let read = given.iter().enumerate().map(|(index, value)| {
        let at = |rest: &str| fields.name(&format!("messages[{index}]{rest}"));
        let Value::Object(message) = value else {
            return Err(ApiError::field(at(""), format!("expected an object, found {}", kind(value))));
        };
        match message.get("role") {
            Some(Value::String(_)) => {}
            Some(other) => {
                return Err(ApiError::field(
                    at(".role"),
                    format!("expected a string, found {}", kind(other)),
                ));
            }
            None => return Err(ApiError::field(at(".role"), "is missing")),
        }
        if let Some(other @ (Value::Bool(_) | Value::Number(_) | Value::Object(_))) = message.get("content") {
            let expected = format!("expected a string or a list of parts, found {}", kind(other));
            return Err(ApiError::field(at(".content"), expected));
        }
        let mut message: Message = serde_json::from_value(value.clone())
            .map_err(|error| ApiError::field(at(""), error.to_string()))?;
        // A newer name for the same.
        if message.role == "developer" {
            message.role = "system".into();
        }
        Ok(message)
    });
    read.collect()
}

/// What the template is told beside them.
pub(crate) fn options(fields: &Fields<'_>, tools: &Tools) -> Result<TemplateOptions, ApiError> {
    let mut options = TemplateOptions { tools: tools.told(), ..TemplateOptions::default() };
    if let Some(variables) = fields.object("chat_template_kwargs")? {
        options.enable_thinking = variables.truth("enable_thinking")?;
        options.variables = variables.map().clone();
        for own in ["messages", "tools", "documents"] {
            if options.variables.contains_key(own) {
                return Err(variables.wrong(own, "has a field of its own"));
            }
        }
    }
    if let Some(prompts) = fields.truth("add_generation_prompt")? {
        options.add_generation_prompt = prompts;
    }
    Ok(options)
}
