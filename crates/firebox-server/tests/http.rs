//! Tests a server in this process with clients of all kinds over real connections.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "http/bombs.rs"]
mod bombs;
#[path = "http/client.rs"]
mod client;
#[path = "http/clients.rs"]
mod clients;
#[path = "http/credentials.rs"]
mod credentials;
#[path = "http/document.rs"]
mod document;
#[path = "http/embeddings.rs"]
mod embeddings;
#[path = "http/fair.rs"]
mod fair;
#[path = "http/fields.rs"]
mod fields;
#[path = "http/hostile.rs"]
mod hostile;
#[path = "http/load.rs"]
mod load;
#[path = "http/model_specs.rs"]
mod model_specs;
#[path = "http/pipelines.rs"]
mod pipelines;
#[path = "http/responses.rs"]
mod responses;
#[path = "http/schemathesis.rs"]
mod schemathesis;
#[path = "http/thoughts.rs"]
mod thoughts;
#[path = "http/time.rs"]
mod time;
#[path = "http/tls.rs"]
mod tls;
#[path = "http/tools.rs"]
mod tools;

use firebox_runtime::{Generation, GenerationConfig, SamplerConfig};
use serde_json::{Value, json};

use client::{Running, chat, gguf, sentence_encoder};

/// Returns what the model generates without a server.
fn alone(prompt: &[u32], most: usize, continues: bool) -> (String, Vec<u32>) {
    let model = gguf("llama");
    let mut session = model.session().unwrap();
    let config = GenerationConfig::new()
        .with_max_tokens(most)
        .with_context(256)
        .with_continues(continues)
        .with_sampler(SamplerConfig::greedy());
    let tokenizer = Some(model.tokenizer().unwrap().clone());
    let mut generation = Generation::begin(&mut session, tokenizer, prompt, config).unwrap();
    while generation.next_piece().unwrap().is_some() {}
    let summary = generation.finish().unwrap();
    (summary.text, summary.tokens)
}

