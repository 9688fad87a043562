//! Tool calls of the pocket model with templates of several families.

use firebox_runtime::{Model, device};
use serde_json::{Value, json};

use crate::client::{Running, root};

/// As in Qwen and Hermes.
pub const TAGGED: &str = "{% if tools %}Call in <tool_call></tool_call>: {{ tools | tojson }}\n{% endif %}\
    {% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content or '' }}\
    {% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\
    {% if m.tool_call_id %} answers {{ m.tool_call_id }}{% endif %}{{ '<|end|>' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";
/// As in Mistral.
const LISTED: &str =
    "[AVAILABLE_TOOLS]{{ tools }}{% for m in messages %}{{ m.content }}[TOOL_CALLS]{% endfor %}";
/// As in Llama 3.
const BARE: &str = "{{ tools }}{% for m in messages %}{{ m.content }}<|python_tag|>{% endfor %}";
/// As in Phi-4-mini, which reads tools in the system message.
const FUNCTIONS: &str = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}\
    {% if m.tools %}{{ '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}{{ '<|end|>' }}{% endfor %}";
/// As in DeepSeek-V3.1 and R1.
const SEPARATED: &str = "{{ tools }}{% for m in messages %}{{ m.content }}<｜tool▁sep｜>{% endfor %}";
const SEPARATED_FENCE: &str =
    "{{ tools }}{% for m in messages %}{{ m.content }}<｜tool▁sep｜>\n```json\n{% endfor %}";
/// As in gpt-oss.
const CHANNELS: &str =
    "{{ tools }}{% for m in messages %}{{ m.content }}<|channel|><|call|>{% endfor %}<|start|>assistant";
/// A template without tools.
const NONE: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";

/// The pocket model with another template.
pub fn pocket(template: &str) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    let from = root("assets/pocket");
    for name in ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json"] {
        std::fs::copy(from.join(name), folder.path().join(name)).unwrap();
    }
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("tokenizer_config.json")).unwrap()).unwrap();
    config["chat_template"] = template.into();
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let model = Model::open(folder.path(), &device("cpu").unwrap()).unwrap();
    (folder, model)
}

pub fn serving(template: &str) -> (tempfile::TempDir, Running) {
    let (folder, model) = pocket(template);
    (folder, Running::serve(vec![("pocket".into(), model)], |_| {}))
}

