use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::message::FunctionCall;

/// The tools that may be called, as far as calls have to be compared with them.
#[derive(Debug, Clone, Default)]
pub(super) struct Tools {
    /// By name, the parameters that are texts whatever they look like.
    known: HashMap<String, Vec<String>>,
}

impl Tools {
    /// Those of a request, in the form of OpenAI's API or without its `function`.
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

    /// Whether there are any.
    pub fn any(&self) -> bool {
        !self.known.is_empty()
    }

    /// Whether one of this name is there.
    pub fn has(&self, name: &str) -> bool {
        self.known.contains_key(name)
    }

    /// The calls that a value says, in an object or a list of objects; nothing if it says anything else. With `strict`
    /// they are of tools that are there.
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
        Some(function_call(name, arguments))
    }

    /// A value that was written without quotes.
    pub fn value(&self, tool: &str, parameter: &str, text: &str) -> Value {
        let is_text = self.known.get(tool).is_some_and(|texts| texts.iter().any(|text| text == parameter));
        let text_value = || Value::String(text.to_owned());
        if is_text {
            text_value()
        } else {
            serde_json::from_str(text.trim()).unwrap_or_else(|_| text_value())
        }
    }
}

/// A call with its arguments as a JSON text, which is how OpenAI's API has them.
pub(super) fn function_call(name: &str, arguments: Map<String, Value>) -> FunctionCall {
    FunctionCall { name: name.to_owned(), arguments: Value::String(Value::Object(arguments).to_string()) }
}

/// Whether it may be a text, be it beside nothing: then what is written without quotes is one.
fn is_text(schema: &Value) -> bool {
    let any = |key: &str, is: fn(&Value) -> bool| {
        schema.get(key).and_then(Value::as_array).is_some_and(|of| of.iter().any(is))
    };
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => any("anyOf", is_text) || any("oneOf", is_text) || any("enum", Value::is_string),
    }
}