#[test]
fn a_chat_returns_what_the_model_generates() {
    let server = Running::start(|_| {});
    let asked =
        server.post("/tokenize", &json!({"messages": [{"role": "user", "content": "Hello there"}]})).ok();
    let prompt: Vec<u32> = serde_json::from_value(asked["tokens"].clone()).unwrap();
    let (text, tokens) = alone(&prompt, 24, false);
    let mut body = chat("Hello there", 24);
    let whole = server.post("/v1/chat/completions", &body).ok();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "llama");
    assert_eq!(
        whole["choices"][0]["message"],
        json!({"role": "assistant", "content": text, "refusal": null})
    );
    assert_eq!(whole["usage"]["prompt_tokens"], prompt.len());
    assert_eq!(whole["usage"]["completion_tokens"], tokens.len());
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 0);

    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let events = server.post("/v1/chat/completions", &body).events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let said: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, text);
    let (last, before) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], tokens.len());
    assert!(before.iter().all(|event| event["usage"].is_null() && event.get("usage").is_some()));
    assert_eq!(before.last().unwrap()["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
    assert!(before.iter().all(|event| event["id"] == last["id"]));
}

#[test]
fn completions_accept_texts_and_tokens() {
    let server = Running::start(|_| {});
    let model = gguf("llama");
    let prompt = model.tokenizer().unwrap().encode("Once upon", true).unwrap();
    let (text, tokens) = alone(&prompt, 12, true);
    let other = model.tokenizer().unwrap().encode("a", true).unwrap();
    let ask = |prompt: Value| {
        let body = json!({"model": "llama", "prompt": prompt, "max_tokens": 12, "temperature": 0});
        server.post("/v1/completions", &body).ok()
    };
    for given in [json!("Once upon"), json!(prompt), json!([prompt]), json!(["Once upon"])] {
        assert_eq!(ask(given)["choices"][0]["text"], text);
    }
    let two = ask(json!(["a", "Once upon"]));
    assert_eq!(two["choices"][0]["text"], alone(&other, 12, true).0);
    assert_eq!(
        two["choices"][1],
        json!({"index": 1, "text": text, "logprobs": null, "finish_reason": "length"})
    );
    assert_eq!(two["usage"]["prompt_tokens"], prompt.len() + other.len());
    let stopped = &text.chars().take(4).collect::<String>()[..];
    let body = json!({"prompt": "Once upon", "max_tokens": 12, "temperature": 0, "stop": stopped});
    let found = server.post("/v1/completions", &body).ok();
    assert_eq!(
        (&found["choices"][0]["text"], &found["choices"][0]["finish_reason"]),
        (&json!(""), &json!("stop"))
    );
    let spelled = server.post("/detokenize", &json!({"tokens": tokens})).ok();
    assert_eq!(spelled["prompt"].as_str().unwrap().trim_start(), text.trim_start());
}

#[test]
fn a_seed_is_reproducible_and_choices_differ() {
    let server = Running::start(|_| {});
    let body = json!({"prompt": "Hello", "max_tokens": 20, "temperature": 1.0, "seed": 7, "n": 4, "ignore_eos": true});
    let once = server.post("/v1/completions", &body).ok();
    let again = server.post("/v1/completions", &body).ok();
    assert_eq!(once["choices"], again["choices"]);
    let texts: std::collections::BTreeSet<&str> =
        once["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts.len(), 4, "{once}");
    assert_eq!(once["usage"]["completion_tokens"], 80);
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let mut said = vec![String::new(); 4];
    for event in server.post("/v1/completions", &streamed).events() {
        let choice = &event["choices"][0];
        said[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
    }
    let expected: Vec<&str> =
        once["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(said, expected);
}

#[test]
fn logprobs_are_returned_in_both_formats() {
    let server = Running::start(|_| {});
    let mut body = chat("Hello", 6);
    body["logprobs"] = true.into();
    body["top_logprobs"] = 3.into();
    let whole = server.post("/v1/chat/completions", &body).ok();
    let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len() as u64, whole["usage"]["completion_tokens"].as_u64().unwrap());
    for token in content {
        // Greedy decoding chose the likeliest.
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 3);
        assert_eq!(token["logprob"], token["top_logprobs"][0]["logprob"]);
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
    }
    body["stream"] = true.into();
    let events = server.post("/v1/chat/completions", &body).events();
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(&streamed, content);
    let body = json!({"prompt": "Hello", "max_tokens": 6, "temperature": 0, "logprobs": 2});
    let found = server.post("/v1/completions", &body).ok();
    let logprobs = &found["choices"][0]["logprobs"];
    let lengths = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
        .map(|list| logprobs[list].as_array().unwrap().len() as u64);
    assert_eq!(lengths, [found["usage"]["completion_tokens"].as_u64().unwrap(); 4]);
    // Text that is held back as a possible stop counts in the offsets.
    let mut body = json!({"prompt": "Once upon", "max_tokens": 12, "temperature": 0, "logprobs": 0});
    let ask = |body: &Value| {
        let choice = server.post("/v1/completions", body).ok()["choices"][0].clone();
        (choice["text"].clone(), choice["logprobs"]["text_offset"].clone())
    };
    let free = ask(&body);
    body["stop"] = format!("{}!", free.0.as_str().unwrap()).into();
    assert_eq!(ask(&body), free);
}

#[test]
fn an_answer_matches_its_schema() {
    let server = Running::start(|_| {});
    let schema = json!({
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "colour": {"enum": ["red", "blue"]}},
        "required": ["sure", "colour"],
        "additionalProperties": false,
    });
    let mut body = chat("Hello", 100);
    body["response_format"] = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    let found = server.post("/v1/chat/completions", &body).ok();
    let said: Value =
        serde_json::from_str(found["choices"][0]["message"]["content"].as_str().unwrap()).unwrap();
    assert!(
        said["sure"].is_boolean() && ["red", "blue"].contains(&said["colour"].as_str().unwrap()),
        "{said}"
    );
    body["response_format"] = json!({"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}});
    server.post("/v1/chat/completions", &body).fails(400, "response_format");
    body["response_format"] = Value::Null;
    body["grammar"] = "root ::= \"yes\"".into();
    let found = server.post("/v1/chat/completions", &body).ok();
    assert_eq!(found["choices"][0]["message"]["content"], "yes");
}

#[test]
fn cached_tokens_are_reported_and_private_to_a_key() {
    let server = Running::start(|config| {
        config.keys = firebox_server::ApiKeys::new(["one".into(), "two".into()]).unwrap();
    });
    let prompt: Vec<u32> = (0..200).map(|at| 3 + at * 7 % 150).collect();
    let body = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0});
    let ask = |key: &str| {
        let found = server.post_as(key, "/v1/completions", &body).ok();
        let cached = found["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (found["choices"][0]["text"].clone(), cached)
    };
    let (text, cached) = ask("one");
    assert_eq!(cached, 0);
    let (again, cached) = ask("one");
    assert_eq!(again, text);
    assert!((128..200).contains(&cached), "{cached}");
    assert_eq!(ask("two"), (text, 0));
}

#[test]
fn status_routes_answer() {
    let server = Running::start(|_| {});
    let models = server.get("/v1/models").ok();
    assert_eq!(models["data"][0]["id"], "llama");
    assert_eq!(models["data"][0]["max_model_len"], 256);
    assert_eq!(server.get("/v1/models/llama").ok()["id"], "llama");
    server.get("/v1/models/none").fails(404, "model");
    assert_eq!(server.get("/health").ok()["status"], "ok");
    assert_eq!(server.get("/ready").ok()["status"], "ready");
    server.post("/v1/chat/completions", &chat("Hello", 5)).ok();
    let metrics = server.get("/metrics").text(200);
    assert!(metrics.contains("firebox_finished_requests_total{model=\"llama\"} 1\n"), "{metrics}");
    assert!(metrics.contains("firebox_time_to_first_token_seconds_count{model=\"llama\"} 1\n"), "{metrics}");
}

#[test]
fn texts_are_embedded_and_ranked() {
    let (_folder, encoder) = sentence_encoder();
    let texts = ["Hello world.", "the quick brown fox"];
    let expected = encoder.embed(&texts, &Default::default()).unwrap();
    let ranked = encoder.rerank("fox", &texts).unwrap();
    let server = Running::serve(vec![("llama".into(), gguf("llama")), ("bert".into(), encoder)], |_| {});
    let body = json!({"model": "bert", "input": texts, "encoding_format": "float"});
    let found = server.post("/v1/embeddings", &body).ok();
    for (index, expected) in expected.iter().enumerate() {
        let vector: Vec<f32> = serde_json::from_value(found["data"][index]["embedding"].clone()).unwrap();
        assert_eq!(&vector, expected);
    }
    assert!(found["usage"]["prompt_tokens"].as_u64().unwrap() > 4);
    let body = json!({"model": "bert", "input": texts[0], "encoding_format": "base64"});
    let packed = server.post("/v1/embeddings", &body).ok();
    let bytes = base64::Engine::decode(
        &base64::prelude::BASE64_STANDARD,
        packed["data"][0]["embedding"].as_str().unwrap(),
    );
    let bytes: Vec<u8> = expected[0]
        .iter()
        .flat_map(|element| element.to_le_bytes())
        .zip(bytes.unwrap())
        .map(|(a, b)| a ^ b)
        .collect();
    assert!(bytes.len() == expected[0].len() * 4 && bytes.iter().all(|byte| *byte == 0));

    let body = json!({"model": "bert", "query": "fox", "documents": texts, "return_documents": true});
    let found = server.post("/v1/rerank", &body).ok();
    for (result, ranked) in found["results"].as_array().unwrap().iter().zip(&ranked) {
        assert_eq!(result["index"], ranked.document);
        assert_eq!(result["relevance_score"].as_f64().unwrap() as f32, ranked.score);
        assert_eq!(result["document"]["text"], texts[ranked.document]);
    }
    let body = json!({"model": "bert", "query": "fox", "documents": [{"text": "a"}, "b"], "top_n": 1});
    assert_eq!(server.post("/v1/rerank", &body).ok()["results"].as_array().unwrap().len(), 1);
    // An encoder does not generate, and a decoder also embeds.
    let mut body = chat("Hello", 4);
    body["model"] = "bert".into();
    server.post("/v1/chat/completions", &body).fails_saying(400, "sentence encoder");
    let found = server.post("/v1/embeddings", &json!({"model": "llama", "input": "Hello"})).ok();
    assert_eq!(found["data"][0]["embedding"].as_array().unwrap().len(), 32);
    server.post("/v1/embeddings", &json!({"input": "Hello"})).fails(400, "model");
    for (input, wrong) in [(json!([3, 9_999_999]), "input[1]"), (json!([[3], [4, 9_999_999]]), "input[1][1]")]
    {
        server.post("/v1/embeddings", &json!({"model": "llama", "input": input})).fails(400, wrong);
    }
}

#[test]
fn a_stopping_server_finishes_running_requests() {
    let mut server = Running::start(|_| {});
    let mut stream = server.open("/v1/completions", &json!({
        "prompt": "Hello", "max_tokens": 200, "temperature": 0, "stream": true, "ignore_eos": true, "n": 8,
    }));
    stream.read_some();
    server.stop();
    let rest = stream.rest();
    assert!(rest.contains("data: [DONE]"), "{}", &rest[rest.len().saturating_sub(400)..]);
    server.ends();
}

#[test]
fn idle_connections_do_not_delay_the_stop() {
    let mut server = Running::start(|_| {});
    let mut waiting = server.connect();
    waiting.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
    waiting.read_some();
    let silent = server.connect();
    let began = std::time::Instant::now();
    server.stop();
    server.ends();
    assert!(began.elapsed() < std::time::Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(waiting.read_some(), 0);
    drop(silent);
}
