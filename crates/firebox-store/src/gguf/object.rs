//! JSON objects that are put together from several sources.

use serde_json::{Map, Value};

/// Adds the fields of `values`, an object.
pub(super) fn set(config: &mut Map<String, Value>, values: Value) {
    if let Value::Object(values) = values {
        config.extend(values);
    }
}
