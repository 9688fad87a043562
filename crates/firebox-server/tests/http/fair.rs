//! Tests that one key cannot take the server from another, and that the choices of a request share their work.

use std::thread::sleep;
use std::time::{Duration, Instant};

use firebox_server::{ApiKey, ApiKeys, KeyShare};
use serde_json::{Value, json};

use crate::client::{Answer, Client, Running, request};

const GREEDY: &str = "greedy-key";
const POLITE: &str = "polite-key";

fn as_key(key: &str) -> String {
    format!("Authorization: Bearer {key}\r\n")
}

fn two_keys() -> ApiKeys {
    ApiKeys::new([GREEDY, POLITE].map(String::from)).unwrap()
}

/// Returns a metric of the model.
fn metric(server: &Running, name: &str) -> u64 {
    let head = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n";
    let text = server.raw(&format!("{head}{}\r\n", as_key(POLITE))).text(200);
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}{{model=\"llama\"}} ")));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

fn comes_to(server: &Running, name: &str, enough: u64) {
    let began = Instant::now();
    while metric(server, name) < enough {
        assert!(began.elapsed() < Duration::from_secs(60), "{name} is {}", metric(server, name));
        sleep(Duration::from_millis(5));
    }
}

fn open_as(server: &Running, key: &str, body: &Value) -> Client {
    let mut client = server.connect();
    client.send(&request("/v1/completions", &as_key(key), &body.to_string()));
    client
}

fn many_choices(count: usize) -> Value {
    json!({"model": "llama", "prompt": [3, 5, 8], "n": count, "max_tokens": 200, "ignore_eos": true, "stream": true})
}

fn short(server: &Running, key: &str) -> Answer {
    let body = json!({"model": "llama", "prompt": [4, 9], "max_tokens": 4, "ignore_eos": true});
    server.post_as(key, "/v1/completions", &body)
}

/// One key posts eight requests of 64 choices and reads nothing. Short requests of another key are answered beside these, and
/// not behind them.
#[test]
fn a_key_with_many_choices_delays_no_other_key() {
    let server = Running::start(|config| config.keys = two_keys());
    let clients: Vec<Client> = (0..8).map(|_| open_as(&server, GREEDY, &many_choices(64))).collect();
    comes_to(&server, "firebox_waiting_requests", 200);
    const REQUESTS: u64 = 20;
    let before = metric(&server, "firebox_generated_tokens_total");
    for _ in 0..REQUESTS {
        assert_eq!(short(&server, POLITE).ok()["usage"]["completion_tokens"], 4);
    }
    let generated = metric(&server, "firebox_generated_tokens_total") - before;
    drop(clients);
    // Four of the eight requests are admitted.
    let all = 4 * 64 * 200;
    assert!(generated < all / 2, "{generated} tokens were generated during {REQUESTS} short answers");
}

/// A key that has as many requests waiting as it may is refused, and another is not.
#[test]
fn a_key_has_its_own_limit_of_waiting_requests() {
    let server = Running::start(|config| {
        let share = |waiting| KeyShare { running: Some(2), waiting: Some(waiting), ..KeyShare::default() };
        config.per_key = share(62);
        let polite = ApiKey::new(POLITE.into()).unwrap().with_share(share(6));
        config.keys = two_keys().with([polite]);
    });
    // Two at a time, these take thousands of passes. As long as there are any, as many again are too many.
    let client = open_as(&server, GREEDY, &many_choices(64));
    comes_to(&server, "firebox_running_requests", 1);
    let body = json!({"model": "llama", "prompt": [4, 9], "max_tokens": 4, "n": 64});
    let refused = server.post_as(GREEDY, "/v1/completions", &body);
    assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
    let error: Value = serde_json::from_str(&refused.text(429)).unwrap();
    assert_eq!(error["error"]["code"], "queue_full");
    assert!(error["error"]["message"].as_str().unwrap().contains("--per-key-waiting"), "{error}");
    short(&server, POLITE).ok();
    // What can never run and wait at once is refused for good.
    let body = json!({"model": "llama", "prompt": [4], "n": 9});
    server.post_as(POLITE, "/v1/completions", &body).fails(400, "n");
    drop(client);
}

/// The prompt of a request goes through the layers once, however many choices it has.
#[test]
fn choices_share_their_prompt() {
    let server = Running::start(|_| {});
    let prompt: Vec<u32> = (0..60).map(|at| 3 + at % 90).collect();
    let body = |count: usize, seed: u64| json!({"model": "llama", "prompt": prompt, "n": count, "seed": seed, "max_tokens": 6, "ignore_eos": true});
    let before = server.metric("firebox_prompt_tokens_total");
    let whole = server.post("/v1/completions", &body(16, 7)).ok();
    assert_eq!(server.metric("firebox_prompt_tokens_total") - before, prompt.len() as u64);
    assert_eq!(whole["usage"]["prompt_tokens"], prompt.len());
    assert_eq!(whole["usage"]["completion_tokens"], 16 * 6);
    for nth in [0, 1, 9, 15] {
        let alone = server.post("/v1/completions", &body(1, 7 + nth)).ok();
        assert_eq!(alone["choices"][0]["text"], whole["choices"][nth as usize]["text"], "choice {nth}");
    }
}

/// A grammar is compiled once for a request and once for all that repeat it.
#[test]
fn a_grammar_is_compiled_once() {
    let server = Running::start(|_| {});
    let body = |pattern: &str| {
        let grammar = format!("root ::= {pattern}");
        json!({"model": "llama", "prompt": "He", "n": 64, "max_tokens": 4, "grammar": grammar})
    };
    for (pattern, compiled) in [("[a-z]+", 1), ("[a-z]+", 1), ("[0-9]+", 2)] {
        server.post("/v1/completions", &body(pattern)).ok();
        assert_eq!(server.metric("firebox_compiled_grammars_total"), compiled);
    }
}
