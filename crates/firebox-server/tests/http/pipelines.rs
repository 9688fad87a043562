//! Pipelines: a router chooses the model, and the fallback answers if that one cannot.

use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{MemoryError, Model, device};
use firebox_server::{ModelSpec, PipelineSpec, Server, ServerConfig};
use serde_json::{Value, json};

use crate::client::{Running, gguf, root};

const CODE: &str = "Write a loop from 3 to 12.";

fn pocket() -> Model {
    let model = Model::open(root("assets/pocket"), &device("cpu").unwrap()).unwrap();
    model.with_heads(HeadPoolConfig::patient()).unwrap()
}

fn spec(name: &str) -> PipelineSpec {
    PipelineSpec::new(name, "pocket", "llama")
}

/// A server with the pocket model, whose router chooses, another model, and one that cannot be opened.
fn running() -> Running {
    let broken = ModelSpec::lazy("broken", || {
        Err(MemoryError::TooLittleMemory { needed: 2, memory: 1, kv_tokens: 128 }.into())
    });
    let models = vec![ModelSpec::new("pocket", pocket()), ModelSpec::new("llama", gguf("llama")), broken];
    Running::with_models(models, |config| {
        config.pipelines = vec![
            spec("assistant").with_specialist("code", "pocket:code"),
            spec("failing").with_specialist("code", "broken"),
            spec("headless").with_specialist("code", "pocket:missing"),
            spec("doubtful").with_specialist("code", "pocket:code").with_confidence(1.1),
        ];
    })
}

fn chat(model: &str, text: &str) -> Value {
    let messages = [json!({"role": "user", "content": text})];
    json!({"model": model, "messages": messages, "max_tokens": 12, "temperature": 0})
}

#[test]
fn a_router_chooses_the_specialist_and_others_go_to_the_fallback() {
    let server = running();
    let ask = |model: &str, text: &str| server.post("/v1/chat/completions", &chat(model, text));
    let routed = ask("assistant", CODE);
    assert!(routed.head.contains("x-firebox-route: code"), "{}", routed.head);
    let routed = routed.ok();
    assert_eq!(routed["model"], "pocket:code");
    assert_eq!(routed["choices"], ask("pocket:code", CODE).ok()["choices"]);
    // The router's label has no specialist.
    let other = "Who are you?";
    let answer = ask("assistant", other);
    assert!(answer.head.contains("x-firebox-route: fallback"), "{}", answer.head);
    let answer = answer.ok();
    assert_eq!(answer["model"], "llama");
    assert_eq!(answer["choices"], ask("llama", other).ok()["choices"]);
    // The specialist is not there, or the router is not sure enough.
    for pipeline in ["failing", "headless", "doubtful"] {
        assert_eq!(ask(pipeline, CODE).ok()["model"], "llama", "{pipeline}");
    }
    let metrics = server.get("/metrics").text(200);
    for line in [
        "firebox_pipeline_requests_total{pipeline=\"assistant\",route=\"code\"} 1\n",
        "firebox_pipeline_requests_total{pipeline=\"assistant\",route=\"fallback\"} 1\n",
        "firebox_pipeline_requests_total{pipeline=\"failing\",route=\"fallback\"} 1\n",
    ] {
        assert!(metrics.contains(line), "no {line} in {metrics}");
    }
}

#[test]
fn streams_completions_and_responses_run_the_pipeline() {
    let server = running();
    let mut body = chat("assistant", CODE);
    let whole = server.post("/v1/chat/completions", &body).ok();
    body["stream"] = true.into();
    let events = server.post("/v1/chat/completions", &body).events();
    assert!(events.iter().all(|event| event["model"] == "pocket:code"), "{events:?}");
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().unwrap());
    body["model"] = "failing".into();
    let events = server.post("/v1/chat/completions", &body).events();
    assert!(events.iter().all(|event| event["model"] == "llama"), "{events:?}");

    let body = json!({"model": "assistant", "prompt": CODE, "max_tokens": 4, "temperature": 0});
    assert_eq!(server.post("/v1/completions", &body).ok()["model"], "pocket:code");
    // A router reads texts only.
    let body = json!({"model": "assistant", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0});
    assert_eq!(server.post("/v1/completions", &body).ok()["model"], "llama");
    let body = json!({"model": "assistant", "input": CODE, "max_output_tokens": 4, "temperature": 0});
    assert_eq!(server.post("/v1/responses", &body).ok()["model"], "pocket:code");
}

#[test]
fn a_pipeline_is_listed_and_refuses_what_it_cannot_do() {
    let server = running();
    let listed = server.get("/v1/models").ok();
    let names: Vec<&str> =
        listed["data"].as_array().unwrap().iter().filter_map(|model| model["id"].as_str()).collect();
    assert!(names.contains(&"assistant") && names.contains(&"pocket:code"), "{names:?}");
    server.get("/v1/models/assistant").ok();
    let body = json!({"model": "assistant", "content": "Hello"});
    server.post("/tokenize", &body).fails_saying(400, "is a pipeline");
    let mut body = chat("assistant", CODE);
    body["temperature"] = json!(-1);
    server.post("/v1/chat/completions", &body).fails_saying(400, "temperature");
}

#[test]
fn a_pipeline_that_cannot_work_is_refused_at_the_start() {
    let code = |spec: PipelineSpec| spec.with_specialist("code", "pocket:code");
    for (pipelines, reason) in [
        (vec![spec("assistant")], "no specialists"),
        (vec![code(spec("llama"))], "another name"),
        (vec![code(spec("a")), code(spec("a"))], "two of this name"),
        (vec![spec("a").with_specialist("code", "nowhere")], "no model \"nowhere\""),
        (vec![spec("a").with_specialist("cod", "llama")], "no label \"cod\"; it has"),
        (vec![code(PipelineSpec::new("a", "llama", "llama"))], "no head \"router\""),
        (vec![code(PipelineSpec::new("a", "pocket:code", "llama"))], "name a classifier"),
    ] {
        let models = vec![ModelSpec::new("pocket", pocket()), ModelSpec::new("llama", gguf("llama"))];
        let config =
            ServerConfig { address: ([127, 0, 0, 1], 0).into(), pipelines, ..ServerConfig::default() };
        let error = Server::with_models(config, models).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
