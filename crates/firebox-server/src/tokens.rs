//! `/tokenize` and `/detokenize`

use serde_json::{Value, json};

use crate::app::{App, blocking};
use crate::chat;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::http::{Response, Status};

pub(crate) async fn tokenize(app: &App, body: &Value) -> Result<Response, ApiError> {
    let fields = Fields::of(body)?;
    let served = app.catalog.find(fields.text("model")?)?.served;
    let context = served.context;
    let tokens = if fields.get("messages").is_some() {
        let (messages, options) = (chat::messages(&fields)?, chat::options(&fields)?);
        blocking(move || served.prompt(&messages, &options)).await?
    } else {
        // Two names for it are in use.
        let field = if fields.get("content").is_some() { "content" } else { "prompt" };
        let text = fields.needed_text(field)?.to_owned();
        let special = fields.truth("add_special_tokens")?.unwrap_or(true);
        blocking(move || Ok(served.tokenizer()?.encode(&text, special)?)).await?
    };
    let value = json!({ "count": tokens.len(), "max_model_len": context, "tokens": tokens });
    Ok(Response::json(Status::OK, &value))
}

pub(crate) async fn detokenize(app: &App, body: &Value) -> Result<Response, ApiError> {
    let fields = Fields::of(body)?;
    let served = app.catalog.find(fields.text("model")?)?.served;
    let tokens = fields.tokens("tokens", fields.needed_list("tokens")?)?;
    let tokenizer = served.tokenizer()?.clone();
    let text = blocking(move || Ok(tokenizer.decode(&tokens, false))).await?;
    Ok(Response::json(Status::OK, &json!({ "prompt": text, "content": text })))
}
