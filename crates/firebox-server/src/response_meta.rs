//! What all objects of a response have in common.

use std::sync::Arc;

use firebox_runtime::Finish;
use serde_json::{Value, json};

use crate::ids::{random_id, unix_time};

/// Returns OpenAI's name for why a choice ended.
pub(crate) fn finish_reason(finish: Finish, calls: usize) -> &'static str {
    match finish {
        Finish::Length | Finish::Repetition => "length",
        Finish::Stop if calls > 0 => "tool_calls",
        Finish::Stop | Finish::Cancelled => "stop",
    }
}

/// The fields that every object of a response begins with.
#[derive(Debug, Clone)]
pub(crate) struct ResponseMeta {
    pub id: String,
    pub created: u64,
    pub model: Arc<str>,
}

impl ResponseMeta {
    pub fn new(kind: &str, model: &str) -> Self {
        Self { id: format!("{kind}-{}", random_id()), created: unix_time(), model: model.into() }
    }

    /// Builds an object with these fields and its choices.
    pub fn with(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": &*self.model,
            "choices": choices,
        })
    }
}
