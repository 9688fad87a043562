//! Checks that a chat template is deterministic and bounded, or fails with an error.

use firebox_text::{ChatTemplate, Message, TemplateOptions};
use serde_json::{Map, json};

/// The most bytes that a template may produce.
const MAX_BYTES: usize = 64 << 20;

/// Checks an input: a template, a zero, and messages as JSON, which have a default. Returns whether the template produced a prompt.
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
    let mut rendered = false;
    for tools in [None, Some(tools)] {
        let told = template.messages_with_tools(&messages, tools.as_deref().unwrap_or_default());
        // The current time would differ between the two runs.
        let now = Some(std::time::UNIX_EPOCH);
        let options = TemplateOptions { tools, now, ..TemplateOptions::default() };
        let render = || template.render(&told, &options);
        match (render(), render()) {
            (Ok(one), Ok(other)) => {
                assert_eq!(one, other);
                assert!(one.len() <= MAX_BYTES, "{} bytes", one.len());
                rendered = true;
            }
            (Err(error), Err(_)) => assert!(!error.to_string().is_empty()),
            (one, other) => panic!("{one:?} and then {other:?}"),
        }
    }
    template.call_syntax();
    rendered
}
