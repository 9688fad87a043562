use firebox_text::Message;

use crate::error::ApiError;

/// For every byte that a body may have, its values may take so many in memory. Texts take about as many as they have, and ids of
/// tokens some eleven times as many; `{}` would take thirty times, and an object of one short field sixty.
const GROWTH: usize = 12;

/// A value in memory, wherever it stands.
const VALUE: usize = 80;
/// A field beside its value: its place among the others, and how it is found.
const FIELD: usize = 48;
/// What a text or the name of a field takes beside its letters.
const TEXT: usize = 32;
/// A list or an object that has anything in it begins with room for several.
const CONTAINER: usize = 256;

/// Nothing is read that is nested more deeply, and so nothing behind it either.
const DEEPEST: usize = 128;

/// Arguments of calls are JSON within texts, and become values once more when a prompt is written. Those of one request may take so
/// much then.
const ARGUMENTS: usize = 64 << 20;

/// Refuses JSON whose values would take much more memory than a body may be large, before any of them is made.
pub(crate) fn expect_light(json: &[u8], largest_body: usize) -> Result<(), ApiError> {
    let most = largest_body.saturating_mul(GROWTH);
    weight(json, most).map(drop).ok_or_else(|| ApiError::too_heavy(most))
}

/// The same of the arguments of all calls together.
pub(crate) fn expect_light_arguments(messages: &[Message]) -> Result<(), ApiError> {
    let calls = messages.iter().flat_map(|message| &message.tool_calls);
    let mut texts = calls.filter_map(|call| call.function.arguments.as_str());
    let left = texts.try_fold(ARGUMENTS, |left, text| Some(left - weight(text.as_bytes(), left)?));
    left.map(drop).ok_or_else(|| ApiError::too_heavy(ARGUMENTS))
}

/// About what the values of JSON take in memory; nothing where that is more than `most`.
fn weight(json: &[u8], most: usize) -> Option<usize> {
    let (mut taken, mut depth, mut is_opened) = (VALUE, 0_usize, false);
    let mut bytes = json.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte.is_ascii_whitespace() {
            continue;
        }
        let is_closed = matches!(byte, b']' | b'}');
        if is_opened && !is_closed {
            taken = taken.saturating_add(CONTAINER + VALUE);
        }
        is_opened = matches!(byte, b'[' | b'{');
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' => taken = taken.saturating_add(VALUE),
            b':' => taken = taken.saturating_add(FIELD),
            b'"' => {
                taken = taken.saturating_add(TEXT);
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
        if depth > DEEPEST {
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

    /// As many of a piece as a body may hold, in a list.
    fn full_of(piece: &str) -> String {
        let count = (LARGEST - 2) / (piece.len() + 1);
        let body = format!("[{}]", vec![piece; count].join(","));
        assert!(body.len() <= LARGEST && body.len() > LARGEST - 64);
        body
    }

    #[track_caller]
    fn passes(body: &str) {
        assert!(body.len() <= LARGEST, "{} bytes are refused for another reason", body.len());
        assert_eq!(expect_light(body.as_bytes(), LARGEST), Ok(()), "{:?}", body.get(..40));
    }

    #[test]
    fn a_value_takes_no_more_than_it_counts_for() {
        assert!(size_of::<Value>() <= VALUE);
    }

    #[test]
    fn a_body_of_many_values_is_refused_with_the_limit() {
        for piece in ["{}", "[]", "0", "\"\"", "{\"a\":1}", "[0]", "[[[]]]", "{\"a\":{\"b\":[1,2]}}", "null"]
        {
            let error = expect_light(full_of(piece).as_bytes(), LARGEST).unwrap_err();
            assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE, "{piece}");
            let message = error.value()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.contains(&(LARGEST * GROWTH).to_string()), "{message}");
        }
        // Space between them makes them fewer, not lighter.
        let spaced = format!("[{}]", vec!["{ }"; 1_350_000].join(" , "));
        assert!(expect_light(spaced.as_bytes(), LARGEST).is_err());
    }

    #[test]
    fn what_somebody_may_mean_is_let_through() {
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
    fn arguments_of_calls_are_weighed_together() {
        let message = |pieces: usize| {
            let arguments = format!("{{\"a\":[{}]}}", vec!["[0]"; pieces].join(","));
            let call = json!({ "type": "function", "function": { "name": "f", "arguments": arguments } });
            serde_json::from_value::<Message>(json!({ "role": "assistant", "tool_calls": [call] })).unwrap()
        };
        assert_eq!(expect_light_arguments(&vec![message(1000); 100]), Ok(()));
        for messages in [vec![message(1_000_000)], vec![message(1000); 1000]] {
            assert_eq!(expect_light_arguments(&messages).unwrap_err().status, StatusCode::PAYLOAD_TOO_LARGE);
        }
    }

    #[test]
    fn what_is_in_texts_is_no_value() {
        passes(&format!("{{\"a\": \"{}\"}}", "[{},{\\\"a\\\":0},".repeat(500_000)));
        passes(&format!("[\"{}\\\\\"]", "{},".repeat(2_000_000)));
    }

    #[test]
    fn what_cannot_be_read_is_left_to_who_reads_it() {
        passes(&"[".repeat(LARGEST));
        passes(&"{\"a\":".repeat(LARGEST / 5));
        passes("\"never ends\\");
        passes("}}]] nonsense and more of the same, for a while");
    }
}
