//! Messages of a conversation, in the format of OpenAI's chat API.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// One message of a conversation.
///
/// ```
/// use firebox_text::Message;
///
/// let message: Message = serde_json::from_str(r#"{"role": "user", "content": "Hello"}"#)?;
/// assert_eq!(message, Message::user("Hello"));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// The author: `system`, `user`, `assistant`, `tool`, or another role that the template knows.
    pub role: String,
    /// The content; absent for an assistant that only calls tools.
    #[serde(default)]
    pub content: Option<Content>,
    /// Name of the author, or of the tool that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The assistant's reasoning before the answer. Other names for it, `reasoning` or `thinking`, stay in `extra`, because a
    /// message may have several at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The assistant's tool calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub tool_calls: Vec<ToolCall>,
    /// The id of the call that a `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Other fields, passed to the template unchanged.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The content of a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Text and other parts, in order.
    Parts(Vec<ContentPart>),
}

/// One part of a message's content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContentPart {
    /// `text`, `image_url`, `input_audio`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// The text of a `text` part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The fields of other kinds of parts.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// A tool call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The id that the tool's answer refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Always `function` so far.
    #[serde(rename = "type", default = "function_kind")]
    pub kind: String,
    /// The function and its arguments.
    pub function: FunctionCall,
}

/// The function of a [`ToolCall`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Name of the function.
    pub name: String,
    /// An object, or its JSON text, as in OpenAI's API. Templates see an object in both cases.
    #[serde(default)]
    pub arguments: Value,
}

impl FunctionCall {
    /// A call with its arguments as a JSON text.
    pub(crate) fn new(name: &str, arguments: Map<String, Value>) -> Self {
        Self { name: name.to_owned(), arguments: Value::String(Value::Object(arguments).to_string()) }
    }
}

fn function_kind() -> String {
    "function".to_owned()
}

fn null_as_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    source: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(source)?.unwrap_or_default())
}

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<Content>) -> Self {
        Self {
            role: role.into(),
            content: Some(content.into()),
            name: None,
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            extra: Map::new(),
        }
    }

    /// A message of the user.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::new("user", content)
    }

    /// A system message.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::new("system", content)
    }

    /// A message of the assistant.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self::new("assistant", content)
    }

    /// The text of the message, with its parts joined by line breaks; empty if there is none.
    pub fn text(&self) -> String {
        match &self.content {
            None => String::new(),
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => {
                let texts: Vec<&str> = parts.iter().filter_map(|part| part.text.as_deref()).collect();
                texts.join("\n")
            }
        }
    }
}

impl ContentPart {
    /// A part of plain text.
    pub fn text(text: impl Into<String>) -> Self {
        Self { kind: "text".to_owned(), text: Some(text.into()), extra: Map::new() }
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Content::Text(text)
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Content::Text(text.to_owned())
    }
}

impl From<Vec<ContentPart>> for Content {
    fn from(parts: Vec<ContentPart>) -> Self {
        Content::Parts(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::{Content, Message};
    use serde_json::json;

    #[test]
    fn reads_and_writes_openai_json() {
        let json = json!({
            "role": "assistant",
            "content": null,
            "tool_calls": [{"id": "a1", "type": "function", "function": {"name": "add", "arguments": "{\"x\":1}"}}],
            "weight": 1,
        });
        let message: Message = serde_json::from_value(json.clone()).unwrap();
        assert_eq!(message.content, None);
        assert_eq!(message.extra["weight"], 1);
        assert_eq!(serde_json::to_value(&message).unwrap(), json);

        let parts = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        let message: Message = serde_json::from_value(parts).unwrap();
        assert!(matches!(message.content, Some(Content::Parts(_))));
        assert_eq!(message.text(), "a\nb");
        let both = json!({"role": "assistant", "content": "a", "reasoning_content": "b", "reasoning": "b"});
        let message: Message = serde_json::from_value(both.clone()).unwrap();
        assert_eq!(message.reasoning_content.as_deref(), Some("b"));
        assert_eq!(serde_json::to_value(&message).unwrap(), both);
        let none: Message = serde_json::from_value(json!({"role": "user", "tool_calls": null})).unwrap();
        assert!(none.tool_calls.is_empty());
    }
}
