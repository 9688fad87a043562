use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of a request, read one by one, so that what is wrong is told by its name. `null` is as good as nothing, and
/// fields that nobody asks for are let be.
#[derive(Debug, Clone)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Where they are, as in `stream_options.`.
    path: String,
}

impl<'a> Fields<'a> {
    pub fn of(value: &'a Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path: String::new() }),
            other => Err(ApiError::invalid(format!("the body is {}, not an object", kind(other)))),
        }
    }

    /// Those of an object in a list, which is at this place.
    pub fn within(map: &'a Map<String, Value>, at: String) -> Self {
        Self { map, path: at + "." }
    }

    /// What a field is called from outside.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    pub fn wrong(&self, field: &str, why: impl AsRef<str>) -> ApiError {
        ApiError::field(self.name(field), why)
    }

    fn expected<T>(&self, field: &str, expected: &str, found: &Value) -> Result<T, ApiError> {
        Err(self.wrong(field, format!("expected {expected}, found {}", kind(found))))
    }

    fn missing(&self, field: &str) -> ApiError {
        self.wrong(field, "is missing")
    }

    pub fn text(&self, field: &str) -> Result<Option<&'a str>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => self.expected(field, "a string", other),
        }
    }

    pub fn needed_text(&self, field: &str) -> Result<&'a str, ApiError> {
        self.text(field)?.ok_or_else(|| self.missing(field))
    }

    pub fn truth(&self, field: &str) -> Result<Option<bool>, ApiError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Bool(truth)) => Ok(Some(*truth)),
            Some(other) => self.expected(field, "true or false", other),
        }
    }

    pub fn number(&self, field: &str, from: f64, to: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let Some(number) = value.as_f64() else { return self.expected(field, "a number", value) };
        if (from..=to).contains(&number) {
            return Ok(Some(number));
        }
        Err(self.wrong(field, format!("{number} is not between {from} and {to}")))
    }

    pub fn whole(&self, field: &str, from: u64, to: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let Some(number) = value.as_u64() else {
            return self.expected(field, "a whole number of at least 0", value);
        };
        if (from..=to).contains(&number) {
            return Ok(Some(number));
        }
        Err(self.wrong(field, format!("{number} is not between {from} and {to}")))
    }

    /// Whether a number is -1, which many clients have for "as many as there are".
    pub fn is_unlimited(&self, field: &str) -> bool {
        self.get(field).and_then(Value::as_i64) == Some(-1)
    }

    /// Refuses fields that would change nothing, unless they ask for what there is anyway.
    pub fn expect_unasked<const N: usize>(
        &self,
        fields: [(&str, Value); N],
        why: &str,
    ) -> Result<(), ApiError> {
        for (field, unless) in fields {
            if self.get(field).is_some_and(|value| *value != unless) {
                return Err(self.wrong(field, why));
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

    pub fn needed_list(&self, field: &str) -> Result<&'a [Value], ApiError> {
        self.list(field)?.ok_or_else(|| self.missing(field))
    }

    /// A text, or a list of texts.
    pub fn texts(&self, field: &str) -> Result<Vec<&'a str>, ApiError> {
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

    /// Token ids.
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

/// What a value is, for those who expected another.
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
