//! Tools: which of them a model is told of, and which it has to call.

use firebox_runtime::Grammar;
use firebox_text::{CallSyntax, can_be_called};
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, kind};

/// More would fill any context.
const MOST_TOOLS: usize = 128;

/// The tools of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tools {
    /// In the form of the chat API.
    list: Vec<Value>,
    choice: Choice,
    /// Whether one answer may have several calls.
    pub parallel: bool,
}

/// What a request wishes of its tools.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
enum Choice {
    /// The model decides.
    #[default]
    Auto,
    /// None is called.
    None,
    /// One is called, whichever it is.
    Any,
    /// This one is called.
    Named(String),
}

impl Tools {
    pub fn of(fields: &Fields<'_>) -> Result<Self, ApiError> {
        for (old, new) in [("functions", "tools"), ("function_call", "tool_choice")] {
            if fields.get(old).is_some() {
                return Err(fields.wrong(old, format!("is not there any more; use `{new}`")));
            }
        }
        let list = fields.list("tools")?.unwrap_or_default();
        if list.len() > MOST_TOOLS {
            return Err(fields.wrong("tools", format!("{} are more than {MOST_TOOLS}", list.len())));
        }
        for (index, tool) in list.iter().enumerate() {
            expect_function(fields, &format!("tools[{index}]"), tool)?;
        }
        let tools = Self {
            choice: choice(fields)?,
            parallel: fields.truth("parallel_tool_calls")?.unwrap_or(true),
            list: list.iter().cloned().map(nested).collect(),
        };
        tools.expect_there(fields)?;
        Ok(tools)
    }

    /// Refuses a choice of what is not there.
    fn expect_there(&self, fields: &Fields<'_>) -> Result<(), ApiError> {
        match &self.choice {
            Choice::Any if self.list.is_empty() => {
                Err(fields.wrong("tool_choice", "there are no tools to choose from"))
            }
            Choice::Named(name) if self.needed().is_empty() => {
                Err(fields.wrong("tool_choice", format!("there is no tool {name:?}")))
            }
            _ => Ok(()),
        }
    }

    /// Those the model is told of, if there are any.
    pub fn told(&self) -> Option<Vec<Value>> {
        (self.choice != Choice::None && !self.list.is_empty()).then(|| self.list.clone())
    }

    /// Those of which one has to be called; none where nothing has to be.
    fn needed(&self) -> Vec<&Value> {
        let named = |tool: &&Value| match &self.choice {
            Choice::Any => true,
            Choice::Named(name) => tool["function"]["name"] == **name,
            Choice::Auto | Choice::None => false,
        };
        self.list.iter().filter(named).collect()
    }

    /// The name of the one that has to be called, if there is but one.
    pub fn only(&self) -> Option<&str> {
        match self.needed()[..] {
            [tool] => tool["function"]["name"].as_str(),
            _ => None,
        }
    }

    /// What an answer has to be that is a call, without what opens it.
    pub fn grammar(&self, syntax: CallSyntax) -> Option<Grammar> {
        let needed = self.needed();
        if needed.is_empty() {
            return None;
        }
        if let [tool] = needed[..]
            && syntax.names_before()
        {
            return Some(Grammar::JsonSchema(parameters(&tool["function"])));
        }
        let mut definitions = Map::new();
        let mut calls = Vec::new();
        for (index, tool) in needed.into_iter().enumerate() {
            let function = &tool["function"];
            let mut parameters = parameters(function);
            // A schema refers to parts of itself from its own beginning, which is elsewhere now.
            let place = format!("#/$defs/{index}");
            moved(&mut parameters, &place);
            definitions.insert(index.to_string(), parameters);
            calls.push(json!({
                "type": "object",
                "properties": { "name": { "const": function["name"] }, syntax.arguments(): { "$ref": place } },
                "required": ["name", syntax.arguments()],
                "additionalProperties": false,
            }));
        }
        let call = match calls.len() {
            1 => calls.remove(0),
            _ => json!({ "anyOf": calls }),
        };
        let mut schema = match syntax.lists() {
            true => json!({ "type": "array", "items": call, "minItems": 1, "maxItems": 1 }),
            false => call,
        };
        schema["$defs"] = Value::Object(definitions);
        Some(Grammar::JsonSchema(schema))
    }
}

/// What the arguments of a function have to be.
fn parameters(function: &Value) -> Value {
    let mut parameters = match &function["parameters"] {
        Value::Object(_) => function["parameters"].clone(),
        // A function of which no parameters are told has none.
        _ => json!({ "type": "object", "properties": {} }),
    };
    if !composes(&parameters) {
        close(&mut parameters);
    }
    parameters
}

