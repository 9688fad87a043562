//! `/v1/chat/completions`: answers in a conversation.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing;
use firebox_text::{Message, TemplateOptions};
use serde_json::Value;

use crate::app::{App, Routes};
use crate::body_memory::ParsedBody;
use crate::catalog::SelectedModel;
use crate::completion_format::{CompletionFormat, CompletionStream};
use crate::conversation_request::{ConversationRequest, ConversationResponse};
use crate::error::ApiError;
use crate::extract::{Caller, JsonBody};
use crate::json_fields::{JsonFields, kind};
use crate::model_routing;
use crate::response_meta::ResponseMeta;
use crate::sampling_params::{self, ResponseOptions};
#[cfg(test)]
use crate::schema::{ChatCompletion, ChatRequest, StreamEvent};
use crate::served_model::ServedModel;
use crate::sse;
use crate::tools::Tools;

pub(crate) const MAX_LOGPROBS: u64 = 20;

/// The variable of chat templates that says how much to reason.
const REASONING_EFFORT: &str = "reasoning_effort";

pub(crate) fn routes() -> Routes {
    Routes::new().route("/v1/chat/completions", routing::post(complete))
}

/// Answers in a conversation, whole or streamed.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/v1/chat/completions",
    tag = "text",
    request_body = ChatRequest,
    responses((status = 200, description = "The answers, or events with their parts", content((ChatCompletion = "application/json"), (StreamEvent = "text/event-stream"))), ApiError)
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
    let question = || Ok(model_routing::question(&messages(&fields)?));
    let attempt = |selected| answer_by(&app, &scope, &fields, selected);
    model_routing::answer(&app, fields.string("model")?, question, attempt).await
}

async fn answer_by(
    app: &App,
    scope: &str,
    fields: &JsonFields<'_>,
    selected: SelectedModel,
) -> Result<Response, ApiError> {
    let messages = messages(fields)?;
    let tools = Tools::new(fields)?;
    let mut options = options(fields, &tools)?;
    set_reasoning_effort(&mut options, fields, "reasoning_effort", &selected.served)?;
    let response_options = ResponseOptions::new(fields)?;
    response_options.check_count(1, app.max_choices(scope))?;
    let mut config = sampling_params::generation_config(fields, &selected.served)?;
    let most = fields.integer("top_logprobs", 0, MAX_LOGPROBS)?;
    let likely = fields.boolean("logprobs")?.unwrap_or(false);
    if most.is_some_and(|most| most > 0) && !likely {
        return Err(fields.error("top_logprobs", "needs `logprobs: true`"));
    }
    config.logprobs = likely.then_some(most.unwrap_or(0) as usize);
    let meta = ResponseMeta::new("chatcmpl", &selected.name);
    let request = ConversationRequest {
        selected,
        messages,
        options,
        tools,
        config,
        grammar_field: sampling_params::grammar_field(fields),
    };
    let ConversationResponse { choices, answer, tokenizer } =
        request.begin(app, scope, response_options).await?;
    let format = CompletionFormat { meta, is_chat: true, tokenizer: Some(tokenizer), answer };
    if response_options.stream {
        return Ok(sse::response(CompletionStream::new(format, choices, response_options.include_usage)));
    }
    Ok(Json(format.collect(choices).await?).into_response())
}

/// Reads `messages`.
pub(crate) fn messages(fields: &JsonFields<'_>) -> Result<Vec<Message>, ApiError> {
    let given = fields.required_list("messages")?;
    if given.is_empty() {
        return Err(fields.error("messages", "is empty"));
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
        // OpenAI's newer name for the system role.
        if message.role == "developer" {
            message.role = "system".into();
        }
        Ok(message)
    });
    read.collect()
}

/// Reads how much the model should reason. The chat template has it as a variable; one without that variable cannot tell the model.
pub(crate) fn set_reasoning_effort(
    options: &mut TemplateOptions,
    fields: &JsonFields<'_>,
    field: &str,
    served: &ServedModel,
) -> Result<(), ApiError> {
    let Some(effort) = fields.string(field)? else { return Ok(()) };
    if !served.script.template().mentions(REASONING_EFFORT) {
        return Err(fields.error(field, "this model's chat template has no place for it; leave it out"));
    }
    options.variables.entry(REASONING_EFFORT).or_insert_with(|| effort.into());
    Ok(())
}

/// Reads the options of the chat template.
pub(crate) fn options(fields: &JsonFields<'_>, tools: &Tools) -> Result<TemplateOptions, ApiError> {
    let mut options = TemplateOptions { tools: tools.advertised(), ..TemplateOptions::default() };
    if let Some(variables) = fields.object("chat_template_kwargs")? {
        options.enable_thinking = variables.boolean("enable_thinking")?;
        options.variables = variables.map().clone();
        for own in ["messages", "tools", "documents"] {
            if options.variables.contains_key(own) {
                return Err(variables.error(own, "has a field of its own"));
            }
        }
    }
    if let Some(prompts) = fields.boolean("add_generation_prompt")? {
        options.add_generation_prompt = prompts;
    }
    Ok(options)
}
