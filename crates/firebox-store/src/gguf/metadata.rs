//! The key-value part of a GGUF file.

use std::collections::HashMap;

use crate::error::Fault;

/// A metadata value. Integers and floats of every width are held in the widest type.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An unsigned integer.
    Unsigned(u64),
    /// A signed integer.
    Signed(i64),
    /// A floating-point number.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A string.
    Text(String),
    /// An array.
    List(List),
}

/// A metadata array. Element types of vocabulary arrays keep their width.
#[derive(Debug, Clone, PartialEq)]
pub enum List {
    /// Bytes, signed or not.
    Bytes(Vec<u8>),
    /// Truth values.
    Bools(Vec<bool>),
    /// 32-bit integers, signed or not when they fit.
    I32(Vec<i32>),
    /// Integers of any other width.
    I64(Vec<i64>),
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// Strings.
    Texts(Vec<String>),
    /// Arrays.
    Lists(Vec<List>),
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "an unsigned integer",
            Self::Signed(_) => "a signed integer",
            Self::Float(_) => "a number",
            Self::Bool(_) => "a truth value",
            Self::Text(_) => "a string",
            Self::List(_) => "an array",
        }
    }

    fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(*value),
            Self::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }
}

/// The metadata of a GGUF file by key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    values: HashMap<String, Value>,
}

impl Metadata {
    pub(crate) fn insert(&mut self, key: String, value: Value) -> Result<(), Fault> {
        if self.values.contains_key(&key) {
            return Err(Fault::new(key, "given twice"));
        }
        self.values.insert(key, value);
        Ok(())
    }

    /// Looks up a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// The keys, in arbitrary order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Fault> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(Fault::new(key, format!("expected {wanted}, found {}", value.kind()))),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>, Fault> {
        self.typed(key, "a string", |value| match value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, Fault> {
        self.typed(key, "a truth value", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>, Fault> {
        self.typed(key, "a finite number", |value| {
            match value {
                Value::Float(number) => Some(*number),
                Value::Unsigned(number) => Some(*number as f64),
                Value::Signed(number) => Some(*number as f64),
                _ => None,
            }
            .filter(|number| number.is_finite())
        })
    }

    pub(crate) fn unsigned(&self, key: &str) -> Result<Option<u64>, Fault> {
        self.typed(key, "an integer of 0 or more", Value::as_u64)
    }

    pub(crate) fn id(&self, key: &str) -> Result<Option<u32>, Fault> {
        self.typed(key, "a token id", |value| match value {
            // Converters have written -1 for "none" in unsigned fields as well as in signed ones.
            Value::Signed(-1) => Some(None),
            value => value.as_u64().and_then(|id| u32::try_from(id).ok()).map(Some),
        })
        .map(|id| id.flatten().filter(|id| *id != u32::MAX))
    }

    /// Integers that GGUF stores once per layer, or `None` if there is no array.
    pub(crate) fn each(&self, key: &str) -> Result<Option<Vec<i64>>, Fault> {
        match self.values.get(key) {
            Some(Value::List(List::I32(values))) => {
                Ok(Some(values.iter().map(|value| i64::from(*value)).collect()))
            }
            Some(Value::List(List::I64(values))) => Ok(Some(values.clone())),
            Some(Value::List(_)) => Err(Fault::new(key, "expected integers")),
            _ => Ok(None),
        }
    }

    /// A number that GGUF stores either once per model or once per layer; here it must be equal for all layers.
    pub(crate) fn uniform(&self, key: &str) -> Result<Option<u64>, Fault> {
        let Some(values) = self.each(key)? else { return self.unsigned(key) };
        let Some((&first, rest)) = values.split_first() else {
            return Err(Fault::new(key, "an empty array, expected a number for each layer"));
        };
        if rest.iter().any(|value| *value != first) {
            return Err(Fault::unsupported(key, "differs between layers"));
        }
        u64::try_from(first)
            .map(Some)
            .map_err(|_| Fault::new(key, format!("{first}, expected an integer of 0 or more")))
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<&[String]>, Fault> {
        self.typed(key, "an array of strings", |value| match value {
            Value::List(List::Texts(texts)) => Some(texts.as_slice()),
            _ => None,
        })
    }

    pub(crate) fn floats(&self, key: &str) -> Result<Option<&[f32]>, Fault> {
        self.typed(key, "an array of 32-bit floats", |value| match value {
            Value::List(List::F32(values)) => Some(values.as_slice()),
            _ => None,
        })
    }

    pub(crate) fn ints(&self, key: &str) -> Result<Option<&[i32]>, Fault> {
        self.typed(key, "an array of 32-bit integers", |value| match value {
            Value::List(List::I32(values)) => Some(values.as_slice()),
            _ => None,
        })
    }

    pub(crate) fn bytes(&self, key: &str) -> Result<Option<&[u8]>, Fault> {
        self.typed(key, "an array of bytes", |value| match value {
            Value::List(List::Bytes(bytes)) => Some(bytes.as_slice()),
            _ => None,
        })
    }

    pub(crate) fn bools(&self, key: &str) -> Result<Option<&[bool]>, Fault> {
        self.typed(key, "an array of truth values", |value| match value {
            Value::List(List::Bools(values)) => Some(values.as_slice()),
            _ => None,
        })
    }
}
