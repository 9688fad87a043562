//! Tests of answers with thoughts.

use firebox_runtime::{Model, device};
use firebox_testing::thinking::{self, ANSWER, THOUGHTS};
use serde_json::{Value, json};

use crate::client::Running;

fn thinking() -> (tempfile::TempDir, Running) {
    let folder = tempfile::tempdir().unwrap();
    thinking::write(folder.path());
    let model = Model::open(folder.path(), &device("cpu").unwrap()).unwrap();
    (folder, Running::serve(vec![("pocket".into(), model)], |_| {}))
}

fn asked(more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 40,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn chats_separate_thoughts_from_the_answer() {
    let (_folder, server) = thinking();
    let chat = "/v1/chat/completions";
    let found = server.post(chat, &asked(json!({}))).ok();
    let message = &found["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!(THOUGHTS), &json!(ANSWER)));
    let usage = &found["usage"];
    let [thought, all] =
        [&usage["completion_tokens_details"]["reasoning_tokens"], &usage["completion_tokens"]];
    assert_eq!(thought, 11, "ten pieces between the marks, and a mark: {usage}");
    assert!(all.as_u64() > thought.as_u64());

    let body = asked(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let events = server.post(chat, &body).events();
    let joined = |field: &str| -> String {
        events.iter().filter_map(|event| event["choices"][0]["delta"][field].as_str()).collect()
    };
    assert_eq!((joined("reasoning_content").as_str(), joined("content").as_str()), (THOUGHTS, ANSWER));
    let pieces = events.iter().filter(|event| event["choices"][0]["delta"]["reasoning_content"].is_string());
    assert!(pieces.count() > 3, "the thoughts came at once");
    let streamed = &events.last().unwrap()["usage"];
    assert_eq!(streamed["completion_tokens_details"], usage["completion_tokens_details"]);

    // Cut within its thoughts, it has said nothing.
    let found = server.post(chat, &asked(json!({"max_tokens": 3}))).ok();
    let message = &found["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("am the"), &json!("")));
}

/// A grammar begins with the first token.
#[test]
fn formats_of_answers_leave_no_place_for_thoughts() {
    let (_folder, server) = thinking();
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    let found = server.post("/v1/chat/completions", &asked(json!({"response_format": format}))).ok();
    let message = &found["choices"][0]["message"];
    assert!(message.get("reasoning_content").is_none(), "{message}");
    let content: Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
    assert!(content["a"].is_boolean());
}

#[test]
fn responses_have_an_item_for_reasoning() {
    let (_folder, server) = thinking();
    let mut body = json!({"input": "Who are you?", "temperature": 0, "max_output_tokens": 40});
    let found = server.post("/v1/responses", &body).ok();
    let [reasoning, message] = [&found["output"][0], &found["output"][1]];
    assert_eq!((&reasoning["type"], &message["type"]), (&json!("reasoning"), &json!("message")), "{found}");
    assert_eq!(reasoning["content"], json!([{"type": "reasoning_text", "text": THOUGHTS}]));
    assert_eq!(message["content"][0]["text"], ANSWER);
    assert_eq!(found["usage"]["output_tokens_details"]["reasoning_tokens"], 11);

    body["stream"] = true.into();
    let text = server.post("/v1/responses", &body).text(200);
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
    let joined = |kind: &str| -> String {
        let deltas = events.iter().filter(|event| event["type"] == kind);
        deltas.map(|event| event["delta"].as_str().unwrap()).collect()
    };
    assert_eq!(joined("response.reasoning_text.delta"), THOUGHTS);
    assert_eq!(joined("response.output_text.delta"), ANSWER);
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let done = kinds.iter().position(|kind| *kind == "response.reasoning_text.done").unwrap();
    assert_eq!(
        kinds[done + 1..done + 5],
        [
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    assert_eq!(events[done]["text"], THOUGHTS);

    // What it thought may be sent again.
    let mut input = found["output"].as_array().unwrap().clone();
    input.insert(0, json!({"role": "user", "content": "Who are you?"}));
    input.push(json!({"role": "user", "content": "And again?"}));
    body = json!({"input": input, "temperature": 0, "max_output_tokens": 4});
    server.post("/v1/responses", &body).ok();
}
