//! Limits the memory that the JSON of a request takes once parsed.

use firebox_text::Message;

use crate::error::ApiError;

/// Bytes of memory that values may take for every byte of the largest body. Texts take about one, token ids
/// about eleven; `{}` would take thirty, an object with one short field sixty.
pub(crate) const MEMORY_PER_BODY_BYTE: usize = 12;

/// Memory of a value.
const VALUE_BYTES: usize = 80;
/// Memory of a field beside its value: its key and its place in the map.
const FIELD_BYTES: usize = 48;
/// Memory of a string or a key beside its bytes.
const STRING_BYTES: usize = 32;
/// Memory that the first element of a list or an object allocates.
const CONTAINER_BYTES: usize = 256;

/// The parser's nesting limit. It reads nothing beyond.
const MAX_DEPTH: usize = 128;

/// Memory for the arguments of all calls in a request. They are JSON within strings, parsed when the prompt is
/// rendered.
const MAX_ARGUMENT_BYTES: usize = 64 << 20;

/// Rejects JSON whose values would take much more memory than a body may have bytes, before parsing it. Returns the memory
/// that they take beside the bytes of texts.
pub(crate) fn check_memory(json: &[u8], max_body_bytes: usize) -> Result<usize, ApiError> {
    let most = max_body_bytes.saturating_mul(MEMORY_PER_BODY_BYTE);
    estimate_memory(json, most).ok_or_else(|| ApiError::too_many_values(most))
}

/// Rejects calls whose arguments together would take too much memory.
pub(crate) fn check_arguments_memory(messages: &[Message]) -> Result<(), ApiError> {
    let calls = messages.iter().flat_map(|message| &message.tool_calls);
    let mut texts = calls.filter_map(|call| call.function.arguments.as_str());
    let left =
        texts.try_fold(MAX_ARGUMENT_BYTES, |left, text| Some(left - estimate_memory(text.as_bytes(), left)?));
    left.map(drop).ok_or_else(|| ApiError::too_many_values(MAX_ARGUMENT_BYTES))
}

/// Estimates the memory that JSON takes once parsed; `None` above `most`.
fn estimate_memory(json: &[u8], most: usize) -> Option<usize> {
    let (mut taken, mut depth, mut is_opened) = (VALUE_BYTES, 0_usize, false);
    let mut bytes = json.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte.is_ascii_whitespace() {
            continue;
        }
        let is_closed = matches!(byte, b']' | b'}');
        if is_opened && !is_closed {
            taken = taken.saturating_add(CONTAINER_BYTES + VALUE_BYTES);
        }
        is_opened = matches!(byte, b'[' | b'{');
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' => taken = taken.saturating_add(VALUE_BYTES),
            b':' => taken = taken.saturating_add(FIELD_BYTES),
            b'"' => {
                taken = taken.saturating_add(STRING_BYTES);
                while let Some(letter) = bytes.next() {
                    match letter {
                        b'"' => break,
                        b'\\' => {
                            bytes.next();
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
        if depth > MAX_DEPTH {
            break;
        }
        if taken > most {
            return None;
        }
    }
    (taken <= most).then_some(taken)
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use serde_json::{Value, json};

    use super::*;

    const LARGEST: usize = 8 << 20;

    /// Repeats a piece in a list until the largest body is full.
    fn full_of(piece: &str) -> String {
        let count = (LARGEST - 2) / (piece.len() + 1);
        let body = format!("[{}]", vec![piece; count].join(","));
        assert!(body.len() <= LARGEST && body.len() > LARGEST - 64);
        body
    }

    #[track_caller]
    fn passes(body: &str) {
        assert!(body.len() <= LARGEST, "{} bytes are refused for another reason", body.len());
        assert_eq!(check_memory(body.as_bytes(), LARGEST).map(drop), Ok(()), "{:?}", body.get(..40));
    }

    #[test]
    fn the_size_of_a_value_is_not_underestimated() {
        assert!(size_of::<Value>() <= VALUE_BYTES);
    }

    #[test]
    fn a_body_of_many_values_is_rejected_with_the_limit() {
        for piece in ["{}", "[]", "0", "\"\"", "{\"a\":1}", "[0]", "[[[]]]", "{\"a\":{\"b\":[1,2]}}", "null"]
        {
            let error = check_memory(full_of(piece).as_bytes(), LARGEST).unwrap_err();
            assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE, "{piece}");
            let message = error.value()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.contains(&(LARGEST * MEMORY_PER_BODY_BYTE).to_string()), "{message}");
        }
        // Whitespace takes none.
        let spaced = format!("[{}]", vec!["{ }"; 1_350_000].join(" , "));
        assert!(check_memory(spaced.as_bytes(), LARGEST).is_err());
    }

    #[test]
    fn large_legitimate_bodies_pass() {
        let tokens: Vec<u32> = (0..130_000).collect();
        passes(&json!({ "prompt": tokens, "max_tokens": 16 }).to_string());
        let texts: Vec<String> = (0..2048).map(|at| format!("{at} ").repeat(700)).collect();
        passes(&json!({ "input": texts }).to_string());
        let of_tokens: Vec<Vec<u32>> = vec![(100_000..100_400).collect(); 2048];
        passes(&json!({ "input": of_tokens }).to_string());
        let field = json!({ "type": "string", "description": "The name of a town.", "minLength": 1 });
        let fields: serde_json::Map<String, Value> =
            (0..400).map(|at| (format!("field_{at}"), field.clone())).collect();
        let parameters = json!({ "type": "object", "properties": fields, "required": ["field_0"] });
        let tool = json!({ "type": "function", "function": { "name": "f", "parameters": parameters } });
        let tools = json!({ "tools": vec![tool; 36] }).to_string();
        assert!(tools.len() > 1 << 20, "{}", tools.len());
        passes(&tools);
        let message = json!({ "role": "user", "content": "What is there to see in Oslo?" });
        passes(&json!({ "messages": vec![message; 100_000] }).to_string());
    }

    #[test]
    fn arguments_of_all_calls_are_summed() {
        let message = |pieces: usize| {
            let arguments = format!("{{\"a\":[{}]}}", vec!["[0]"; pieces].join(","));
            let call = json!({ "type": "function", "function": { "name": "f", "arguments": arguments } });
            serde_json::from_value::<Message>(json!({ "role": "assistant", "tool_calls": [call] })).unwrap()
        };
        assert_eq!(check_arguments_memory(&vec![message(1000); 100]), Ok(()));
        for messages in [vec![message(1_000_000)], vec![message(1000); 1000]] {
            assert_eq!(check_arguments_memory(&messages).unwrap_err().status, StatusCode::PAYLOAD_TOO_LARGE);
        }
    }

    #[test]
    fn strings_are_not_parsed_for_values() {
        passes(&format!("{{\"a\": \"{}\"}}", "[{},{\\\"a\\\":0},".repeat(500_000)));
        passes(&format!("[\"{}\\\\\"]", "{},".repeat(2_000_000)));
    }

    #[test]
    fn malformed_json_is_left_to_the_parser() {
        passes(&"[".repeat(LARGEST));
        passes(&"{\"a\":".repeat(LARGEST / 5));
        passes("\"never ends\\");
        passes("}}]] nonsense and more of the same, for a while");
    }
}
