//! Reads the fields of requests, with errors that name the field.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of a JSON object, read one by one so that errors name the field. `null` counts as absent, and
/// unknown fields are ignored.
#[derive(Debug, Clone)]
pub(crate) struct JsonFields<'a> {
    map: &'a Map<String, Value>,
    /// Prefix of the fields' names, such as `stream_options.`.
    path: String,
}

impl<'a> JsonFields<'a> {
    pub fn new(value: &'a Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path: String::new() }),
            other => Err(ApiError::invalid(format!("the body is {}, not an object", kind(other)))),
        }
    }

    /// Reads an object in a list, named `at`.
    pub fn nested(map: &'a Map<String, Value>, at: String) -> Self {
        Self { map, path: at + "." }
    }

    /// Returns the full name of a field.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    pub fn error(&self, field: &str, why: impl AsRef<str>) -> ApiError {
        ApiError::field(self.name(field), why)
    }

    fn expected<T>(&self, field: &str, expected: &str, found: &Value) -> Result<T, ApiError> {
        Err(self.error(field, format!("expected {expected}, found {}", kind(found))))
    }

    fn missing(&self, field: &str) -> ApiError {
        self.error(field, "is missing")
    }

    pub fn string(&self, field: &str) -> Result<Option<&'a str>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => self.expected(field, "a string", other),
        }
    }

    pub fn required_string(&self, field: &str) -> Result<&'a str, ApiError> {
        self.string(field)?.ok_or_else(|| self.missing(field))
    }

    pub fn boolean(&self, field: &str) -> Result<Option<bool>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => self.expected(field, "true or false", other),
        }
    }

    pub fn number(&self, field: &str, from: f64, to: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let Some(number) = value.as_f64() else { return self.expected(field, "a number", value) };
        if (from..=to).contains(&number) {
            return Ok(Some(number));
        }
        Err(self.error(field, format!("{number} is not between {from} and {to}")))
    }

    pub fn integer(&self, field: &str, from: u64, to: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let Some(number) = value.as_u64() else {
            return self.expected(field, "a whole number of at least 0", value);
        };
        if (from..=to).contains(&number) {
            return Ok(Some(number));
        }
        Err(self.error(field, format!("{number} is not between {from} and {to}")))
    }

    /// Returns true if a number is -1, which many clients send for "unlimited".
    pub fn is_minus_one(&self, field: &str) -> bool {
        self.get(field).and_then(Value::as_i64) == Some(-1)
    }

    /// Rejects fields that are not supported, unless they have their neutral value.
    pub fn reject_unsupported<const N: usize>(
        &self,
        fields: [(&str, Value); N],
        why: &str,
    ) -> Result<(), ApiError> {
        for (field, unless) in fields {
            if self.get(field).is_some_and(|value| *value != unless) {
                return Err(self.error(field, why));
            }
        }
        Ok(())
    }

    pub fn list(&self, field: &str) -> Result<Option<&'a [Value]>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(other) => self.expected(field, "a list", other),
        }
    }

    pub fn required_list(&self, field: &str) -> Result<&'a [Value], ApiError> {
        self.list(field)?.ok_or_else(|| self.missing(field))
    }

    /// Reads a string, or a list of strings.
    pub fn strings(&self, field: &str) -> Result<Vec<&'a str>, ApiError> {
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text]),
            Some(Value::Array(values)) => {
                let texts = values.iter().enumerate().map(|(index, value)| match value {
                    Value::String(text) => Ok(text.as_str()),
                    other => self.expected(&format!("{field}[{index}]"), "a string", other),
                });
                texts.collect()
            }
            Some(other) => self.expected(field, "a string or a list of strings", other),
        }
    }

    pub fn object(&self, field: &str) -> Result<Option<Self>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { map, path: self.name(field) + "." })),
            Some(other) => self.expected(field, "an object", other),
        }
    }

    pub fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// Reads token ids.
    pub fn tokens(&self, field: &str, values: &[Value]) -> Result<Vec<u32>, ApiError> {
        let tokens = values.iter().enumerate().map(|(index, value)| {
            let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
            match token {
                Some(token) => Ok(token),
                None => self.expected(&format!("{field}[{index}]"), "a token id", value),
            }
        });
        tokens.collect()
    }
}

/// Returns the name of a value's type, for error messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
