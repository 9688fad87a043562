//! The tools of a request: which the model may call, and which it must.

use firebox_runtime::Grammar;
use firebox_text::{CallSyntax, is_valid_tool_name};
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::json_fields::{JsonFields, kind};

/// More would fill any context.
const MAX_TOOLS: usize = 128;

/// The tools of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tools {
    /// In the format of the chat API.
    list: Vec<Value>,
    /// For each tool, whether it is strict: the arguments of every call have to fit its parameters.
    strict: Vec<bool>,
    choice: ToolChoice,
    /// True if one answer may have several calls.
    pub parallel: bool,
}

/// The request's `tool_choice`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No tool may be called.
    None,
    /// Some tool must be called.
    Any,
    /// This tool must be called.
    Named(String),
}

impl Tools {
    pub fn new(fields: &JsonFields<'_>) -> Result<Self, ApiError> {
        for (old, new) in [("functions", "tools"), ("function_call", "tool_choice")] {
            if fields.get(old).is_some() {
                return Err(fields.error(old, format!("is obsolete; use `{new}`")));
            }
        }
        let list = fields.list("tools")?.unwrap_or_default();
        if list.len() > MAX_TOOLS {
            return Err(fields.error("tools", format!("{} are more than {MAX_TOOLS}", list.len())));
        }
        for (index, tool) in list.iter().enumerate() {
            check_function(fields, &format!("tools[{index}]"), tool)?;
        }
        let tools = Self {
            choice: tool_choice(fields)?,
            parallel: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
            strict: list.iter().map(is_strict).collect(),
            list: list.iter().cloned().map(nested).collect(),
        };
        tools.check_choice(fields)?;
        Ok(tools)
    }

