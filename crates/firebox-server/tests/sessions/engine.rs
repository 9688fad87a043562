//! Tests of `/v1/engine` and its events, which the console shows.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use firebox_runtime::residency::ResidencyOptions;
use firebox_runtime::{Model, device};
use serde_json::{Value, json};

use crate::client::Running;
use crate::{TALK, Talker, start};

/// A client of the event stream.
struct Watcher(BufReader<TcpStream>);

impl Watcher {
    fn of(server: &Running) -> Self {
        let mut client = server.connect();
        client.send("GET /v1/engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n");
        Self(BufReader::new(client.stream))
    }

    fn look(&mut self) -> Value {
        let mut text = String::new();
        loop {
            text.clear();
            assert!(self.0.read_line(&mut text).unwrap() > 0);
            if let Some(json) = text.strip_prefix("data: ") {
                return serde_json::from_str(json).unwrap();
            }
        }
    }
}

fn kinds(value: &Value) -> Vec<&str> {
    let events = value["timeline"]["events"].as_array().unwrap();
    events.iter().map(|event| event["kind"].as_str().unwrap()).collect()
}

#[test]
fn the_engine_reports_its_state() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let before = talker.get("/v1/engine");
    let mut watcher = Watcher::of(&server);
    watcher.look();
    let session = talker.begin(json!({}));
    talker.say(&session, TALK[0]);
    let after = talker.get("/v1/engine");
    let model = &after["models"][0];
    assert_eq!((&model["name"], &after["sessions"]), (&json!("pocket"), &json!(1)));
    assert!(model["generated_tokens"].as_u64() > before["models"][0]["generated_tokens"].as_u64());
    assert_eq!(model["time_to_first_token"]["count"], 1);
    let segments = model["segments"].as_array().unwrap();
    assert!(segments.iter().any(|segment| segment["id"] == "layer-0005"), "{segments:?}");
    assert!(segments.iter().all(|segment| (0.0..=1.0).contains(&segment["resident"].as_f64().unwrap())));
    assert!(after["budgets"][0]["held"]["weights"].as_u64().unwrap() > 0);
    assert!(kinds(&after).contains(&"decode"), "{:?}", kinds(&after));

    let mut other = Watcher::of(&server);
    assert!(kinds(&other.look()).contains(&"decode"));
    assert!(kinds(&other.look()).is_empty(), "what was told is not told again");
}

#[test]
fn the_timeline_is_streamed_to_watchers() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({}));
    // One request reports the current state.
    for _ in 0..2 {
        let seen = talker.get("/v1/engine");
        assert_eq!(seen["timeline"], json!({"now_us": null, "events": []}));
        talker.say(&session, TALK[0]);
    }
    let mut watchers = [Watcher::of(&server), Watcher::of(&server)];
    for watcher in &mut watchers {
        watcher.look();
    }
    talker.say(&session, TALK[1]);
    let began = Instant::now();
    while !kinds(&watchers[0].look()).contains(&"decode") {
        assert!(began.elapsed() < Duration::from_secs(60));
    }
    let [first, last] = watchers;
    drop(first);
    let drawn = || talker.get("/v1/engine")["timeline"]["events"].clone();
    let before = drawn();
    talker.say(&session, TALK[1]);
    assert_ne!(drawn(), before);
    drop(last);
    // The server notices a disconnect when it sends.
    loop {
        let before = drawn();
        talker.say(&session, TALK[1]);
        if drawn() == before {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(120));
    }
}

#[test]
fn a_fitted_model_reports_plan_and_budget() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
    let config = ResidencyOptions { layers: Some(2), ..ResidencyOptions::new(1 << 30) };
    let model = Model::open_within(path, &device("cpu").unwrap(), &config).unwrap();
    let server = Running::serve(vec![("pocket".into(), model)], |_| {});
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({}));
    talker.say(&session, TALK[0]);
    let engine = talker.get("/v1/engine");
    let budget = &engine["budgets"][0];
    assert_eq!((&budget["name"], &budget["total"]), (&json!("pocket"), &json!(1 << 30)));
    assert!(budget["held"]["streams"].as_u64().unwrap() > 0, "{budget}");
    let model = &engine["models"][0];
    assert_eq!(model["plan"]["layers"]["kept_layers"].as_array().unwrap().len(), 2);
    let states: Vec<&str> = model["segments"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|segment| segment["id"].as_str().unwrap().starts_with("layer"))
        .map(|segment| segment["state"].as_str().unwrap())
        .collect();
    let kept = states.iter().filter(|state| **state == "resident").count();
    // The governor may have evicted layers since.
    assert!(kept <= 2 && states.iter().all(|state| ["resident", "streamed"].contains(state)), "{states:?}");
    assert_eq!((states.len(), kept > 0), (6, budget["held"]["weights"].as_u64().unwrap() > 0));
    assert!(model["streamed_bytes"].as_u64().unwrap() > 0);
}
