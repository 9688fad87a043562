//! Grammars in several notations.

use llguidance::JsonCompileOptions;
use llguidance::api::TopLevelGrammar;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{GrammarError, gbnf};

/// The most bytes of a grammar. Grammars are written by people or derived from types; longer ones are attacks.
const MAX_BYTES: usize = 1 << 20;
/// The deepest nesting of brackets or values. Parsers of grammars are recursive.
const MAX_DEPTH: usize = 100;

/// Whitespace between the parts of a JSON text: nothing, a space, or a new line with its indentation. JSON allows any amount,
/// and small models would generate it forever.
const WHITESPACE: &str = r" |\n[ \t]{0,32}";

/// The form that a text has to have.
///
/// ```
/// # use firebox_grammar::Grammar;
/// let grammar: Grammar = serde_json::from_str(r#"{"regex": "yes|no"}"#)?;
/// assert_eq!(grammar, Grammar::Regex("yes|no".into()));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Grammar {
    /// JSON that fits a schema. Properties come in the order of the schema. An unsupported keyword is an error.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// A regular expression that matches the whole text.
    Regex(String),
    /// A grammar of `llguidance` in the notation of Lark, which begins at `start`.
    Lark(String),
    /// A grammar of llama.cpp, which begins at `root`.
    Gbnf(String),
}

impl Grammar {
    /// Returns an expression of Lark for JSON that fits a schema, to be used in a [`Lark`](Self::Lark) grammar.
    pub fn json_in_lark(schema: &Value) -> String {
        format!("%json {}", with_whitespace(schema.clone()))
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) | Self::JsonObject => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) => "Lark grammar",
            Self::Gbnf(_) => "GBNF grammar",
        }
    }

    /// Returns the length of its text; of a schema roughly.
    pub fn source_bytes(&self) -> usize {
        match self {
            Self::JsonSchema(schema) => schema_bytes(schema),
            Self::JsonObject => 0,
            Self::Regex(text) | Self::Lark(text) | Self::Gbnf(text) => text.len(),
        }
    }

    /// Returns an error with the parser's reason.
    pub(super) fn error(&self, reason: &str) -> GrammarError {
        GrammarError::Grammar { kind: self.kind(), reason: without_debug_info(reason) }
    }

    pub(super) fn compiled(&self) -> Result<TopLevelGrammar, GrammarError> {
        match self {
            Self::JsonSchema(schema) => {
                if deeper_than(schema, MAX_DEPTH) {
                    return Err(self.error(&format!("it is nested more than {MAX_DEPTH} deep")));
                }
                Ok(TopLevelGrammar::from_json_schema(with_whitespace(schema.clone())))
            }
            Self::JsonObject => {
                Ok(TopLevelGrammar::from_json_schema(with_whitespace(json!({ "type": "object" }))))
            }
            Self::Regex(expression) => {
                self.check_text(expression)?;
                if expression.is_empty() {
                    return Ok(TopLevelGrammar::from_lark("start: \"\"".into()));
                }
                Ok(TopLevelGrammar::from_regex(expression))
            }
            Self::Lark(text) => {
                self.check_text(text)?;
                Ok(TopLevelGrammar::from_lark(text.clone()))
            }
            Self::Gbnf(text) => {
                self.check_text(text)?;
                let lark = gbnf::to_lark(text).map_err(|reason| self.error(&reason))?;
                Ok(TopLevelGrammar::from_lark(lark))
            }
        }
    }

    fn check_text(&self, text: &str) -> Result<(), GrammarError> {
        if text.len() > MAX_BYTES {
            return Err(self.error(&format!("its {} bytes are more than {MAX_BYTES}", text.len())));
        }
        let (mut depth, mut deepest) = (0usize, 0);
        let mut bytes = text.bytes();
        while let Some(byte) = bytes.next() {
            match byte {
                // An escaped bracket is a letter.
                b'\\' => drop(bytes.next()),
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            deepest = deepest.max(depth);
        }
        if deepest > MAX_DEPTH {
            return Err(self.error(&format!("its brackets are nested more than {MAX_DEPTH} deep")));
        }
        Ok(())
    }
}

/// Returns roughly how long a schema is as a text.
fn schema_bytes(schema: &Value) -> usize {
    let (mut open, mut bytes) = (vec![schema], 0);
    while let Some(value) = open.pop() {
        bytes += 8;
        match value {
            Value::String(text) => bytes += text.len(),
            Value::Array(values) => open.extend(values),
            Value::Object(fields) => {
                bytes += fields.keys().map(String::len).sum::<usize>();
                open.extend(fields.values());
            }
            _ => {}
        }
    }
    bytes
}

/// Returns whether values are nested deeper than `most`.
fn deeper_than(value: &Value, most: usize) -> bool {
    let mut open = vec![(value, 0)];
    while let Some((value, depth)) = open.pop() {
        if depth > most {
            return true;
        }
        match value {
            Value::Array(values) => open.extend(values.iter().map(|value| (value, depth + 1))),
            Value::Object(fields) => open.extend(fields.values().map(|value| (value, depth + 1))),
            _ => {}
        }
    }
    false
}

/// Adds an option for whitespace to a schema that has none.
fn with_whitespace(schema: Value) -> Value {
    let mut fields = match schema {
        Value::Object(fields) => fields,
        Value::Bool(true) => Map::new(),
        other => return other,
    };
    if !fields.contains_key("x-guidance") {
        let options = JsonCompileOptions {
            whitespace_pattern: Some(WHITESPACE.into()),
            ..JsonCompileOptions::default()
        };
        if let Ok(options) = serde_json::to_value(options) {
            fields.insert("x-guidance".into(), options);
        }
    }
    Value::Object(fields)
}

/// Removes the parser's debugging information from a reason.
pub(super) fn without_debug_info(reason: &str) -> String {
    let end = ["<non-verbose/>", "<backtrace>", "<state>"].iter().filter_map(|mark| reason.find(mark)).min();
    reason[..end.unwrap_or(reason.len())].trim().to_owned()
}
