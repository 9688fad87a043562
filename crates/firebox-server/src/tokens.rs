//! `/tokenize` and `/detokenize`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use firebox_text::Tokenizer;
use serde_json::{Value, json};
use utoipa_axum::routes;

use crate::app::{App, Routes, blocking};
use crate::asked::Asked;
use crate::chat;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::schema::{DetokenizeRequest, Detokenized, TokenizeRequest, Tokens};
use crate::tools::Tools;

pub(crate) fn routes() -> Routes {
    Routes::new().routes(routes!(tokenize)).routes(routes!(detokenize))
}

/// A text, or the prompt of a conversation, as tokens.
#[utoipa::path(
    post,
    path = "/tokenize",
    tag = "tokens",
    request_body = TokenizeRequest,
    responses((status = 200, description = "The tokens", body = Tokens), ApiError)
)]
async fn tokenize(State(app): State<Arc<App>>, Asked(body): Asked) -> Result<Json<Value>, ApiError> {
    let fields = Fields::of(&body)?;
    let served = app.catalog.find(fields.text("model")?).await?.served;
    let context = served.context;
    let tokens = if fields.get("messages").is_some() {
        let (messages, options) = (chat::messages(&fields)?, chat::options(&fields, &Tools::of(&fields)?)?);
        blocking(move || served.prompt(&messages, &options)).await?
    } else {
        // Two names for it are in use.
        let field = if fields.get("content").is_some() { "content" } else { "prompt" };
        let text = fields.needed_text(field)?.to_owned();
        let special = fields.truth("add_special_tokens")?.unwrap_or(true);
        blocking(move || Ok(served.tokenizer()?.encode(&text, special)?)).await?
    };
    Ok(Json(json!({ "count": tokens.len(), "max_model_len": context, "tokens": tokens })))
}

/// Tokens as text.
#[utoipa::path(
    post,
    path = "/detokenize",
    tag = "tokens",
    request_body = DetokenizeRequest,
    responses((status = 200, description = "The text", body = Detokenized), ApiError)
)]
async fn detokenize(State(app): State<Arc<App>>, Asked(body): Asked) -> Result<Json<Value>, ApiError> {
    let fields = Fields::of(&body)?;
    let served = app.catalog.find(fields.text("model")?).await?.served;
    let tokens = fields.tokens("tokens", fields.needed_list("tokens")?)?;
    let tokenizer = served.tokenizer()?.clone();
    expect_known(&fields, "tokens", &tokens, &tokenizer)?;
    let text = blocking(move || Ok(tokenizer.decode(&tokens, false))).await?;
    Ok(Json(json!({ "prompt": text, "content": text })))
}

/// What is no token would be left out of the text silently.
pub(crate) fn expect_known(
    fields: &Fields<'_>,
    field: &str,
    tokens: &[u32],
    tokenizer: &Tokenizer,
) -> Result<(), ApiError> {
    let known = tokenizer.vocab_size();
    let Some(at) = tokens.iter().position(|&token| token as usize >= known) else { return Ok(()) };
    let unknown = format!("{} is no token; the vocabulary has {known}", tokens[at]);
    Err(fields.wrong(&format!("{field}[{at}]"), unknown))
}