    /// Rejects a choice of a missing tool.
    fn check_choice(&self, fields: &JsonFields<'_>) -> Result<(), ApiError> {
        match &self.choice {
            ToolChoice::Any if self.list.is_empty() => {
                Err(fields.error("tool_choice", "there are no tools to choose from"))
            }
            ToolChoice::Named(name) if self.required().is_empty() => {
                Err(fields.error("tool_choice", format!("there is no tool {name:?}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns the tools offered to the model, if any.
    pub fn advertised(&self) -> Option<Vec<Value>> {
        (self.choice != ToolChoice::None && !self.list.is_empty()).then(|| self.list.clone())
    }

    /// Returns the names of the tools that may be called and the schemas of their arguments, if the model decides and at least
    /// one of them is strict. The arguments of others are any object.
    pub fn optional(&self) -> Vec<(&str, Value)> {
        if self.choice != ToolChoice::Auto || !self.strict.contains(&true) {
            return Vec::new();
        }
        let tools = self.list.iter().zip(&self.strict).map(|(tool, strict)| {
            let function = &tool["function"];
            let schema = if *strict { parameters(function) } else { json!({ "type": "object" }) };
            (function["name"].as_str().unwrap_or_default(), schema)
        });
        tools.collect()
    }

    /// Returns the tools of which one must be called; empty if none must.
    fn required(&self) -> Vec<&Value> {
        let named = |tool: &&Value| match &self.choice {
            ToolChoice::Any => true,
            ToolChoice::Named(name) => tool["function"]["name"] == **name,
            ToolChoice::Auto | ToolChoice::None => false,
        };
        self.list.iter().filter(named).collect()
    }

    /// Returns the name of the only tool that must be called, if there is exactly one.
    pub fn single_required(&self) -> Option<&str> {
        match self.required()[..] {
            [tool] => tool["function"]["name"].as_str(),
            _ => None,
        }
    }

    /// Returns the grammar of a required call, without the text that opens it.
    pub fn grammar(&self, syntax: CallSyntax) -> Option<Grammar> {
        let required = self.required();
        if required.is_empty() {
            return None;
        }
        if let [tool] = required[..]
            && syntax.names_tool_first()
        {
            return Some(Grammar::JsonSchema(parameters(&tool["function"])));
        }
        let mut definitions = Map::new();
        let mut calls = Vec::new();
        for (index, tool) in required.into_iter().enumerate() {
            let function = &tool["function"];
            let mut parameters = parameters(function);
            // References are relative to the root, where the schema no longer is.
            let place = format!("#/$defs/{index}");
            rebase_references(&mut parameters, &place);
            definitions.insert(index.to_string(), parameters);
            calls.push(json!({
                "type": "object",
                "properties": { "name": { "const": function["name"] }, syntax.arguments_key(): { "$ref": place } },
                "required": ["name", syntax.arguments_key()],
                "additionalProperties": false,
            }));
        }
        let call = match calls.len() {
            1 => calls.remove(0),
            _ => json!({ "anyOf": calls }),
        };
        let mut schema = match syntax.always_lists() {
            true => json!({ "type": "array", "items": call, "minItems": 1, "maxItems": 1 }),
            false => call,
        };
        schema["$defs"] = Value::Object(definitions);
        Some(Grammar::JsonSchema(schema))
    }
}

/// Returns the schema of a function's arguments.
fn parameters(function: &Value) -> Value {
    let mut parameters = match &function["parameters"] {
        Value::Object(_) => function["parameters"].clone(),
        // A function without parameters takes none.
        _ => json!({ "type": "object", "properties": {} }),
    };
    if !composes(&parameters) {
        close(&mut parameters);
    }
    parameters
}

/// Checks that a tool can be called.
fn check_function(fields: &JsonFields<'_>, at: &str, tool: &Value) -> Result<(), ApiError> {
    let Value::Object(map) = tool else {
        return Err(fields.error(at, format!("expected an object, found {}", kind(tool))));
    };
    let tool = JsonFields::nested(map, fields.name(at));
    if let Some(other) = tool.string("type")?.filter(|kind| *kind != "function") {
        return Err(tool.error("type", format!("{other:?} is not supported; use `function`")));
    }
    let function = tool.object("function")?.unwrap_or(tool);
    let name = function.required_string("name")?;
    if !is_valid_tool_name(name) {
        return Err(function.error("name", format!("{name:?} may only have letters, digits, _ - . : and /")));
    }
    function.string("description")?;
    function.boolean("strict")?;
    function.object("parameters")?;
    Ok(())
}

fn tool_choice(fields: &JsonFields<'_>) -> Result<ToolChoice, ApiError> {
    let wrong = |found: String| {
        Err(fields.error("tool_choice", format!("{found} is none of auto, none, required and a function")))
    };
    match fields.get("tool_choice") {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" | "any" => Ok(ToolChoice::Any),
            other => wrong(format!("{other:?}")),
        },
        Some(choice) => {
            let name = choice.pointer("/function/name").or_else(|| choice.get("name"));
            match name.and_then(Value::as_str) {
                Some(name) => Ok(ToolChoice::Named(name.to_owned())),
                None => wrong("the object".into()),
            }
        }
    }
}

/// Returns whether a tool asks that its arguments fit its parameters.
fn is_strict(tool: &Value) -> bool {
    let function = tool.get("function").filter(|function| function.is_object()).unwrap_or(tool);
    function["strict"] == true
}

/// Wraps a tool in the format of the chat API, whose function is a field.
fn nested(tool: Value) -> Value {
    if tool.get("function").is_some_and(Value::is_object) {
        return tool;
    }
    let Value::Object(mut function) = tool else { return tool };
    for field in ["type", "strict"] {
        function.shift_remove(field);
    }
    json!({ "type": "function", "function": function })
}

/// Returns true if several schemas apply to one object. Each names its own properties, and no object would
/// satisfy them if each forbade all others.
fn composes(schema: &Value) -> bool {
    let Value::Object(fields) = schema else { return false };
    if ["allOf", "if", "dependentSchemas"].iter().any(|keyword| fields.contains_key(*keyword)) {
        return true;
    }
    let inner = |keyword: &str| match fields.get(keyword) {
        Some(Value::Array(inner)) => inner.iter().collect(),
        Some(inner @ Value::Object(_)) => vec![inner],
        _ => Vec::new(),
    };
    let names = |choice: &Value| {
        let names = ["properties", "patternProperties", "$ref", "anyOf", "oneOf"];
        names.iter().any(|keyword| choice.get(keyword).is_some())
    };
    let parts = [
        fields.contains_key("properties"),
        fields.contains_key("$ref"),
        inner("anyOf").into_iter().any(names),
        inner("oneOf").into_iter().any(names),
    ];
    if parts.into_iter().filter(|names| *names).count() > 1 {
        return true;
    }
    let named = ["properties", "patternProperties", "$defs", "definitions"];
    let named =
        named.iter().filter_map(|keyword| fields.get(*keyword)?.as_object()).flat_map(|all| all.values());
    let others = ["items", "prefixItems", "additionalProperties", "not", "anyOf", "oneOf"];
    named.chain(others.into_iter().flat_map(inner)).any(composes)
}

/// Forbids unnamed properties where a schema is silent about them: callers would not use them, and
/// unconstrained generation may not end.
fn close(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    let open =
        ["additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "oneOf", "$ref"];
    if fields.contains_key("properties") && !open.iter().any(|keyword| fields.contains_key(*keyword)) {
        fields.insert("additionalProperties".into(), false.into());
    }
    for keyword in ["properties", "$defs", "definitions"] {
        if let Some(Value::Object(inner)) = fields.get_mut(keyword) {
            inner.values_mut().for_each(close);
        }
    }
    for keyword in ["items", "anyOf"] {
        match fields.get_mut(keyword) {
            Some(Value::Array(inner)) => inner.iter_mut().for_each(close),
            Some(inner) => close(inner),
            None => {}
        }
    }
}

/// Rewrites references for a schema that became part of another.
fn rebase_references(schema: &mut Value, place: &str) {
    match schema {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(at) if name == "$ref" && at.starts_with('#') => {
                        at.replace_range(..1, place)
                    }
                    value => rebase_references(value, place),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| rebase_references(value, place)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(body: &Value) -> Result<Tools, ApiError> {
        Tools::new(&JsonFields::new(body).unwrap())
    }

    #[test]
    fn a_choice_needs_an_existing_tool() {
        let one = json!({"type": "function", "function": {"name": "one"}});
        let flat =
            json!({"type": "function", "name": "two", "strict": true, "parameters": {"type": "object"}});
        let with = |choice: Value| tools(&json!({"tools": [one, flat], "tool_choice": choice}));
        for open in [json!("auto"), json!("none"), Value::Null] {
            assert_eq!(with(open).unwrap().grammar(CallSyntax::Tagged), None);
        }
        assert!(with(json!("none")).unwrap().advertised().is_none());
        assert_eq!(with(json!("auto")).unwrap().advertised().unwrap()[1]["function"]["name"], "two");
        let named = with(json!({"type": "function", "name": "two"})).unwrap();
        assert_eq!(named.required().len(), 1);
        for wrong in [json!("three"), json!({"function": {"name": "three"}}), json!(1), json!({})] {
            let error = with(wrong).unwrap_err().value();
            assert_eq!(error["error"]["param"], "tool_choice");
        }
        assert!(tools(&json!({"tool_choice": "required"})).is_err());
        let error =
            |tool: Value| tools(&json!({"tools": [tool]})).unwrap_err().value()["error"]["param"].clone();
        assert_eq!(error(json!(1)), "tools[0]");
        assert_eq!(error(json!({"type": "web_search"})), "tools[0].type");
        assert_eq!(error(json!({"type": "function"})), "tools[0].name");
        assert_eq!(error(json!({"function": {"name": ""}})), "tools[0].function.name");
        assert_eq!(error(json!({"name": "a", "strict": []})), "tools[0].strict");
        assert_eq!(
            error(json!({"function": {"name": "a", "parameters": 1}})),
            "tools[0].function.parameters"
        );
    }

    #[test]
    fn schemas_are_closed_unless_they_compose() {
        let text = json!({"type": "string"});
        let kind = json!({"kind": text});
        let path = json!({"properties": {"path": text}, "required": ["path"]});
        let refers = json!({"$ref": "#/$defs/base"});
        let defs = json!({"base": {"properties": kind, "required": ["kind"]}});
        let closed = |schema: &Value| {
            let closed = parameters(&json!({"parameters": schema}));
            closed.to_string().contains("additionalProperties")
        };
        for open in [
            json!({"properties": kind, "required": ["kind"], "anyOf": [path]}),
            json!({"properties": kind, "required": ["kind"], "oneOf": [path]}),
            json!({"anyOf": [path], "oneOf": [{"properties": kind}]}),
            json!({"$defs": defs, "allOf": [refers, path]}),
            json!({"$defs": defs, "properties": {"path": text}, "$ref": "#/$defs/base"}),
            json!({"$defs": defs, "properties": {"list": {"items": {"allOf": [refers, path]}}}}),
            json!({"properties": kind, "if": path, "then": path}),
            json!({"properties": kind, "dependentSchemas": {"kind": path}}),
        ] {
            assert!(!closed(&open), "{open}");
        }
        for plain in [
            json!({"properties": kind}),
            json!({"anyOf": [path, {"properties": kind}]}),
            json!({"properties": kind, "anyOf": [{"required": ["kind"]}, {"maxProperties": 0}]}),
            // Keywords as property names.
            json!({"properties": {"if": text, "allOf": text}}),
            json!({"properties": {"path": {"enum": [{"allOf": []}]}}}),
        ] {
            assert!(closed(&plain), "{plain}");
        }
    }

    #[test]
    fn references_follow_a_moved_schema() {
        let parameters = json!({
            "$defs": {"place": {"type": "string"}},
            "type": "object",
            "properties": {"from": {"$ref": "#/$defs/place"}, "all": {"items": {"$ref": "#"}}},
        });
        let tool = json!({"type": "function", "function": {"name": "one", "parameters": parameters}});
        let required = tools(&json!({"tools": [tool, tool], "tool_choice": "required"})).unwrap();
        let Some(Grammar::JsonSchema(schema)) = required.grammar(CallSyntax::Listed) else { panic!() };
        let found = |pointer: &str| schema.pointer(pointer).unwrap().clone();
        assert_eq!(found("/$defs/1/properties/from/$ref"), "#/$defs/1/$defs/place");
        assert_eq!(found("/$defs/0/properties/all/items/$ref"), "#/$defs/0");
        assert_eq!(found("/$defs/0/additionalProperties"), false);
        assert_eq!(found("/items/anyOf/1/properties/arguments/$ref"), "#/$defs/1");
    }
}
