//! Conversations, in the shape of OpenAI's chat API.

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
    /// Who speaks: `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// What is said. An assistant that only calls tools says nothing.
    #[serde(default)]
    pub content: Option<Content>,
    /// Name of the speaker, or of the tool that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the assistant thought before it spoke. What others call it, `reasoning` or `thinking`, stays in `extra`: there may be
    /// several at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Tools the assistant calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Fields beyond the common ones, handed to the template as they are.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// What a message says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Text and other things, in order.
    Parts(Vec<ContentPart>),
}

/// One piece of a message with several.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContentPart {
    /// `text`, `image_url`, `input_audio`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// The text of a `text` part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The fields of the other kinds.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// One call of a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// What the answer refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Always `function` so far.
    #[serde(rename = "type", default = "function_kind")]
    pub kind: String,
    /// The function and what it is given.
    pub function: FunctionCall,
}

/// The function of a [`ToolCall`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Name of the function.
    pub name: String,
    /// An object, or the same as a JSON string, which is how OpenAI's API has it. Templates see an object either way.
    #[serde(default)]
    pub arguments: Value,
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

    /// What the user says.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::new("user", content)
    }

    /// What the model is told to be.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::new("system", content)
    }

    /// What the model said.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self::new("assistant", content)
    }

    /// The text of the message, its parts joined by line breaks; empty if it says nothing.
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
