//! The declared tools, against which calls are checked.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::literals::python_value;
use crate::message::FunctionCall;

/// The keys that an object without a mark begins with, if it is a call.
const CALL_KEYS: [&str; 6] = ["name", "type", "id", "function", "arguments", "parameters"];

/// The declared tools, as far as reading calls needs them.
#[derive(Debug, Clone, Default)]
pub(super) struct Tools {
    /// For each name, the parameters whose type is text.
    known: HashMap<String, Vec<String>>,
}

impl Tools {
    /// The tools of a request, in the form of OpenAI's API, with or without its `function`.
    pub fn new(tools: &[Value]) -> Self {
        let known = tools.iter().filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?.to_owned();
            let parameters = function.pointer("/parameters/properties").and_then(Value::as_object);
            let texts = parameters.into_iter().flatten().filter(|(_, schema)| is_text(schema));
            Some((name, texts.map(|(name, _)| name.clone()).collect()))
        });
        Self { known: known.collect() }
    }

    /// Returns whether there are any.
    pub fn any(&self) -> bool {
        !self.known.is_empty()
    }

    /// Returns whether a tool of this name is declared.
    pub fn has(&self, name: &str) -> bool {
        self.known.contains_key(name)
    }

    /// The calls that a value, an object or a list of objects, represents; `None` if it represents anything else. `strict` requires
    /// that their tools are declared.
    pub fn calls(&self, value: &Value, strict: bool) -> Option<Vec<FunctionCall>> {
        let values = match value {
            Value::Array(values) => &values[..],
            one => std::slice::from_ref(one),
        };
        let calls: Option<Vec<_>> = values.iter().map(|value| self.call(value, strict)).collect();
        calls.filter(|calls| !calls.is_empty())
    }

    fn call(&self, value: &Value, strict: bool) -> Option<FunctionCall> {
        let object = value.as_object()?;
        if strict && !object.keys().next().is_some_and(|key| CALL_KEYS.contains(&key.as_str())) {
            return None;
        }
        let function = object.get("function").and_then(Value::as_object).unwrap_or(object);
        let name = function.get("name").or_else(|| object.get("function"))?.as_str()?;
        if name.is_empty() || (strict && !self.has(name)) {
            return None;
        }
        let arguments = match function.get("arguments").or_else(|| function.get("parameters")) {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(arguments)) => arguments.clone(),
            Some(Value::String(text)) => serde_json::from_str(text).ok()?,
            Some(_) => return None,
        };
        Some(FunctionCall::new(name, arguments))
    }

    /// Returns whether a parameter may be a text.
    pub fn is_text(&self, tool: &str, parameter: &str) -> bool {
        self.known.get(tool).is_some_and(|texts| texts.iter().any(|text| text == parameter))
    }

    /// Converts an unquoted value. Some templates write truth values, lists and objects as Python does.
    pub fn value(&self, tool: &str, parameter: &str, text: &str) -> Value {
        if self.is_text(tool, parameter) {
            return Value::String(text.to_owned());
        }
        let value = serde_json::from_str(text.trim()).ok();
        let is_python =
            || matches!(text.trim(), "True" | "False" | "None") || text.trim().starts_with(['[', '{']);
        let value = value.or_else(|| python_value(text).filter(|_| is_python()));
        value.unwrap_or_else(|| Value::String(text.to_owned()))
    }
}

/// Returns whether a parameter may be a text: by its type, by one of several schemas for it (such as Python's `Optional[str]`), or by
/// its permitted values.
fn is_text(schema: &Value) -> bool {
    let list = |key: &str| schema.get(key).and_then(Value::as_array).into_iter().flatten();
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => {
            ["anyOf", "oneOf", "allOf"].into_iter().flat_map(list).any(is_text)
                || list("enum").chain(schema.get("const")).any(Value::is_string)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Tools;
    use serde_json::json;

    #[test]
    fn texts_that_look_like_numbers_stay_texts() {
        let cases = [
            (json!({"type": "string"}), true),
            (json!({"type": ["string", "null"]}), true),
            (json!({"anyOf": [{"type": "string"}, {"type": "null"}]}), true),
            (json!({"oneOf": [{"type": "integer"}, {"enum": ["1"]}]}), true),
            (json!({"allOf": [{"type": "string"}], "default": "1"}), true),
            (json!({"enum": ["1", "2", null]}), true),
            (json!({"const": "1"}), true),
            (json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}), false),
            (json!({"enum": [1, 2]}), false),
            (json!({"type": "integer", "enum": ["1"]}), false),
            (json!({}), false),
        ];
        for (schema, is_text) in cases {
            let parameters = json!({"properties": {"x": schema}});
            let tools = Tools::new(&[json!({"name": "f", "parameters": parameters})]);
            let expected = if is_text { json!("1") } else { json!(1) };
            assert_eq!(tools.value("f", "x", "1"), expected, "{schema}");
        }
    }
}
