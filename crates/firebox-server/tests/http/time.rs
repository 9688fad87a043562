//! Time limits, and fairness among requests.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Running, chat, gguf, sentence_encoder};

#[test]
fn the_request_timeout_is_enforced() {
    let mut body =
        json!({"prompt": "Hello", "max_tokens": 100_000, "temperature": 0, "ignore_eos": true, "n": 8});
    let limited = |server: &Running, body: &Value| {
        let began = Instant::now();
        let answer = server.post("/v1/completions", body);
        assert!(began.elapsed() < Duration::from_secs(90), "{:?}", began.elapsed());
        answer
    };
    // Nothing is sent before the limit.
    let server = Running::start(|config| config.request_timeout = Some(Duration::from_millis(1)));
    limited(&server, &body).fails_saying(504, "longer than the 0.001 s");
    server.comes_to("firebox_running_requests", 0);
    body["stream"] = true.into();
    // A busy machine may take longer to send anything.
    let (server, text) = (0..10)
        .find_map(|doubled| {
            let time = Duration::from_millis(60 << doubled);
            let server = Running::start(|config| config.request_timeout = Some(time));
            let answer = limited(&server, &body);
            (answer.status == 200).then(|| (server, answer.text(200)))
        })
        .expect("a stream begins within half a minute");
    let mut events: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!(events.pop(), Some("[DONE]"), "{text}");
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    // A fast machine may have finished before.
    if last["choices"].is_null() {
        assert!(last["error"]["message"].as_str().unwrap().contains("longer"), "{last}");
    }
    server.comes_to("firebox_running_requests", 0);
    // The engine's events have no time limit.
    let mut watching = server.connect();
    watching.send("GET /v1/engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(600) {
        assert!(watching.read_some() > 0);
    }
    let server = Running::start(|config| config.request_timeout = Some(Duration::from_secs(60)));
    server.post("/v1/chat/completions", &chat("Hello", 4)).ok();
}

/// Asserts that the first duration is at most a third of the second; retries, as the machine may be busy.
fn sometime_within_a_third(measure: impl FnMut() -> (Duration, Duration)) {
    let mut seen = Vec::new();
    for (part, whole) in std::iter::repeat_with(measure).take(5) {
        if part < whole / 3 {
            return;
        }
        seen.push((part, whole));
    }
    panic!("{seen:?}");
}

#[test]
fn large_embedding_requests_delay_no_other() {
    let (_folder, encoder) = sentence_encoder();
    let server = Running::serve(vec![("llama".into(), gguf("llama")), ("bert".into(), encoder)], |_| {});
    let texts: Vec<String> = (0..512).map(|at| format!("the quick brown fox {at} ").repeat(10)).collect();
    let many = json!({"model": "bert", "input": texts});
    let few = json!({"model": "bert", "input": "the quick brown fox"});
    let embed = |body: &Value| server.post("/v1/embeddings", body).ok();
    let timed = |body: &Value| {
        let began = Instant::now();
        embed(body);
        began.elapsed()
    };
    let found = embed(&many);
    assert_eq!(found["data"].as_array().unwrap().len(), texts.len());
    // Batches give the same embeddings as single requests.
    let alone = embed(&json!({"model": "bert", "input": texts[400]}));
    assert_eq!(found["data"][400]["embedding"], alone["data"][0]["embedding"]);
    sometime_within_a_third(|| {
        let whole = timed(&many);
        let beside = thread::scope(|scope| {
            scope.spawn(|| embed(&many));
            thread::sleep(whole / 4);
            timed(&few)
        });
        (beside, whole)
    });
    sometime_within_a_third(|| {
        let whole = timed(&many);
        let client = server.open("/v1/embeddings", &many);
        thread::sleep(whole / 8);
        drop(client);
        (timed(&few), whole)
    });
}
