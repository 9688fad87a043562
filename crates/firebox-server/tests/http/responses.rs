//! Tests of `/v1/responses`.

use serde_json::{Value, json};

use crate::client::Running;
use crate::tools::{TAGGED, serving};

/// Returns the events of a stream, and checks their names.
fn events(text: &str) -> Vec<Value> {
    let of = |event: &str| {
        let (name, data) = event.split_once("\ndata: ").unwrap();
        let value: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.strip_prefix("event: ").unwrap(), value["type"]);
        value
    };
    let events: Vec<Value> =
        text.split("\n\n").filter(|event| event.starts_with("event: ")).map(of).collect();
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], at);
    }
    events
}

fn said(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap()
}

#[test]
fn a_response_equals_a_chat() {
    let server = Running::start(|_| {});
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]);
    let chat = json!({"messages": messages, "max_tokens": 12, "temperature": 0});
    let chat = server.post("/v1/chat/completions", &chat).ok();
    let mut body = json!({
        "model": "llama", "instructions": "Be brief.", "input": "Hello", "max_output_tokens": 12,
        "temperature": 0, "metadata": {"a": "b"},
    });
    let found = server.post("/v1/responses", &body).ok();
    assert_eq!(said(&found), chat["choices"][0]["message"]["content"]);
    assert_eq!(found["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(found["usage"]["output_tokens"], chat["usage"]["completion_tokens"]);
    assert_eq!((&found["object"], &found["metadata"]["a"]), (&json!("response"), &json!("b")));
    let cut = chat["choices"][0]["finish_reason"] == "length";
    assert_eq!(found["status"], if cut { "incomplete" } else { "completed" });

    body["stream"] = true.into();
    let events = events(&server.post("/v1/responses", &body).text(200));
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
    );
    let last = if cut { "response.incomplete" } else { "response.completed" };
    assert_eq!(
        kinds[kinds.len() - 4..],
        ["response.output_text.done", "response.content_part.done", "response.output_item.done", last,]
    );
    let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(deltas, said(&found));
    let response = &events.last().unwrap()["response"];
    assert_eq!((said(response), &response["usage"]), (said(&found), &found["usage"]));
    assert_eq!(response["output"][0]["id"], events[2]["item"]["id"]);
}

#[test]
fn functions_are_called_and_their_output_is_used() {
    let (_folder, server) = serving(TAGGED);
    let parameters = json!({"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": false});
    let tool = json!({"type": "function", "name": "lamp", "parameters": parameters, "strict": true});
    let mut body = json!({
        "input": [{"role": "user", "content": "Light!"}], "tools": [tool], "temperature": 0,
        "tool_choice": {"type": "function", "name": "lamp"},
    });
    let found = server.post("/v1/responses", &body).ok();
    let call = &found["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("lamp")), "{found}");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["on"].is_boolean());
    assert_eq!(found["tools"][0]["name"], "lamp");

    body["stream"] = true.into();
    let events = events(&server.post("/v1/responses", &body).text(200));
    let of = |kind: &str| events.iter().find(|event| event["type"] == kind).unwrap();
    assert_eq!(of("response.output_item.added")["item"]["arguments"], "");
    let deltas: Vec<&str> = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(deltas.concat(), call["arguments"].as_str().unwrap());
    assert!(deltas.len() > 1, "{deltas:?}");
    assert_eq!(of("response.function_call_arguments.done")["arguments"], call["arguments"]);
    assert_eq!(of("response.completed")["response"]["output"][0]["arguments"], call["arguments"]);

    let input = json!([
        {"role": "user", "content": "Light!"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "it is on"},
    ]);
    let next = json!({"input": input, "tools": [tool], "temperature": 0, "max_output_tokens": 8});
    let longer = server.post("/v1/responses", &next).ok();
    assert_eq!(longer["output"][0]["type"], "message");
    assert!(longer["usage"]["input_tokens"].as_u64() > found["usage"]["input_tokens"].as_u64());
}

#[test]
fn a_response_matches_its_schema_and_unsupported_fields_are_rejected() {
    let server = Running::start(|_| {});
    let schema = json!({"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "a", "schema": schema});
    let body = json!({"input": "Sure?", "text": {"format": format}, "temperature": 0});
    let found = server.post("/v1/responses", &body).ok();
    let text: Value = serde_json::from_str(said(&found)).unwrap();
    assert!(text["sure"].is_boolean());
    let ask = |body: Value| server.post("/v1/responses", &body);
    ask(json!({})).fails(400, "input");
    ask(json!({"input": "a", "previous_response_id": "resp_1"})).fails(400, "previous_response_id");
    ask(json!({"input": "a", "background": true})).fails(400, "background");
    for of_chats in ["max_tokens", "max_completion_tokens", "response_format", "json_schema", "grammar"] {
        ask(json!({"input": "a", of_chats: {}})).fails(400, of_chats);
    }
    let unknown = json!({"type": "json_schema", "schema": {"type": "nothing"}});
    ask(json!({"input": "a", "text": {"format": unknown}})).fails(400, "text.format");
    ask(json!({"input": "a", "text": {"format": {"type": "xml"}}})).fails(400, "text.format.type");
    ask(json!({"input": "a", "text": {"format": {"type": "json_schema"}}})).fails(400, "text.format.schema");
    ask(json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}))
        .fails(400, "messages");
}

#[test]
fn a_response_includes_log_probabilities_where_they_are_asked_for() {
    let server = Running::start(|_| {});
    let mut chat =
        json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0});
    chat["logprobs"] = true.into();
    chat["top_logprobs"] = 3.into();
    let chat = server.post("/v1/chat/completions", &chat).ok();
    let expected = &chat["choices"][0]["logprobs"]["content"];
    assert!(!expected.as_array().unwrap().is_empty());
    let mut body = json!({
        "input": "Hello", "max_output_tokens": 8, "temperature": 0, "top_logprobs": 3,
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    });
    let found = server.post("/v1/responses", &body).ok();
    assert_eq!(&found["output"][0]["content"][0]["logprobs"], expected);
    assert_eq!(found["top_logprobs"], 3);

    body["stream"] = true.into();
    let events = events(&server.post("/v1/responses", &body).text(200));
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
    let told: Vec<&Value> = of("response.output_text.delta")
        .into_iter()
        .flat_map(|event| event["logprobs"].as_array().unwrap())
        .collect();
    assert!(!told.is_empty() && told.len() <= expected.as_array().unwrap().len());
    assert!(told.iter().zip(expected.as_array().unwrap()).all(|(told, expected)| *told == expected));
    assert_eq!(&of("response.output_text.done")[0]["logprobs"], expected);
    let last = events.last().unwrap();
    assert_eq!(&last["response"]["output"][0]["content"][0]["logprobs"], expected);

    let ask = |more: Value| {
        let mut body = json!({"input": "Hello", "max_output_tokens": 2});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/responses", &body)
    };
    assert_eq!(ask(json!({})).ok()["output"][0]["content"][0]["logprobs"], json!([]));
    ask(json!({"top_logprobs": 2})).fails(400, "top_logprobs");
    ask(json!({"include": "message.output_text.logprobs"})).fails(400, "include");
    ask(json!({"include": ["everything"]})).fails(400, "include[0]");
}
