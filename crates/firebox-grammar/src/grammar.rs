use llguidance::JsonCompileOptions;
use llguidance::api::TopLevelGrammar;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{ConstraintError, gbnf};

/// Grammars are written by people or made from a program's types; beyond this they are made to do harm.
const LONGEST: usize = 1 << 20;
/// Brackets within brackets, or values within values. Whoever reads a grammar goes down on the stack.
const DEEPEST: usize = 100;

/// Between two parts of a JSON text: nothing, a space, or a new line with its indentation. JSON allows any amount, and
/// small models then write nothing else.
const WHITESPACE: &str = r" |\n[ \t]{0,32}";

/// What a text may be.
///
/// ```
/// # use firebox_grammar::Grammar;
/// let grammar: Grammar = serde_json::from_str(r#"{"regex": "yes|no"}"#)?;
/// assert_eq!(grammar, Grammar::Regex("yes|no".into()));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// JSON that fits a schema. Properties come in the order in which the schema names them. A keyword that cannot be held
    /// to is an error.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// All of the text matches a regular expression.
    Regex(String),
    /// A grammar as `llguidance` reads it, in the notation of Lark, beginning at `start`.
    Lark(String),
    /// A grammar as llama.cpp reads it, beginning at `root`.
    Gbnf(String),
}

impl Grammar {
    fn kind(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) | Self::JsonObject => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) => "Lark grammar",
            Self::Gbnf(_) => "GBNF grammar",
        }
    }

    /// What is wrong with it, in the parser's words.
    pub(super) fn error(&self, reason: &str) -> ConstraintError {
        ConstraintError::Grammar { kind: self.kind(), reason: plain(reason) }
    }

    pub(super) fn compiled(&self) -> Result<TopLevelGrammar, ConstraintError> {
        match self {
            Self::JsonSchema(schema) => {
                if deeper_than(schema, DEEPEST) {
                    return Err(self.error(&format!("it is nested more than {DEEPEST} deep")));
                }
                Ok(TopLevelGrammar::from_json_schema(spaced(schema.clone())))
            }
            Self::JsonObject => Ok(TopLevelGrammar::from_json_schema(spaced(json!({ "type": "object" })))),
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

    fn check_text(&self, text: &str) -> Result<(), ConstraintError> {
        if text.len() > LONGEST {
            return Err(self.error(&format!("its {} bytes are more than {LONGEST}", text.len())));
        }
        let (mut depth, mut deepest) = (0usize, 0);
        for byte in text.bytes() {
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            deepest = deepest.max(depth);
        }
        if deepest > DEEPEST {
            return Err(self.error(&format!("its brackets are nested more than {DEEPEST} deep")));
        }
        Ok(())
    }
}

/// Whether there are more than so many values within values.
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

/// The schema with a word about whitespace, if it has none of its own.
fn spaced(schema: Value) -> Value {
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

/// A reason without what was only meant for whoever looks into the parser.
pub(super) fn plain(reason: &str) -> String {
    let end = ["<non-verbose/>", "<backtrace>", "<state>"].iter().filter_map(|mark| reason.find(mark)).min();
    reason[..end.unwrap_or(reason.len())].trim().to_owned()
}
