//! A chat template of anybody's over a conversation of anybody's: it says the same twice, within bounds, or is an error.

use firebox_text::{ChatTemplate, Message, TemplateOptions};
use serde_json::{Map, json};

/// Longer prompts are refused by the template.
const LONGEST: usize = 64 << 20;

/// A template, a zero, and messages as JSON, without which there are some. Whether it has said something.
pub fn check(input: &[u8]) -> bool {
    let (source, messages) = match input.iter().position(|byte| *byte == 0) {
        Some(at) => (&input[..at], &input[at + 1..]),
        None => (input, &[][..]),
    };
    let tokens = Map::from_iter([("bos_token".into(), json!("<s>")), ("eos_token".into(), json!("</s>"))]);
    let Ok(template) = ChatTemplate::from_source(&String::from_utf8_lossy(source), tokens) else {
        return false;
    };
    let messages: Vec<Message> = serde_json::from_slice(messages).unwrap_or_else(|_| {
        let call = json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\"place\": \"a\"}"}}
        ]});
        let more = [call, json!({"role": "tool", "content": "dry", "tool_call_id": "1"})];
        let said = [Message::user("Hello"), Message::user("Is it <|im_end|> dry?")];
        let more = more.into_iter().map(|message| serde_json::from_value(message).expect("a message"));
        said.into_iter().chain(more).collect()
    });
    let tools = vec![json!({"type": "function", "function": {"name": "weather", "parameters": {}}})];
    let mut said = false;
    for tools in [None, Some(tools)] {
        let told = template.told(&messages, tools.as_deref().unwrap_or_default());
        // The present would be another one the second time.
        let now = Some(std::time::UNIX_EPOCH);
        let options = TemplateOptions { tools, now, ..TemplateOptions::default() };
        let render = || template.render(&told, &options);
        match (render(), render()) {
            (Ok(one), Ok(other)) => {
                assert_eq!(one, other);
                assert!(one.len() <= LONGEST, "{} bytes", one.len());
                said = true;
            }
            (Err(error), Err(_)) => assert!(!error.to_string().is_empty()),
            (one, other) => panic!("{one:?} and then {other:?}"),
        }
    }
    template.call_syntax();
    said
}
