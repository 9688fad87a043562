//! `/v1/chat/completions`

use firebox_text::{Message, TemplateOptions};
use serde_json::Value;

use crate::answers::{Answers, Heading};
use crate::app::{App, blocking};
use crate::error::ApiError;
use crate::fields::{Fields, kind};
use crate::form::{Form, Streaming};
use crate::http::{Response, Status};
use crate::wishes::{self, Delivery};

const MOST_LOGPROBS: u64 = 20;

pub(crate) async fn complete(app: &App, body: &Value, scope: &str) -> Result<Response, ApiError> {
    let fields = Fields::of(body)?;
    let chosen = app.catalog.find(fields.text("model")?)?;
    let messages = messages(&fields)?;
    let options = options(&fields)?;
    let delivery = Delivery::of(&fields)?;
    delivery.expect_few(1)?;
    let mut config = wishes::config(&fields, &chosen.served)?;
    let most = fields.whole("top_logprobs", 0, MOST_LOGPROBS)?;
    let likely = fields.truth("logprobs")?.unwrap_or(false);
    if most.is_some_and(|most| most > 0) && !likely {
        return Err(fields.wrong("top_logprobs", "is only for `logprobs: true`"));
    }
    config.logprobs = likely.then_some(most.unwrap_or(0) as usize);
    let served = chosen.served.clone();
    let prompt = blocking(move || served.prompt(&messages, &options)).await?;
    if prompt.is_empty() {
        return Err(ApiError::field("messages", "there is nothing in them to answer"));
    }
    let tokenizer = Some(chosen.served.tokenizer()?.clone());
    let answers = Answers::begin(&app.engine, &chosen, scope, vec![prompt], &config, delivery).await?;
    let form = Form { heading: Heading::new("chatcmpl", &chosen.name), is_chat: true, tokenizer };
    if delivery.stream {
        return Ok(Response::events(Box::new(Streaming::new(form, answers, delivery.usage))));
    }
    Ok(Response::json(Status::OK, &form.whole(answers).await?))
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
pub(crate) fn options(fields: &Fields<'_>) -> Result<TemplateOptions, ApiError> {
    let mut options = TemplateOptions::default();
    if let Some(tools) = fields.list("tools")?.filter(|tools| !tools.is_empty()) {
        if let Some(at) = tools.iter().position(|tool| !tool.is_object()) {
            return Err(fields.wrong(&format!("tools[{at}]"), "expected an object"));
        }
        options.tools = Some(tools.to_vec());
    }
    match fields.get("tool_choice") {
        None => {}
        Some(Value::String(choice)) if choice == "auto" => {}
        Some(Value::String(choice)) if choice == "none" => options.tools = None,
        Some(_) => return Err(fields.wrong("tool_choice", "only `auto` and `none` are there so far")),
    }
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
