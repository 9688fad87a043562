//! Models that are opened on first use, share memory or have priorities.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use firebox_runtime::residency::{ShareOptions, SharedBudget};
use firebox_runtime::schedule::Priority;
use firebox_runtime::{Budget, MemoryError, Model, device};
use firebox_server::ModelSpec;
use serde_json::{Value, json};

use crate::client::{Answer, Running, chat, gguf, root};

fn listed(server: &Running) -> Vec<Value> {
    server.get("/v1/models").ok()["data"].as_array().unwrap().clone()
}

#[test]
fn a_lazy_model_is_opened_by_its_first_request() {
    let opened = Arc::new(AtomicUsize::new(0));
    let count = opened.clone();
    let later = ModelSpec::lazy("later", move || match count.fetch_add(1, Ordering::SeqCst) {
        0 => Err(MemoryError::TooLittleMemory { needed: 2, memory: 1, kv_tokens: 128 }.into()),
        _ => Ok(gguf("llama")),
    });
    let offers = vec![ModelSpec::new("llama", gguf("llama")), later.with_priority(Priority::Background)];
    let server = Running::with_models(offers, |_| {});
    assert_eq!(listed(&server)[1]["id"], "later");
    assert!(listed(&server)[1]["max_model_len"].is_null());
    server.get("/v1/models/later").ok();
    let engine = server.get("/v1/engine").ok();
    assert_eq!(
        (&engine["models"][1]["opened"], &engine["models"][1]["segments"]),
        (&json!(false), &json!([]))
    );
    assert_eq!(opened.load(Ordering::SeqCst), 0, "it is not opened before the first request");
    let mut body = chat("Hello there", 8);
    body["model"] = "later".into();
    server.post("/v1/chat/completions", &body).fails_saying(503, "\"later\" could not be opened");
    // Later requests try again and wait for it together.
    let said = thread::scope(|scope| {
        let asking = [(); 3].map(|()| scope.spawn(|| server.post("/v1/chat/completions", &body).ok()));
        asking.map(|asking| asking.join().unwrap()["choices"].clone())
    });
    let expected = server.post("/v1/chat/completions", &chat("Hello there", 8)).ok();
    assert!(said.iter().all(|said| *said == expected["choices"]), "{said:?}");
    assert_eq!(opened.load(Ordering::SeqCst), 2);
    assert_eq!(listed(&server)[1]["max_model_len"], 256);
    let engine = server.get("/v1/engine").ok();
    assert_eq!(
        (&engine["models"][1]["opened"], &engine["models"][1]["priority"]),
        (&json!(true), &json!("background"))
    );
}

#[test]
fn a_shared_budget_is_reported_once() {
    let path = root("assets/pocket");
    let shared = SharedBudget::beside(&Budget::new(64 << 20)).unwrap();
    let cpu = device("cpu").unwrap();
    let options =
        |pinned| ShareOptions { pinned, guaranteed: true, context: Some(512), ..ShareOptions::default() };
    let one = shared.open(&path, &cpu, &options(true)).unwrap();
    let offers = vec![
        ModelSpec::new("one", one).with_priority(Priority::Interactive),
        ModelSpec::lazy("two", {
            let (shared, cpu) = (shared.clone(), cpu.clone());
            move || shared.open(&path, &cpu, &options(false))
        }),
    ];
    let server = Running::with_models(offers, |config| config.memory = Some(shared.budget().clone()));
    for model in ["one", "two", "one"] {
        let mut body = chat("Who are you?", 6);
        body["model"] = model.into();
        server.post("/v1/chat/completions", &body).ok();
    }
    let engine = server.get("/v1/engine").ok();
    let budgets = engine["budgets"].as_array().unwrap();
    let of = |name: &str| budgets.iter().find(|budget| budget["name"] == name).unwrap();
    assert_eq!((budgets.len(), &of("all models")["total"]), (3, &json!(64 << 20)));
    let weights = |name: &str| of(name)["held"]["weights"].as_u64().unwrap();
    assert_eq!(weights("all models"), weights("one") + weights("two"));
    assert!(of("one")["reserved"].as_u64().unwrap() > of("two")["reserved"].as_u64().unwrap());
    let segments = engine["models"][0]["segments"].as_array().unwrap();
    let streamed = segments.iter().filter(|segment| segment["state"] == "streamed").count();
    assert_eq!(streamed, 0, "{segments:?}");
    let metrics = server.get("/metrics").text(200);
    for line in [
        "firebox_budget_bytes{budget=\"all models\"} 67108864\n",
        "firebox_budget_reserved_bytes{budget=\"two\"}",
    ] {
        assert!(metrics.contains(line), "no {line} in {metrics}");
    }
    assert!(!metrics.contains("firebox_budget_bytes{budget=\"two\"}"), "{metrics}");
}

/// Opens the pocket model in the smallest budget that admits it.
fn in_little_memory() -> (SharedBudget, Model) {
    let (path, cpu) = (root("assets/pocket"), device("cpu").unwrap());
    let least = (1..64_u64).find_map(|quarters| {
        let shared = SharedBudget::beside(&Budget::new(quarters << 18)).unwrap();
        let model = shared.open(&path, &cpu, &ShareOptions::default()).ok()?;
        Some((shared, model))
    });
    let (shared, model) = least.expect("sixteen megabytes are enough");
    let planned = model.planned_tokens();
    assert!(planned < 900, "{planned} tokens are all that the model may be asked");
    (shared, model)
}

/// Asks the pocket model to continue a prompt of this length.
fn ask_to_continue(server: &Running, tokens: u32, stream: bool) -> Answer {
    let prompt: Vec<u32> = (0..tokens).map(|at| 20 + at * 7 % 500).collect();
    let body =
        json!({"model": "pocket", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": stream});
    server.post("/v1/completions", &body)
}

#[test]
fn lack_of_shared_memory_is_temporary() {
    let (_commons, model) = in_little_memory();
    let other = ModelSpec::lazy("other", || Ok(gguf("llama")));
    let server = Running::with_models(vec![ModelSpec::new("pocket", model), other], |_| {});
    ask_to_continue(&server, 1000, false).text(503);
    ask_to_continue(&server, 300, false).ok();
}

#[test]
fn a_prompt_that_never_fits_is_too_long() {
    let (_commons, model) = in_little_memory();
    let server = Running::serve(vec![("pocket".into(), model)], |_| {});
    let ask = |tokens, stream| ask_to_continue(&server, tokens, stream);
    let refused: Value = serde_json::from_str(&ask(1000, false).text(400)).unwrap();
    assert_eq!(refused["error"]["code"], "context_length_exceeded", "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("1001 tokens"), "{refused}");
    // A stream reports the same, whether it has started or not.
    let streamed = ask(1000, true).body();
    assert!(streamed.contains("context_length_exceeded"), "{streamed}");
    ask(300, false).ok();
}