fn asked(more: Value) -> Value {
    let place = json!({"$ref": "#/$defs/place"});
    let parameters = json!({
        "type": "object",
        "$defs": {"place": {"enum": ["Bern", "Ulm"]}},
        "properties": {"place": place, "warm": {"type": "boolean"}},
        "required": ["place", "warm"],
        "additionalProperties": false,
    });
    let weather = json!({"type": "function", "function": {"name": "weather", "parameters": parameters}});
    let noop = json!({"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "additionalProperties": false}}});
    let mut body = json!({
        "messages": [{"role": "user", "content": "Is it warm in Bern?"}],
        "tools": [weather, noop], "temperature": 0, "max_tokens": 100,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Merges the calls of a stream as clients do: the first part of a call has everything but its arguments.
fn joined(events: &[Value]) -> (Vec<Value>, Value) {
    let mut calls: Vec<Value> = Vec::new();
    let mut finish = Value::Null;
    for event in events {
        let choice = &event["choices"][0];
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let piece = call["function"]["arguments"].as_str().unwrap();
            if call.get("id").is_some() {
                assert_eq!((&call["index"], piece), (&json!(calls.len()), ""));
                let mut call = call.clone();
                call.as_object_mut().unwrap().remove("index");
                calls.push(call);
                continue;
            }
            assert_eq!(call["index"], calls.len() - 1);
            assert_eq!(call.as_object().unwrap().len(), 2, "{call}");
            let function = &mut calls.last_mut().unwrap()["function"];
            function["arguments"] = (function["arguments"].as_str().unwrap().to_owned() + piece).into();
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    (calls, finish)
}

#[test]
fn a_required_tool_is_called() {
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for template in [TAGGED, LISTED, BARE, FUNCTIONS, SEPARATED, SEPARATED_FENCE, CHANNELS, NONE] {
        let (_folder, server) = serving(template);
        let found = server.post("/v1/chat/completions", &asked(json!({"tool_choice": named}))).ok();
        let choice = &found["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{found}");
        assert_eq!(choice["message"]["content"], Value::Null);
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("weather")));
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(["Bern", "Ulm"].contains(&arguments["place"].as_str().unwrap()), "{arguments}");
        assert!(arguments["warm"].is_boolean());
        // Mistral's templates require ids of nine characters.
        assert_eq!(call["id"].as_str().unwrap().len() == 9, template == LISTED, "{call}");

        let body = asked(json!({"tool_choice": named, "stream": true}));
        let events = server.post("/v1/chat/completions", &body).events();
        let (calls, finish) = joined(&events);
        assert_eq!(finish, "tool_calls");
        assert_eq!(calls.len(), 1);
        let pieces = events.iter().filter(|event| !event["choices"][0]["delta"]["tool_calls"].is_null());
        assert!(pieces.count() > 3, "the arguments came at once: {events:?}");
        assert_eq!(calls[0]["function"], call["function"]);
        assert!(calls[0]["id"].is_string() && calls[0]["id"] != call["id"]);

        let found =
            server.post("/v1/chat/completions", &asked(json!({"tool_choice": "required", "n": 2}))).ok();
        for choice in found["choices"].as_array().unwrap() {
            let name = &choice["message"]["tool_calls"][0]["function"]["name"];
            assert!(name == "weather" || name == "noop", "{found}");
        }
    }
}

/// An object under several subschemas may have the properties that all of them name.
#[test]
fn a_composed_schema_can_be_satisfied() {
    let (_folder, server) = serving(TAGGED);
    let object = |name: &str| json!({"type": "object", "properties": {name: {"enum": ["a", "b"]}}, "required": [name]});
    let mut chosen = object("kind");
    chosen["anyOf"] = json!([object("path")]);
    let all = json!({"$defs": {"base": object("kind")}, "allOf": [{"$ref": "#/$defs/base"}, object("path")]});
    for parameters in [chosen, all] {
        let tool = json!({"type": "function", "function": {"name": "open", "parameters": parameters}});
        let body = asked(json!({"tools": [tool], "tool_choice": "required"}));
        let found = server.post("/v1/chat/completions", &body).ok();
        let arguments = &found["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
        let arguments = arguments.as_str().unwrap();
        assert!(arguments.contains("kind") && arguments.contains("path"), "{arguments}");
    }
}

#[test]
fn optional_calls_are_separated_from_text() {
    let (_folder, server) = serving(TAGGED);
    // A grammar forces the model's text to be a call.
    let schema = json!({"const": {"name": "noop", "arguments": {"a": 1}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    let (_other, bare) = serving(BARE);
    let body = asked(json!({"response_format": format, "logprobs": true}));
    let found = bare.post("/v1/chat/completions", &body).ok();
    assert_eq!(found["choices"][0]["finish_reason"], "tool_calls", "{found}");
    let arguments = &found["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
    let arguments: Value = serde_json::from_str(arguments.as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"a": 1}));
    // Parallel calls, or the first alone.
    let call = json!({"name": "noop", "arguments": {}});
    let both =
        json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": [call, call]}}});
    for (parallel, expected) in [(true, 2), (false, 1)] {
        let body = asked(json!({"response_format": both, "parallel_tool_calls": parallel, "stream": true}));
        let (calls, finish) = joined(&bare.post("/v1/chat/completions", &body).events());
        assert_eq!((calls.len(), finish), (expected, json!("tool_calls")));
    }
    // Without tools, or with none allowed, it is text.
    for open in [json!({"tools": null}), json!({"tool_choice": "none"})] {
        let mut body = body.clone();
        body.as_object_mut().unwrap().extend(open.as_object().unwrap().clone());
        let found = bare.post("/v1/chat/completions", &body).ok();
        assert_eq!(found["choices"][0]["finish_reason"], "stop", "{found}");
        assert!(found["choices"][0]["message"]["content"].as_str().unwrap().starts_with('{'));
        assert!(found["choices"][0]["message"].get("tool_calls").is_none());
    }
    // The next prompt contains the call and the tool's output.
    let call =
        json!({"id": "call_7", "type": "function", "function": {"name": "noop", "arguments": "{\"a\": 1}"}});
    let messages = json!([
        {"role": "user", "content": "Now?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_7", "content": "done"},
    ]);
    let tokens = server.post("/tokenize", &asked(json!({"messages": messages}))).ok()["tokens"].clone();
    let prompt = server.post("/detokenize", &json!({"tokens": tokens})).ok()["prompt"].clone();
    let prompt = prompt.as_str().unwrap();
    let expected = "<tool_call>{\"name\": \"noop\", \"arguments\": {\"a\": 1}}</tool_call>";
    assert!(prompt.contains(expected) && prompt.contains("done answers call_7"), "{prompt}");
    assert!(prompt.contains("\"weather\""), "{prompt}");
}

#[test]
fn a_truncated_call_is_reported_as_far_as_it_goes() {
    let (_folder, server) = serving(TAGGED);
    let mut body = asked(json!({"tool_choice": {"type": "function", "function": {"name": "weather"}}}));
    let whole = server.post("/v1/chat/completions", &body).ok();
    let whole = &whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
    for most in 1.. {
        body["max_tokens"] = most.into();
        let found = server.post("/v1/chat/completions", &body).ok();
        let choice = &found["choices"][0];
        if choice["finish_reason"] == "tool_calls" {
            assert!(most > 8, "{found}");
            break;
        }
        assert_eq!(choice["finish_reason"], "length");
        let arguments = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str();
        assert!(whole.as_str().unwrap().starts_with(arguments.unwrap_or_default()), "{found}");
    }
}

#[test]
fn tools_are_described_to_a_template_without_them() {
    let (_folder, server) = serving("{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}");
    let call = json!({"id": "call_7", "type": "function", "function": {"name": "noop", "arguments": "{}"}});
    let messages = json!([
        {"role": "user", "content": "Now?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_7", "content": "done"},
    ]);
    let body = asked(json!({"messages": messages, "max_tokens": 4}));
    let tokens = server.post("/tokenize", &body).ok()["tokens"].clone();
    let prompt = server.post("/detokenize", &json!({"tokens": tokens})).ok()["prompt"].clone();
    let prompt = prompt.as_str().unwrap();
    for part in [
        "user: Functions you may call:\n{\"name\":\"weather\"",
        "Now?",
        "{\"name\": \"noop\", \"arguments\": {}}",
        "done",
    ] {
        assert!(prompt.contains(part), "{part}: {prompt}");
    }
    let found = server.post("/v1/chat/completions", &body).ok();
    assert_eq!(found["usage"]["prompt_tokens"], tokens.as_array().unwrap().len());
}

#[test]
fn invalid_tools_are_rejected_by_name() {
    let (_folder, server) = serving(TAGGED);
    let ask = |more: Value| server.post("/v1/chat/completions", &asked(more));
    ask(json!({"tool_choice": "always"})).fails(400, "tool_choice");
    ask(json!({"tool_choice": {"type": "function", "function": {"name": "none"}}})).fails(400, "tool_choice");
    ask(json!({"tools": [], "tool_choice": "required"})).fails(400, "tool_choice");
    ask(json!({"tools": [{"type": "function"}]})).fails(400, "tools[0].name");
    ask(json!({"parallel_tool_calls": 1})).fails(400, "parallel_tool_calls");
    let bad = json!([{"type": "function", "function": {"name": "a", "parameters": {"type": "nothing"}}}]);
    ask(json!({"tools": bad, "tool_choice": "required"})).fails(400, "tools");
    // Optional tools are checked by the template alone.
    ask(json!({"tools": bad, "max_tokens": 2})).ok();
}

/// The bias has the model begin a call, and would have it write nothing but marks.
#[test]
fn a_call_of_a_strict_tool_fits_its_schema_where_the_model_chooses() {
    let (folder, _) = pocket(TAGGED);
    let path = folder.path().join("tokenizer.json");
    let tokenizer = std::fs::read_to_string(&path).unwrap().replace("<|system|>", "<tool_call>");
    std::fs::write(&path, tokenizer).unwrap();
    let model = Model::open(folder.path(), &device("cpu").unwrap()).unwrap();
    let mark = model.tokenizer().unwrap().token_to_id("<tool_call>").unwrap().to_string();
    let server = Running::serve(vec![("pocket".into(), model)], |_| {});
    for stream in [false, true] {
        let mut body =
            asked(json!({"logit_bias": {&mark: 100}, "parallel_tool_calls": false, "stream": stream}));
        body["tools"][0]["function"]["strict"] = true.into();
        body["tools"].as_array_mut().unwrap().pop();
        let answer = server.post("/v1/chat/completions", &body);
        let call = match stream {
            true => joined(&answer.events()).0[0].clone(),
            false => answer.ok()["choices"][0]["message"]["tool_calls"][0].clone(),
        };
        assert_eq!(call["function"]["name"], "weather", "{call}");
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(["Bern", "Ulm"].contains(&arguments["place"].as_str().unwrap()), "{arguments}");
        assert!(arguments["warm"].is_boolean() && arguments.as_object().unwrap().len() == 2, "{arguments}");
    }
    // What cannot be held is refused.
    let (_folder, bare) = serving(BARE);
    let ask = |more: Value| {
        let mut body = asked(more);
        body["tools"][0]["function"]["strict"] = true.into();
        bare.post("/v1/chat/completions", &body)
    };
    ask(json!({"grammar": "root ::= \"yes\""})).fails(400, "grammar");
    ask(json!({"response_format": {"type": "json_object"}})).fails(400, "tools");
    ask(json!({"response_format": {"type": "json_object"}, "tool_choice": "none", "max_tokens": 4})).ok();
    // Text stays free.
    let (_folder, server) = serving(TAGGED);
    let free = server.post("/v1/chat/completions", &asked(json!({"max_tokens": 12}))).ok();
    let mut body = asked(json!({"max_tokens": 12}));
    body["tools"][0]["function"]["strict"] = true.into();
    let strict = server.post("/v1/chat/completions", &body).ok();
    assert!(!strict["choices"][0]["message"]["content"].as_str().unwrap().is_empty(), "{strict}");
    assert_eq!(free["choices"][0]["finish_reason"], strict["choices"][0]["finish_reason"]);
    // With a format, the answer has that format or is a call.
    body["response_format"] = json!({"type": "json_schema", "json_schema": {"schema": {"const": {"a": 1}}}});
    let found = server.post("/v1/chat/completions", &body).ok();
    let message = &found["choices"][0]["message"];
    assert!(message["content"].is_null() || message["content"].as_str().unwrap().starts_with('{'), "{found}");
}
