//! Tests of a server whose engine's thread panics.

use std::net::TcpStream;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use firebox_engine::{Clock, EngineHealth, OnFailure, WallClock};
use serde_json::json;

use super::client::{Answer, request};
use super::{SYSTEM, TALK, Talker, start};

/// A clock that panics, without a message on stderr, after as many readings as it was set to. The engine reads it between
/// layers, when tokens are chosen, and when commands and events are handled.
#[derive(Debug, Clone, Default)]
struct PanickingClock(WallClock, Arc<AtomicI64>);

impl PanickingClock {
    fn set(&self, readings: i64) {
        self.1.store(readings, Ordering::SeqCst);
    }
}

impl Clock for PanickingClock {
    fn now(&self) -> Duration {
        if self.1.fetch_sub(1, Ordering::SeqCst) == 1 {
            resume_unwind(Box::new("the clock stopped"));
        }
        self.0.now()
    }
}

/// Returns whether a response is complete and without an error, and checks that it is one or the other.
#[track_caller]
fn is_answered(answer: Answer, end: &str) -> bool {
    let status = answer.status;
    let body = answer.body();
    if status == 200 {
        assert!(body.contains(end) || body.contains("engine_unavailable"), "{body}");
        return !body.contains("engine_unavailable");
    }
    assert!(status == 503 && body.contains("engine_unavailable"), "{status}: {body}");
    false
}

#[test]
fn an_engine_killed_a_hundred_times_leaves_no_request_and_no_session_behind() {
    let saved = tempfile::tempdir().unwrap();
    let clock = PanickingClock::default();
    let server = start(|config| {
        config.engine.clock = Arc::new(clock.clone());
        config.sessions.folder = Some(saved.path().to_owned());
    });
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({"system": SYSTEM}));
    talker.say(&session, TALK[0]);
    talker.post(&format!("{session}/save"), json!({"name": "talk"}));
    let before = talker.turns(&session);
    let expected = talker.say(&talker.begin(json!({"restore": "talk"})), TALK[1]);
    let (mut answered, mut failed) = (0, 0);
    while server.engine.failures() < 100 {
        let round = server.engine.failures() as i64;
        clock.set(1 + round * 37 % 400);
        let chat =
            json!({"messages": [{"role": "user", "content": TALK[0]}], "max_tokens": 30, "temperature": 0});
        let mut stream = chat.clone();
        stream["stream"] = true.into();
        let say = json!({"content": TALK[1], "max_tokens": 30, "temperature": 0});
        let other = talker.begin(json!({"restore": "talk"}));
        let path = "/v1/chat/completions";
        let asked = [
            (path, chat, "finish_reason"),
            (path, stream, "[DONE]"),
            (&format!("{other}/say"), say, "finish_reason"),
        ];
        let results: Vec<bool> = thread::scope(|scope| {
            let threads: Vec<_> = asked
                .iter()
                .map(|(path, body, end)| {
                    let server = &server;
                    scope.spawn(move || is_answered(server.raw(&request(path, "", &body.to_string())), end))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        clock.set(0);
        let good = results.iter().filter(|good| **good).count();
        (answered, failed) = (answered + good, failed + results.len() - good);
        let began = Instant::now();
        while server.get("/ready").status != 200 {
            assert!(began.elapsed() < Duration::from_secs(1), "round {round}: it is not ready again");
        }
        talker.ask("DELETE", &other, &json!(null));
    }
    assert!(failed >= 100, "{failed} failed, {answered} were answered");
    assert!(talker.get("/health")["status"] == "ok");
    let metrics = server.get("/metrics").text(200);
    assert!(metrics.contains("\nfirebox_engine_failures_total 1"), "{metrics}");
    assert_eq!(talker.turns(&session), before);
    for session in [session, talker.begin(json!({"restore": "talk"}))] {
        assert_eq!(talker.say(&session, TALK[1]), expected);
    }
    println!("{failed} requests failed with an error, {answered} were answered");
}

#[test]
fn a_server_ends_with_its_engine_if_told_to() {
    let clock = PanickingClock::default();
    let server = start(|config| {
        config.engine.clock = Arc::new(clock.clone());
        config.engine.on_failure = OnFailure::End;
    });
    let began = Instant::now();
    clock.set(50);
    let body = json!({"messages": [{"role": "user", "content": TALK[0]}], "max_tokens": 30}).to_string();
    let status = server.raw(&request("/v1/chat/completions", "", &body)).status;
    assert_eq!(status, 503);
    while TcpStream::connect(server.address).is_ok() {
        assert!(began.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(server.engine.health(), EngineHealth::Ended);
}
