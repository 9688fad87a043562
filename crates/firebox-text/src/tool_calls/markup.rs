//! Calls in the markup of Qwen3-Coder and GLM.

use serde_json::Map;

use super::declared_tools::{Tools, function_call};
use super::tool_name::is_valid_tool_name;
use crate::message::FunctionCall;

/// Parses the markup between `<tool_call>` and `</tool_call>`: Qwen3-Coder writes `<function=NAME>` around
/// `<parameter=NAME>VALUE</parameter>`, and GLM a name before `<arg_key>NAME</arg_key><arg_value>VALUE</arg_value>`.
pub(super) fn call(text: &str, tools: &Tools) -> Option<FunctionCall> {
    let text = text.trim();
    if let Some(rest) = text.strip_prefix("<function=") {
        let (name, mut rest) = rest.split_once('>')?;
        let mut arguments = Map::new();
        while let Some((_, parameter)) = rest.split_once("<parameter=") {
            let (key, value) = parameter.split_once('>')?;
            let end = value.find("</parameter>").or_else(|| value.find("</function>"))?;
            arguments.insert(key.to_owned(), tools.value(name, key, line(&value[..end])));
            rest = &value[end..];
        }
        return is_valid_tool_name(name).then(|| function_call(name, arguments));
    }
    let (name, mut rest) = text.split_at(text.find("<arg_key>").unwrap_or(text.len()));
    let name = name.trim();
    let mut arguments = Map::new();
    while let Some((_, argument)) = rest.split_once("<arg_key>") {
        let (key, value) = argument.split_once("</arg_key>")?;
        let (value, after) = value.split_once("<arg_value>")?.1.split_once("</arg_value>")?;
        arguments.insert(key.to_owned(), tools.value(name, key, value));
        rest = after;
    }
    is_valid_tool_name(name).then(|| function_call(name, arguments))
}

/// Strips one line break from either end of a value.
fn line(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}
