//! Typed access to the fields of a `config.json`.

use serde_json::{Map, Value};

use crate::ModelError;

/// No model has a dimension beyond this; larger ones are nonsense that would overflow a product of two.
const LARGEST_DIMENSION: u64 = 1 << 26;

/// Typed reading of a `config.json`, with errors that name the field.
#[derive(Debug, Clone)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    renamed: &'static [(&'static str, &'static str)],
    path: String,
}

impl<'a> Fields<'a> {
    pub fn new(config: &'a Value) -> Result<Self, ModelError> {
        match config.as_object() {
            Some(map) => Ok(Self { map, renamed: &[], path: String::new() }),
            None => Err(ModelError::Config { field: "config".into(), reason: "is not a JSON object".into() }),
        }
    }

    /// Returns the fields of a configuration that calls some of them otherwise: the usual names, and its own.
    pub fn with_names(&self, renamed: &'static [(&'static str, &'static str)]) -> Self {
        Self { renamed, ..self.clone() }
    }

    /// The name that this configuration has for a field.
    fn own_name<'n>(&self, field: &'n str) -> &'n str {
        self.renamed.iter().find(|(usual, _)| *usual == field).map_or(field, |(_, own)| own)
    }

    pub fn error(&self, field: &str, reason: impl Into<String>) -> ModelError {
        let field = self.own_name(field);
        ModelError::Config { field: format!("{}{field}", self.path), reason: reason.into() }
    }

    /// The names of all fields that are there.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    /// The field, unless it is absent or null.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(self.own_name(field)).filter(|value| !value.is_null())
    }

    /// The field if it is there, a default if it is not; null is nothing either way.
    pub fn count_or(&self, field: &str, absent: Option<usize>) -> Result<Option<usize>, ModelError> {
        if self.map.contains_key(self.own_name(field)) { self.count(field) } else { Ok(absent) }
    }

    pub fn object(&self, field: &str) -> Result<Option<Fields<'a>>, ModelError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Self { map, renamed: &[], path: format!("{}{field}.", self.path) }))
            }
            Some(other) => Err(self.error(field, format!("should be an object, is {}", shown(other)))),
        }
    }

    pub fn text(&self, field: &str) -> Result<Option<&'a str>, ModelError> {
        self.optional(field, "a string", Value::as_str)
    }

    /// Returns whether the store says so of how this checkpoint lies: a flag within the configuration's object `firebox`.
    pub fn hint(&self, name: &str) -> Result<bool, ModelError> {
        let hints = self.object("firebox")?;
        Ok(hints.map_or(Ok(None), |hints| hints.flag(name))?.unwrap_or(false))
    }

    pub fn flag(&self, field: &str) -> Result<Option<bool>, ModelError> {
        self.optional(field, "true or false", Value::as_bool)
    }

    pub fn number(&self, field: &str) -> Result<Option<f64>, ModelError> {
        self.optional(field, "a finite number", |value| value.as_f64().filter(|number| number.is_finite()))
    }

    pub fn positive(&self, field: &str) -> Result<Option<f64>, ModelError> {
        match self.number(field)? {
            Some(number) if number <= 0.0 => {
                Err(self.error(field, format!("should be above zero, is {number}")))
            }
            number => Ok(number),
        }
    }

    /// A whole number of at least one.
    pub fn count(&self, field: &str) -> Result<Option<usize>, ModelError> {
        match self.whole(field)? {
            Some(0) => Err(self.error(field, "should be at least 1, is 0")),
            number => Ok(number),
        }
    }

    pub fn whole(&self, field: &str) -> Result<Option<usize>, ModelError> {
        self.optional(field, "a whole number within bounds", |value| {
            value.as_u64().filter(|&number| number <= LARGEST_DIMENSION).map(|number| number as usize)
        })
    }

    pub fn required_count(&self, field: &str) -> Result<usize, ModelError> {
        self.count(field)?.ok_or_else(|| self.error(field, "is missing"))
    }

    pub fn required_number(&self, field: &str) -> Result<f64, ModelError> {
        self.number(field)?.ok_or_else(|| self.error(field, "is missing"))
    }

    pub fn list(&self, field: &str) -> Result<Option<&'a [Value]>, ModelError> {
        self.optional(field, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    pub fn numbers(&self, field: &str) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(values) = self.list(field)? else { return Ok(None) };
        values
            .iter()
            .map(|value| value.as_f64().map(|number| number as f32).filter(|number| number.is_finite()))
            .collect::<Option<Vec<_>>>()
            .map(Some)
            .ok_or_else(|| self.error(field, "should hold finite numbers only"))
    }

    fn optional<T>(
        &self,
        field: &str,
        kind: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(self.error(field, format!("should be {kind}, is {}", shown(value)))),
        }
    }
}

/// A value for an error message, cut where it gets long.
pub(crate) fn shown(value: &Value) -> String {
    const LONGEST: usize = 60;
    let mut text = value.to_string();
    if let Some((cut, _)) = text.char_indices().nth(LONGEST) {
        text.truncate(cut);
        text.push('…');
    }
    text
}
