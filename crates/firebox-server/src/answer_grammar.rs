//! The grammar of an answer that may call strict tools.

use firebox_runtime::Grammar;
use firebox_text::{CallSyntax, CallableTool, Tokenizer};
use serde_json::json;

use crate::error::ApiError;
use crate::tools::Tools;

/// Returns the grammar of an answer whose calls of strict tools fit their parameters; `None` if no tool is strict, or if the
/// choice of tools leaves none to call or forces a call, which has a grammar of its own. Text between the calls is free, or
/// follows `format`, which `format_field` of the request gave.
pub(crate) fn answer_grammar(
    tools: &Tools,
    syntax: CallSyntax,
    tokenizer: &Tokenizer,
    format: Option<&Grammar>,
    format_field: &str,
) -> Result<Option<Grammar>, ApiError> {
    let callable: Vec<CallableTool> = tools
        .optional()
        .into_iter()
        .map(|(name, schema)| CallableTool {
            name: name.to_owned(),
            arguments: Grammar::json_in_lark(&schema),
        })
        .collect();
    if callable.is_empty() {
        return Ok(None);
    }
    let remedy = "send `tool_choice`, or the tools without `strict: true`";
    let text = match format {
        None => None,
        Some(Grammar::JsonSchema(schema)) => Some(Grammar::json_in_lark(schema)),
        Some(Grammar::JsonObject) => Some(Grammar::json_in_lark(&json!({ "type": "object" }))),
        Some(_) => {
            let message = format!("a grammar and strict tools cannot be combined; {remedy}");
            return Err(ApiError::field(format_field, message));
        }
    };
    if let Some(lark) = syntax.answer_grammar(tokenizer, &callable, text.as_deref()) {
        return Ok(Some(Grammar::Lark(lark)));
    }
    let message = match text {
        Some(_) => format!(
            "this model marks no calls, so that an output format and strict tools cannot be combined; {remedy}"
        ),
        None => format!(
            "this model's vocabulary does not mark calls, so that `strict: true` cannot be held; {remedy}"
        ),
    };
    Err(ApiError::field("tools", message))
}
