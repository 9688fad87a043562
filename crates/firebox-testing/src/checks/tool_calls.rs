//! Checks the parsing of tool calls: the division of a stream changes nothing, and calls match their announced pieces.

use firebox_text::{AnswerPart, CallReader, CallSyntax};
use serde_json::{Value, json};

/// Checks an input whose first byte selects the syntax and whose second one divides the text. Returns whether it contains a call.
pub fn check(input: &[u8]) -> bool {
    let [syntax, cut, text @ ..] = input else { return false };
    let text = String::from_utf8_lossy(text);
    let syntax = CallSyntax::ALL[usize::from(*syntax) % CallSyntax::ALL.len()];
    let whole = read(syntax, [&*text]);
    let (mut pieces, mut rest) = (Vec::new(), &*text);
    while !rest.is_empty() {
        // Successive lengths differ, so that marks are divided at different places.
        let length = (usize::from(*cut) + pieces.len()) % 7 + 1;
        let at = rest.char_indices().nth(length).map_or(rest.len(), |(at, _)| at);
        let (piece, behind) = rest.split_at(at);
        pieces.push(piece);
        rest = behind;
    }
    assert_eq!(read(syntax, pieces), whole, "{syntax:?}");
    whole.iter().any(|part| matches!(part, AnswerPart::Call(_)))
}

/// Returns the declared tools: one with typed parameters, and one without parameters.
pub fn tools() -> Vec<Value> {
    let properties = json!({"place": {"type": "string"}, "days": {"type": "integer"}, "deep": {}});
    let weather = json!({"name": "weather", "parameters": {"type": "object", "properties": properties}});
    vec![
        json!({"type": "function", "function": weather}),
        json!({"type": "function", "function": {"name": "noop"}}),
    ]
}

/// Reads an answer that arrives in pieces, and joins neighbouring parts of the same kind. Checks complete calls against their
/// parts.
#[track_caller]
pub fn read<'a>(syntax: CallSyntax, pieces: impl IntoIterator<Item = &'a str>) -> Vec<AnswerPart> {
    let mut reader = CallReader::new(syntax, &tools());
    let mut all: Vec<AnswerPart> = Vec::new();
    let mut parts: Vec<AnswerPart> = pieces.into_iter().flat_map(|piece| reader.push(piece)).collect();
    parts.extend(reader.finish());
    for part in parts {
        match (all.last_mut(), part) {
            (Some(AnswerPart::Text(before)), AnswerPart::Text(text)) => before.push_str(&text),
            (Some(AnswerPart::Thought(before)), AnswerPart::Thought(thought)) => before.push_str(&thought),
            (Some(AnswerPart::Arguments(before)), AnswerPart::Arguments(piece)) => before.push_str(&piece),
            (_, part) => all.push(part),
        }
    }
    let mut begun: Option<(&str, String)> = None;
    for part in &all {
        match part {
            AnswerPart::Text(text) | AnswerPart::Thought(text) => {
                assert!(begun.is_none() && !text.is_empty(), "{all:?}")
            }
            AnswerPart::CallStart(name) => assert_eq!(begun.replace((name, String::new())), None, "{all:?}"),
            AnswerPart::Arguments(piece) => begun.as_mut().expect("arguments of a call").1.push_str(piece),
            AnswerPart::Call(call) => {
                let arguments = call.arguments.as_str().expect("a text").to_owned();
                assert_eq!(begun.take(), Some((call.name.as_str(), arguments)), "{all:?}");
            }
        }
    }
    assert_eq!(begun, None, "{all:?}");
    all
}
