//! Tools and calls as plain text, for templates without support for them.

use serde_json::Value;

use super::marks::{FUNCTIONS, FUNCTIONS_END};
use crate::message::{Content, FunctionCall, Message};

/// Describes tools in text, for models whose template does not support them: tools, calls and results become text that
/// [`CallSyntax::Fenced`](super::CallSyntax::Fenced) reads.
pub(crate) fn tools_as_text(messages: &[Message], tools: &[Value]) -> Vec<Message> {
    let mut told: Vec<Message> = Vec::with_capacity(messages.len());
    let mut answers = false;
    for message in messages {
        let after_answers = std::mem::replace(&mut answers, message.role == "tool");
        let mut message = message.clone();
        if answers {
            message.role = "user".into();
            let text = format!("```tool_output\n{}\n```", message.text());
            message.content = Some(text.into());
            message.tool_call_id = None;
        }
        for call in std::mem::take(&mut message.tool_calls) {
            let text = message.text();
            let before = if text.is_empty() { "" } else { "\n" };
            let call = format!("{text}{before}```json\n{}\n```", object(&call.function));
            message.content = Some(call.into());
        }
        match told.last_mut() {
            // Many templates require alternating roles.
            Some(last) if after_answers && message.role == "user" => {
                last.content = Some(format!("{}\n{}", last.text(), message.text()).into());
            }
            _ => told.push(message),
        }
    }
    if let Some(words) = describe_tools(tools) {
        // Every template accepts user messages, but not every one a system message.
        let at = told.iter().position(|message| message.role == "system");
        match at.or_else(|| told.iter().position(|message| message.role == "user")) {
            Some(at) => prepend(&mut told[at], &words),
            None => told.insert(0, Message::user(words)),
        }
    }
    told
}

/// Puts tools into a field of the system message, where Phi-4-mini's template expects them. Calls and results become text that
/// [`CallSyntax::Functions`](super::CallSyntax::Functions) reads.
pub(crate) fn tools_in_system_message(messages: &[Message], tools: &[Value]) -> Vec<Message> {
    let mut told = messages.to_vec();
    for message in &mut told {
        if message.role == "tool" {
            message.role = "tool_response".into();
        }
        let calls = std::mem::take(&mut message.tool_calls);
        if !calls.is_empty() {
            let calls: Vec<String> = calls.iter().map(|call| object(&call.function)).collect();
            let text = format!("{}{FUNCTIONS}[{}]{FUNCTIONS_END}", message.text(), calls.join(", "));
            message.content = Some(text.into());
        }
    }
    if !tools.is_empty() {
        if told.first().is_none_or(|first| first.role != "system") {
            told.insert(0, Message::system(""));
        }
        let functions = tools.iter().map(|tool| tool.get("function").unwrap_or(tool).clone());
        told[0].extra.insert(TOOL_FIELD.to_owned(), Value::from_iter(functions).to_string().into());
    }
    told
}

/// The field of a message that holds tools.
const TOOL_FIELD: &str = "tools";

/// A call as an object.
fn object(call: &FunctionCall) -> String {
    let (name, arguments) = (Value::from(call.name.as_str()), &call.arguments);
    let arguments = arguments.as_str().map_or_else(|| arguments.to_string(), str::to_owned);
    format!("{{\"name\": {name}, \"arguments\": {arguments}}}")
}

/// The description of the tools, if there are any.
fn describe_tools(tools: &[Value]) -> Option<String> {
    if tools.is_empty() {
        return None;
    }
    let mut words = "Functions you may call:\n".to_owned();
    for tool in tools {
        words.push_str(&tool.get("function").unwrap_or(tool).to_string());
        words.push('\n');
    }
    words.push_str(
        "To call one, answer with nothing but this:\n```json\n{\"name\": NAME, \"arguments\": {}}\n```",
    );
    Some(words)
}

fn prepend(message: &mut Message, words: &str) {
    message.content = Some(match message.content.take() {
        Some(Content::Parts(mut parts)) => {
            parts.insert(0, crate::message::ContentPart::text(words));
            Content::Parts(parts)
        }
        Some(Content::Text(text)) => Content::Text(format!("{words}\n\n{text}")),
        None => words.into(),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AnswerPart, CallReader, CallSyntax};
    use serde_json::json;

    fn messages(value: Value) -> Vec<Message> {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn calls_and_results_become_alternating_turns() {
        let call = json!({"id": "1", "function": {"name": "f\"", "arguments": "{\"a\": 1}"}});
        let told = tools_as_text(
            &messages(json!([
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": null, "tool_calls": [call, call]},
                {"role": "tool", "tool_call_id": "1", "content": "one"},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "two"}]},
                {"role": "user", "content": "c"},
                {"role": "user", "content": "d"},
            ])),
            &[],
        );
        let turns: Vec<_> = told.iter().map(|message| (message.role.as_str(), message.text())).collect();
        let fence = "```json\n{\"name\": \"f\\\"\", \"arguments\": {\"a\": 1}}\n```";
        let output = "```tool_output\none\n```\n```tool_output\ntwo\n```\nc";
        let expected = [
            ("user", "b".to_owned()),
            ("assistant", format!("{fence}\n{fence}")),
            ("user", output.to_owned()),
            ("user", "d".to_owned()),
        ];
        assert_eq!(turns, expected);
        assert!(told.iter().all(|message| message.tool_calls.is_empty()));
        // The text of a call in the prompt is read as a call in an answer.
        let tools = [json!({"function": {"name": "f\""}})];
        let parts = CallReader::new(CallSyntax::Fenced, &tools).push(&turns[1].1);
        assert_eq!(parts.iter().filter(|part| matches!(part, AnswerPart::Call(_))).count(), 2, "{parts:?}");
    }

    #[test]
    fn tools_are_described_once_and_plain_conversations_stay_unchanged() {
        let plain = messages(json!([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]));
        assert_eq!(tools_as_text(&plain, &[]), plain);
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let told = tools_as_text(&plain, &[tool]);
        assert!(told[0].text().contains("{\"name\":\"f\"}") && told[0].text().ends_with("\n\na"));
        assert_eq!(told[1], plain[1]);
        assert_eq!(tools_as_text(&[], &[json!({"name": "f"})]).len(), 1);
        let asked = tools_as_text(&[Message::user("What time is it?")], &[json!({"name": "now"})]);
        assert!(asked[0].text().contains("\"now\"") && asked[0].text().ends_with("What time is it?"));
    }
}