/// Refuses what a call could not be made of.
fn expect_function(fields: &Fields<'_>, at: &str, tool: &Value) -> Result<(), ApiError> {
    let Value::Object(map) = tool else {
        return Err(fields.wrong(at, format!("expected an object, found {}", kind(tool))));
    };
    let tool = Fields::within(map, fields.name(at));
    if let Some(other) = tool.text("type")?.filter(|kind| *kind != "function") {
        return Err(tool.wrong("type", format!("{other:?} is not there; only `function` can be called")));
    }
    let function = tool.object("function")?.unwrap_or(tool);
    let name = function.needed_text("name")?;
    if !can_be_called(name) {
        return Err(function.wrong("name", format!("{name:?} is not made of letters, digits, _ - . : and /")));
    }
    function.text("description")?;
    function.truth("strict")?;
    function.object("parameters")?;
    Ok(())
}

fn choice(fields: &Fields<'_>) -> Result<Choice, ApiError> {
    let wrong = |found: String| {
        Err(fields.wrong("tool_choice", format!("{found} is none of auto, none, required and a function")))
    };
    match fields.get("tool_choice") {
        None => Ok(Choice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            "required" | "any" => Ok(Choice::Any),
            other => wrong(format!("{other:?}")),
        },
        Some(choice) => {
            let name = choice.pointer("/function/name").or_else(|| choice.get("name"));
            match name.and_then(Value::as_str) {
                Some(name) => Ok(Choice::Named(name.to_owned())),
                None => wrong("what is there".into()),
            }
        }
    }
}

/// A tool in the form of the chat API, which has its function in a field of its own.
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

/// Whether several of the schemas in this one hold for the same object at once. Each names what it knows of, and nothing
/// would be all of them if each permitted no more than that.
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

/// Permits no properties beyond those that are named, where nothing is said of others: nobody would know what to do with
/// them, and a model that is held to nothing there may never come to an end.
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

/// Makes references within a schema right where it is a part of another one.
fn moved(schema: &mut Value, place: &str) {
    match schema {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(at) if name == "$ref" && at.starts_with('#') => {
                        at.replace_range(..1, place)
                    }
                    value => moved(value, place),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| moved(value, place)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(body: &Value) -> Result<Tools, ApiError> {
        Tools::of(&Fields::of(body).unwrap())
    }

    #[test]
    fn a_choice_needs_what_is_there() {
        let one = json!({"type": "function", "function": {"name": "one"}});
        let flat =
            json!({"type": "function", "name": "two", "strict": true, "parameters": {"type": "object"}});
        let with = |choice: Value| tools(&json!({"tools": [one, flat], "tool_choice": choice}));
        for open in [json!("auto"), json!("none"), Value::Null] {
            assert_eq!(with(open).unwrap().grammar(CallSyntax::Tagged), None);
        }
        assert!(with(json!("none")).unwrap().told().is_none());
        assert_eq!(with(json!("auto")).unwrap().told().unwrap()[1]["function"]["name"], "two");
        let named = with(json!({"type": "function", "name": "two"})).unwrap();
        assert_eq!(named.needed().len(), 1);
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
    fn a_schema_is_closed_unless_that_makes_nothing_of_it() {
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
            // These are names.
            json!({"properties": {"if": text, "allOf": text}}),
            json!({"properties": {"path": {"enum": [{"allOf": []}]}}}),
        ] {
            assert!(closed(&plain), "{plain}");
        }
    }

    #[test]
    fn references_go_where_the_schema_went() {
        let parameters = json!({
            "$defs": {"place": {"type": "string"}},
            "type": "object",
            "properties": {"from": {"$ref": "#/$defs/place"}, "all": {"items": {"$ref": "#"}}},
        });
        let tool = json!({"type": "function", "function": {"name": "one", "parameters": parameters}});
        let needed = tools(&json!({"tools": [tool, tool], "tool_choice": "required"})).unwrap();
        let Some(Grammar::JsonSchema(schema)) = needed.grammar(CallSyntax::Listed) else { panic!() };
        let found = |pointer: &str| schema.pointer(pointer).unwrap().clone();
        assert_eq!(found("/$defs/1/properties/from/$ref"), "#/$defs/1/$defs/place");
        assert_eq!(found("/$defs/0/properties/all/items/$ref"), "#/$defs/0");
        assert_eq!(found("/$defs/0/additionalProperties"), false);
        assert_eq!(found("/items/anyOf/1/properties/arguments/$ref"), "#/$defs/1");
    }
}
