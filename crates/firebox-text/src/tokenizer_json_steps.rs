//! Checks of the steps around the model in `tokenizer.json`.

use crate::charsmap;
use crate::error::TextError;
use serde_json::Value;

/// Checks assumptions of `tokenizers` whose violation would panic. Steps can contain steps, so every part of the JSON is
/// visited; its parser has bounded the depth.
pub(crate) fn check(part: &Value) -> Result<(), TextError> {
    let fields = match part {
        Value::Array(parts) => return parts.iter().try_for_each(check),
        Value::Object(fields) => fields,
        _ => return Ok(()),
    };
    let wrong = |reason: &str| Err(TextError::InvalidTokenizerJson { reason: reason.to_owned() });
    if let Some(table) = fields.get("precompiled_charsmap") {
        let Some(table) = table.as_str() else { return wrong("`precompiled_charsmap` is not a text") };
        charsmap::read_base64(table)?;
    }
    match fields.get("type").and_then(Value::as_str) {
        Some("FixedLength") if fields.get("length").and_then(Value::as_u64) == Some(0) => {
            return wrong("`FixedLength` splits text into pieces of length 0");
        }
        Some("TemplateProcessing") => check_template(part)?,
        _ => {}
    }
    fields.values().try_for_each(check)
}

fn check_template(part: &Value) -> Result<(), TextError> {
    let wrong = |reason: String| Err(TextError::InvalidTokenizerJson { reason });
    for piece in part.get("single").and_then(Value::as_array).into_iter().flatten() {
        if piece.pointer("/Sequence/id").and_then(Value::as_str) == Some("B") {
            return wrong("the template for one text uses a second one".to_owned());
        }
        let Some(token) = piece.pointer("/SpecialToken/id").and_then(Value::as_str) else { continue };
        if part.get("special_tokens").and_then(|tokens| tokens.get(token)).is_none() {
            return wrong(format!("the template for one text uses `{token}`, which it does not list"));
        }
    }
    Ok(())
}
