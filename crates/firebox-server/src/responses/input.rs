//! Converts the input items of a request to messages.

use firebox_text::{Content, ContentPart, FunctionCall, Message, ToolCall};
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::json_fields::{JsonFields, kind};

/// Reads `instructions` and `input` as messages.
pub(super) fn messages(fields: &JsonFields<'_>) -> Result<Vec<Message>, ApiError> {
    let mut messages = Vec::new();
    if let Some(instructions) = fields.string("instructions")? {
        messages.push(Message::system(instructions));
    }
    match fields.get("input") {
        None => return Err(fields.error("input", "is missing")),
        Some(Value::String(text)) => messages.push(Message::user(text.as_str())),
        Some(Value::Array(items)) if items.is_empty() => {
            return Err(fields.error("input", "is empty"));
        }
        Some(Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                let at = format!("input[{index}]");
                let Value::Object(map) = item else {
                    return Err(fields.error(&at, format!("expected an object, found {}", kind(item))));
                };
                add(&mut messages, &JsonFields::nested(map, at))?;
            }
            // Thoughts that nothing followed.
            messages.retain(|message| !has_only_thoughts(message));
        }
        Some(other) => {
            let expected = format!("expected a string or a list of items, found {}", kind(other));
            return Err(fields.error("input", expected));
        }
    }
    Ok(messages)
}

fn add(messages: &mut Vec<Message>, item: &JsonFields<'_>) -> Result<(), ApiError> {
    match item.string("type")? {
        None | Some("message") => {
            let role = match item.required_string("role")? {
                "developer" => "system",
                role => role,
            };
            let content = content(item, "content")?;
            match messages.last_mut() {
                Some(message) if role == "assistant" && has_only_thoughts(message) => {
                    message.content = Some(content);
                }
                _ => messages.push(Message::new(role, content)),
            }
        }
        Some("function_call") => {
            let call = ToolCall {
                id: Some(item.required_string("call_id")?.to_owned()),
                kind: "function".into(),
                function: FunctionCall {
                    name: item.required_string("name")?.to_owned(),
                    arguments: item.required_string("arguments")?.into(),
                },
            };
            // The text before a call, and parallel calls, form one message.
            match messages.last_mut() {
                Some(message) if message.role == "assistant" => message.tool_calls.push(call),
                _ => {
                    let mut message = Message::assistant("");
                    message.content = None;
                    message.tool_calls.push(call);
                    messages.push(message);
                }
            }
        }
        Some("function_call_output") => {
            let mut message = Message::new("tool", content(item, "output")?);
            message.tool_call_id = Some(item.required_string("call_id")?.to_owned());
            messages.push(message);
        }
        Some("reasoning") => {
            if let Some(thoughts) = thoughts(item)? {
                let mut message = Message::assistant("");
                message.content = None;
                message.reasoning_content = Some(thoughts);
                messages.push(message);
            }
        }
        Some(other) => return Err(item.error("type", format!("{other:?} is not supported"))),
    }
    Ok(())
}

/// The text of thoughts, which belong to the message or call behind them.
fn thoughts(item: &JsonFields<'_>) -> Result<Option<String>, ApiError> {
    if matches!(item.get("content"), None | Some(Value::Null)) {
        return Ok(None);
    }
    let text = Message::new("assistant", content(item, "content")?).text();
    Ok(Some(text).filter(|text| !text.is_empty()))
}

fn has_only_thoughts(message: &Message) -> bool {
    message.role == "assistant" && message.content.is_none() && message.tool_calls.is_empty()
}

fn content(item: &JsonFields<'_>, field: &str) -> Result<Content, ApiError> {
    let parts = match item.get(field) {
        None => return Err(item.error(field, "is missing")),
        Some(Value::String(text)) => return Ok(Content::Text(text.clone())),
        Some(Value::Array(parts)) => parts,
        Some(other) => {
            let expected = format!("expected a string or a list of parts, found {}", kind(other));
            return Err(item.error(field, expected));
        }
    };
    let read = parts.iter().enumerate().map(|(index, part)| {
        let at = format!("{field}[{index}]");
        let Value::Object(map) = part else {
            return Err(item.error(&at, format!("expected an object, found {}", kind(part))));
        };
        let part = JsonFields::nested(map, item.name(&at));
        match part.required_string("type")? {
            "input_text" | "output_text" | "reasoning_text" | "text" => {
                Ok(ContentPart::text(part.required_string("text")?))
            }
            // The template decides which other parts it supports.
            other => {
                let mut extra: Map<String, Value> = map.clone();
                extra.shift_remove("type");
                Ok(ContentPart { kind: other.to_owned(), text: None, extra })
            }
        }
    });
    Ok(Content::Parts(read.collect::<Result<_, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn items_become_messages() {
        let body = json!({"instructions": "Be brief.", "input": [
            {"role": "developer", "content": "a"},
            {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "summary": []},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "d"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "So?"}]},
        ]});
        let messages = messages(&JsonFields::new(&body).unwrap()).unwrap();
        let told: Vec<_> = messages
            .iter()
            .map(|message| (message.role.as_str(), message.text(), message.tool_calls.len()))
            .collect();
        let expected = [
            ("system", "Be brief.", 0),
            ("system", "a", 0),
            ("user", "b", 0),
            ("assistant", "c", 2),
            ("tool", "d", 0),
        ];
        assert_eq!(told, expected.map(|(role, text, calls)| (role, text.to_owned(), calls)));
        assert_eq!(messages[3].reasoning_content.as_deref(), Some("Hm."));
        assert_eq!(messages[4].tool_call_id.as_deref(), Some("1"));
    }

    #[test]
    fn errors_name_the_field() {
        let named = |input: Value, name: &str| {
            let body = json!({ "input": input });
            let error = messages(&JsonFields::new(&body).unwrap()).unwrap_err().value();
            assert_eq!(error["error"]["param"], name, "{body}");
        };
        named(Value::Null, "input");
        named(json!([]), "input");
        named(json!(1), "input");
        named(json!([1]), "input[0]");
        named(json!([{"content": "a"}]), "input[0].role");
        named(json!([{"role": "user"}]), "input[0].content");
        named(json!([{"role": "user", "content": [1]}]), "input[0].content[0]");
        named(json!([{"role": "user", "content": [{"type": "input_text"}]}]), "input[0].content[0].text");
        named(json!([{"type": "computer_call"}]), "input[0].type");
        named(json!([{"type": "function_call", "call_id": "a"}]), "input[0].name");
    }
}
