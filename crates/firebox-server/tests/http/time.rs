//! Time limits, and fairness among requests.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Running, chat, gguf, sentence_encoder};

/// Asserts that a stream of events is whole: it ends with an error, or as the answer does where the machine was faster.
fn ends_by_limit(text: &str) {
    let mut events: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!(events.pop(), Some("[DONE]"), "{text}");
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    if last["choices"].is_null() {
        assert!(last["error"]["message"].as_str().unwrap().contains("longer"), "{last}");
    }
}

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
    // A stream ends with an error, or is refused with it where nothing was sent before. `deadline.rs` tests each of both.
    body["stream"] = true.into();
    let server = Running::start(|config| config.request_timeout = Some(Duration::from_millis(300)));
    let answer = limited(&server, &body);
    if answer.status == 504 {
        answer.fails_saying(504, "longer than the 0.3 s");
    } else {
        ends_by_limit(&answer.text(200));
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

/// Small requests that are answered while a large one of 25 batches is computed, if each waits for one batch: 25. If they
/// wait for the whole: one, and maybe one that came first.
const ANSWERED_BESIDE: usize = 5;

/// Pairs of measurements, of which the shortest count: what else the machine does only adds to them.
const PAIRS: usize = 5;

#[test]
fn large_embedding_requests_delay_no_other() {
    let (_folder, encoder) = sentence_encoder();
    let server = Running::serve(vec![("llama".into(), gguf("llama")), ("bert".into(), encoder)], |_| {});
    let texts: Vec<String> = (0..512).map(|at| format!("the quick brown fox {at} ").repeat(10)).collect();
    let many = json!({"model": "bert", "input": texts});
    let few = json!({"model": "bert", "input": "the quick brown fox"});
    let embed = |body: &Value| server.post("/v1/embeddings", body).ok();
    let found = embed(&many);
    assert_eq!(found["data"].as_array().unwrap().len(), texts.len());
    // Batches give the same embeddings as single requests.
    let alone = embed(&json!({"model": "bert", "input": texts[400]}));
    assert_eq!(found["data"][400]["embedding"], alone["data"][0]["embedding"]);
    let answered = thread::scope(|scope| {
        let large = scope.spawn(|| embed(&many));
        std::iter::repeat_with(|| embed(&few)).take_while(|_| !large.is_finished()).count()
    });
    assert!(answered >= ANSWERED_BESIDE, "{answered} were answered beside a large one");
    // One whose client is gone is not computed any more: another takes as long as alone, and not twice as long.
    let half = json!({"model": "bert", "input": texts[..256]});
    let timed = || {
        let began = Instant::now();
        embed(&half);
        began.elapsed()
    };
    let pairs = (0..PAIRS).map(|_| {
        let alone = timed();
        let client = server.open("/v1/embeddings", &half);
        embed(&few);
        drop(client);
        (alone, timed())
    });
    let (alone, after): (Vec<_>, Vec<_>) = pairs.unzip();
    let ratio = after.iter().min().unwrap().as_secs_f64() / alone.iter().min().unwrap().as_secs_f64();
    assert!(ratio < 1.5, "{ratio} of {alone:?}, {after:?}");
}
