//! Models on terms of their own: opened later, sharing memory, more urgent than others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use firebox_runtime::fit::{Commons, Terms};
use firebox_runtime::schedule::Priority;
use firebox_runtime::{Budget, RuntimeError, device};
use firebox_server::Offer;
use serde_json::{Value, json};

use crate::client::{Running, chat, gguf, root};

fn listed(server: &Running) -> Vec<Value> {
    server.get("/v1/models").ok()["data"].as_array().unwrap().clone()
}

#[test]
fn a_model_is_opened_when_somebody_asks_for_it() {
    let opened = Arc::new(AtomicUsize::new(0));
    let count = opened.clone();
    let later = Offer::later("later", move || match count.fetch_add(1, Ordering::SeqCst) {
        0 => Err(RuntimeError::TooLittleMemory { needed: 2, memory: 1, kv_tokens: 128 }),
        _ => Ok(gguf("llama")),
    });
    let offers = vec![Offer::new("llama", gguf("llama")), later.with_priority(Priority::Background)];
    let server = Running::offering(offers, |_| {});
    assert_eq!(listed(&server)[1]["id"], "later");
    assert!(listed(&server)[1]["max_model_len"].is_null());
    server.get("/v1/models/later").ok();
    let engine = server.get("/v1/engine").ok();
    assert_eq!(
        (&engine["models"][1]["opened"], &engine["models"][1]["segments"]),
        (&json!(false), &json!([]))
    );
    assert_eq!(opened.load(Ordering::SeqCst), 0, "nobody has asked for it");
    let mut body = chat("Hello there", 8);
    body["model"] = "later".into();
    server.post("/v1/chat/completions", &body).fails_saying(503, "\"later\" could not be opened");
    // The next ones try again, and wait for it together.
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
fn what_models_share_is_told_as_one() {
    let path = root("assets/pocket");
    let commons = Commons::beside(&Budget::new(64 << 20)).unwrap();
    let cpu = device("cpu").unwrap();
    let terms = |pinned| Terms { pinned, assured: true, context: Some(512), ..Terms::default() };
    let one = commons.open(&path, &cpu, &terms(true)).unwrap();
    let offers = vec![
        Offer::new("one", one).with_priority(Priority::Interactive),
        Offer::later("two", {
            let (commons, cpu) = (commons.clone(), cpu.clone());
            move || commons.open(&path, &cpu, &terms(false))
        }),
    ];
    let server = Running::offering(offers, |config| config.memory = Some(commons.budget().clone()));
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
