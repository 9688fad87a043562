use serde_json::Map;

use super::reader::LONGEST_NAME;
use super::tools::{Tools, function_call};
use crate::message::FunctionCall;

/// A call in markup, as between `<tool_call>` and `</tool_call>`: that of Qwen3-Coder, `<function=NAME>` around
/// `<parameter=NAME>VALUE</parameter>`, or that of GLM, a name before `<arg_key>NAME</arg_key><arg_value>VALUE</arg_value>`.
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
        return can_be_called(name).then(|| function_call(name, arguments));
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
    can_be_called(name).then(|| function_call(name, arguments))
}

/// A value without the ends of lines that set it apart.
fn line(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// Whether a tool of this name can be told from what is around it in answers of all families: letters, digits, `_`, `-`, `.`,
/// `:` and `/`.
pub fn can_be_called(name: &str) -> bool {
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    !name.is_empty() && name.len() <= LONGEST_NAME && name.chars().all(fits)
}
