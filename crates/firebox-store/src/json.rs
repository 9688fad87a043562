//! Partial JSON parsing: a value in memory takes many times its bytes in a file, so only the needed parts are built.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// The parts of an object that are needed.
pub(crate) trait Object: Sized {
    fn read<'de, A: MapAccess<'de>>(entries: A) -> Result<Self, A::Error>;
}

/// Any JSON value: a text, an object, or the beginning of another value.
pub(crate) enum Json<O> {
    Text(String),
    Object(O),
    Other(String),
}

/// An object whose contents are ignored.
pub(crate) struct Ignored;

impl Object for Ignored {
    fn read<'de, A: MapAccess<'de>>(mut entries: A) -> Result<Self, A::Error> {
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Self)
    }
}

/// The text entries of an object; other entries are skipped.
pub(crate) struct Texts(pub BTreeMap<String, String>);

impl Object for Texts {
    fn read<'de, A: MapAccess<'de>>(mut entries: A) -> Result<Self, A::Error> {
        let mut texts = BTreeMap::new();
        while let Some(name) = entries.next_key::<String>()? {
            if let Json::<Ignored>::Text(text) = entries.next_value()? {
                texts.insert(name, text);
            }
        }
        Ok(Self(texts))
    }
}

impl Json<Ignored> {
    /// The value as JSON text, or the beginning of it.
    pub(crate) fn into_json_text(self) -> String {
        match self {
            Self::Text(text) => Value::String(text).to_string(),
            Self::Object(Ignored) => "{…}".to_owned(),
            Self::Other(beginning) => beginning,
        }
    }
}

impl<'de, O: Object> Deserialize<'de> for Json<O> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue(PhantomData))
    }
}

struct AnyValue<O>(PhantomData<O>);

impl<'de, O: Object> Visitor<'de> for AnyValue<O> {
    type Value = Json<O>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Json<O>, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Json<O>, E> {
        Ok(Json::Text(text))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json<O>, E> {
        Ok(Json::Other(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json<O>, E> {
        Ok(Json::Other(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json<O>, E> {
        Ok(Json::Other(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json<O>, E> {
        Ok(Json::Other(value.to_string()))
    }

    fn visit_unit<E>(self) -> Result<Json<O>, E> {
        Ok(Json::Other("null".to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json<O>, A::Error> {
        let Some(first) = items.next_element::<Json<Ignored>>()? else {
            return Ok(Json::Other("[]".to_owned()));
        };
        let mut rest = "";
        while items.next_element::<IgnoredAny>()?.is_some() {
            rest = ",…";
        }
        Ok(Json::Other(format!("[{}{rest}]", first.into_json_text())))
    }

    fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<Json<O>, A::Error> {
        O::read(entries).map(Json::Object)
    }
}
