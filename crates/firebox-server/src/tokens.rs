//! `/tokenize` and `/detokenize`: text to tokens and back.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::routing;
use firebox_text::Tokenizer;
use serde_json::{Value, json};

use crate::app::{App, Routes};
use crate::blocking::blocking;
use crate::chat;
use crate::error::ApiError;
use crate::extract::{Caller, JsonBody};
use crate::json_fields::JsonFields;
use crate::prompt_length;
#[cfg(test)]
use crate::schema::{DetokenizeRequest, Detokenized, TokenizeRequest, Tokens};
use crate::tools::Tools;

pub(crate) fn routes() -> Routes {
    Routes::new().route("/tokenize", routing::post(tokenize)).route("/detokenize", routing::post(detokenize))
}

/// Tokenizes a text, or the prompt of a conversation.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/tokenize",
    tag = "tokens",
    request_body = TokenizeRequest,
    responses((status = 200, description = "The tokens", body = Tokens), ApiError)
))]
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    Caller(scope): Caller,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let fields = JsonFields::new(&body)?;
    let served = app.catalog.find(fields.string("model")?).await?.served;
    let context = served.context;
    let tokens = if fields.get("messages").is_some() {
        let (messages, options) = (chat::messages(&fields)?, chat::options(&fields, &Tools::new(&fields)?)?);
        let bytes = messages.iter().map(|message| message.text().len()).sum();
        app.over_text(&scope, bytes, move || served.prompt(&messages, &options)).await?
    } else {
        // Clients use both names.
        let field = if fields.get("content").is_some() { "content" } else { "prompt" };
        let text = fields.required_string(field)?.to_owned();
        let bytes = text.len();
        let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
        let encode = move || {
            let tokenizer = served.tokenizer()?;
            prompt_length::check_text(tokenizer, &text, context)?;
            Ok(tokenizer.encode(&text, special)?)
        };
        app.over_text(&scope, bytes, encode).await?
    };
    Ok(Json(json!({ "count": tokens.len(), "max_model_len": context, "tokens": tokens })))
}

/// Decodes tokens to text.
#[cfg_attr(test, utoipa::path(
    post,
    path = "/detokenize",
    tag = "tokens",
    request_body = DetokenizeRequest,
    responses((status = 200, description = "The text", body = Detokenized), ApiError)
))]
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let fields = JsonFields::new(&body)?;
    let served = app.catalog.find(fields.string("model")?).await?.served;
    let tokens = fields.tokens("tokens", fields.required_list("tokens")?)?;
    let tokenizer = served.tokenizer()?.clone();
    check_token_ids(&fields, "tokens", &tokens, &tokenizer)?;
    let text = blocking(move || Ok(tokenizer.decode(&tokens, false))).await?;
    Ok(Json(json!({ "prompt": text, "content": text })))
}

/// Rejects unknown token ids, which decoding would skip silently.
pub(crate) fn check_token_ids(
    fields: &JsonFields<'_>,
    field: &str,
    tokens: &[u32],
    tokenizer: &Tokenizer,
) -> Result<(), ApiError> {
    let known = tokenizer.vocab_size();
    let Some(at) = tokens.iter().position(|&token| token as usize >= known) else { return Ok(()) };
    let unknown = format!("{} is not a token; the vocabulary has {known}", tokens[at]);
    Err(fields.error(&format!("{field}[{at}]"), unknown))
}
