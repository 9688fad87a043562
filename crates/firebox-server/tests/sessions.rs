//! Tests of sessions over real connections with the pocket model.

#![allow(clippy::unwrap_used)]

#[path = "http/client.rs"]
#[allow(dead_code)]
mod client;
#[path = "sessions/engine.rs"]
mod engine;
#[path = "sessions/failures.rs"]
mod failures;
#[path = "sessions/refusals.rs"]
mod refusals;
#[path = "sessions/repetition.rs"]
mod repetition;
#[path = "sessions/thoughts.rs"]
mod thoughts;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{Model, device};
use firebox_server::{ApiKeys, ServerConfig};
use serde_json::{Value, json};

use client::{Answer, Client, Running};

fn pocket() -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
    let model = Model::open(path, &device("cpu").unwrap()).unwrap();
    model.with_heads(HeadPoolConfig::patient()).unwrap()
}

fn start(change: impl FnOnce(&mut ServerConfig)) -> Running {
    Running::serve(vec![("pocket".into(), pocket())], change)
}

/// Opens a stream of a long answer and reads its start.
fn listener(server: &Running, session: &str) -> Client {
    let body = json!({"content": "Hello", "ignore_eos": true, "max_tokens": 700, "stream": true});
    let mut client = server.open(&format!("{session}/say"), &body);
    client.read_some();
    client
}

/// A client with a key.
struct Talker<'a> {
    send: Box<dyn Fn(&str) -> Answer + 'a>,
    key: &'static str,
}

impl<'a> Talker<'a> {
    fn of(server: &'a Running, key: &'static str) -> Self {
        Self { send: Box::new(|text| server.raw(text)), key }
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> Answer {
        let body = if method == "POST" { body.to_string() } else { String::new() };
        (self.send)(&format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.key,
            body.len(),
        ))
    }

    #[track_caller]
    fn post(&self, path: &str, body: Value) -> Value {
        self.ask("POST", path, &body).ok()
    }

    #[track_caller]
    fn get(&self, path: &str) -> Value {
        self.ask("GET", path, &Value::Null).ok()
    }

    /// Creates a session and returns its path.
    #[track_caller]
    fn begin(&self, wish: Value) -> String {
        format!("/v1/sessions/{}", self.post("/v1/sessions", wish)["id"].as_str().unwrap())
    }

    #[track_caller]
    fn say(&self, session: &str, text: &str) -> String {
        let body = json!({"content": text, "max_tokens": 40, "temperature": 0});
        self.post(&format!("{session}/say"), body)["answer"].as_str().unwrap().to_owned()
    }

    fn turns(&self, session: &str) -> Vec<Value> {
        self.get(session)["turns"].as_array().unwrap().clone()
    }
}

fn texts(turns: &[Value]) -> Vec<&str> {
    turns.iter().map(|turn| turn["text"].as_str().unwrap()).collect()
}

const SYSTEM: &str = "You are a helpful assistant. The user's name is Ada.";
const TALK: [&str; 3] = ["My brother is called Tom.", "Who is my brother?", "What is my name?"];

#[test]
fn a_session_answers_like_a_chat() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    for system in [None, Some(SYSTEM)] {
        let session = talker.begin(json!({"system": system}));
        let mut messages: Vec<Value> =
            system.map(|system| json!({"role": "system", "content": system})).into_iter().collect();
        for text in TALK {
            messages.push(json!({"role": "user", "content": text}));
            let body = json!({"messages": messages, "max_tokens": 40, "temperature": 0});
            let chat = talker.post("/v1/chat/completions", body);
            let expected = chat["choices"][0]["message"]["content"].as_str().unwrap();
            assert_eq!(talker.say(&session, text), expected, "{text} after {messages:?}");
            messages.push(json!({"role": "assistant", "content": expected}));
        }
    }
}

#[test]
fn a_streamed_answer_ends_with_the_session() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({}));
    let body = json!({"content": TALK[0], "temperature": 0, "stream": true});
    let events = talker.ask("POST", &format!("{session}/say"), &body).events();
    let (done, before) = events.split_last().unwrap();
    let said: String = before.iter().filter_map(|event| event["text"].as_str()).collect();
    assert_eq!((&done["type"], &done["answer"]), (&json!("done"), &json!(said)));
    assert!(before.len() > 2, "{before:?}");
    let turn = &done["session"]["turns"][0];
    assert_eq!((&turn["text"], &turn["answer"]["text"]), (&json!(TALK[0]), &json!(said)));
    assert_eq!(turn["range"], json!([0, done["session"]["tokens"]]));
    assert_eq!(turn["roles"], json!(["user", "assistant"]));
    assert_eq!(done["session"]["busy"], false);
    assert!(done["usage"]["completion_tokens"].as_u64().unwrap() > 0);
}

#[test]
fn sessions_are_private_to_their_key() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(|config| {
        config.keys = ApiKeys::new(["one", "two"].map(String::from)).unwrap();
        config.sessions.folder = Some(folder.path().into());
    });
    let (one, two) = (Talker::of(&server, "one"), Talker::of(&server, "two"));
    let session = one.begin(json!({"facts": ["The user likes tea."]}));
    one.say(&session, TALK[0]);
    one.post(&format!("{session}/save"), json!({"name": "mine"}));
    assert_eq!(one.get("/v1/sessions")["saved"], json!(["mine"]));
    assert_eq!(two.get("/v1/sessions"), json!({"object": "list", "data": [], "saved": []}));
    let posts = [
        ("say", json!({"content": "Hello"})),
        ("fork", json!({})),
        ("rewind", json!({"turn": 0})),
        ("head", json!({"head": "code"})),
        ("turns/0", json!({"pinned": true})),
        ("facts", json!({"text": "x"})),
        ("facts/0", json!({"text": "x"})),
        ("branches/0", json!({})),
        ("branches/0/promote", json!({})),
        ("save", json!({"name": "mine"})),
    ];
    for (path, body) in posts {
        two.ask("POST", &format!("{session}/{path}"), &body).fails_saying(404, "there is no session");
    }
    for (method, path) in [("GET", ""), ("DELETE", ""), ("DELETE", "/branches/0")] {
        let path = format!("{session}{path}");
        two.ask(method, &path, &Value::Null).fails_saying(404, "there is no session");
    }
    two.ask("POST", "/v1/sessions", &json!({"restore": "mine"})).fails_saying(404, "no saved session");
    Talker::of(&server, "three").ask("GET", &session, &Value::Null).text(401);
    assert_eq!(one.turns(&session).len(), 2, "the session is unchanged");
    // Saved sessions of different keys may have the same name.
    let other = two.begin(json!({}));
    two.post(&format!("{other}/save"), json!({"name": "mine"}));
    for (wish, field) in [
        (json!({"restore": "mine", "relevance": false}), "relevance"),
        (json!({"restore": "mine", "turn_tokens": 100}), "turn_tokens"),
        (json!({"restore": "mine", "model": "pocket:code"}), "model"),
    ] {
        one.ask("POST", "/v1/sessions", &wish).fails(400, field);
    }
    let restored = one.post("/v1/sessions", json!({"restore": "mine"}));
    assert_eq!(restored["turns"].as_array().unwrap().len(), 2);
}

#[test]
fn rewinding_restores_the_earlier_state() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let replayed = |said: &[&str]| -> Vec<String> {
        let session = talker.begin(json!({"system": SYSTEM}));
        said.iter().map(|text| talker.say(&session, text)).collect()
    };
    let session = talker.begin(json!({"system": SYSTEM}));
    let first: Vec<String> = TALK.iter().map(|text| talker.say(&session, text)).collect();
    assert_eq!(first, replayed(&TALK));
    let turns = talker.turns(&session);
    assert_eq!(texts(&turns), [SYSTEM, TALK[0], TALK[1], TALK[2]]);

    // In another branch, from before the second question.
    let forked = talker.post(&format!("{session}/fork"), json!({"turn": turns[2]["id"]}));
    assert_eq!((&forked["branch"], forked["turns"].as_array().unwrap().len()), (&json!(1), 2));
    let other = ["My brother is called Max.", "Who is my brother?"];
    let said: Vec<String> = other.iter().map(|text| talker.say(&session, text)).collect();
    assert_eq!(said, replayed(&[TALK[0], other[0], other[1]])[1..]);
    let seen = talker.post(&format!("{session}/branches/0"), json!({}));
    assert_eq!(texts(seen["turns"].as_array().unwrap()), [SYSTEM, TALK[0], TALK[1], TALK[2]]);

    // In the same branch, from before the second question.
    let back = talker.post(&format!("{session}/rewind"), json!({"turn": turns[2]["id"]}));
    assert_eq!(texts(back["turns"].as_array().unwrap()), [SYSTEM, TALK[0]]);
    assert_eq!((&back["tokens"], &back["turns"]), (&forked["tokens"], &forked["turns"]));
    assert_eq!(talker.say(&session, TALK[2]), replayed(&[TALK[0], TALK[2]])[1]);

    let promoted = talker.post(&format!("{session}/branches/1/promote"), json!({}));
    assert_eq!(promoted["branches"].as_array().unwrap().len(), 1);
    assert_eq!(texts(promoted["turns"].as_array().unwrap()), [SYSTEM, TALK[0], other[0], other[1]]);
    assert_eq!(
        talker.say(&session, TALK[2]),
        *replayed(&[TALK[0], other[0], other[1], TALK[2]]).last().unwrap()
    );
    let (opening, path) = (turns[0]["id"].clone(), format!("{session}/rewind"));
    talker.ask("POST", &path, &json!({"turn": opening})).fails(400, "turn");
    talker.ask("POST", &path, &json!({"turn": 99})).fails_saying(404, "was evicted");
    talker.ask("DELETE", &format!("{session}/branches/0"), &Value::Null).fails(400, "branch");
}

/// Answers of several sessions share batches and a page pool.
#[test]
fn concurrent_sessions_answer_as_alone() {
    let server = start(|_| {});
    let names = ["Tom", "Max", "Eva", "Ida", "Ben", "Leo"];
    let talk = |name: &str| -> Vec<String> {
        let talker = Talker::of(&server, "");
        let session = talker.begin(json!({"turn_tokens": 100}));
        let texts = [format!("My brother is called {name}."), "Who is my brother?".into(), "Hello".into()];
        texts.iter().cycle().take(9).map(|text| talker.say(&session, text)).collect()
    };
    let alone = names.map(talk);
    let together = std::thread::scope(|scope| {
        names.map(|name| scope.spawn(move || talk(name))).map(|talking| talking.join().unwrap())
    });
    assert_eq!(together, alone);
    assert!(alone.iter().zip(names).all(|(said, name)| said[1].contains(name)), "{alone:?}");
}

#[test]
fn deleting_a_branch_deletes_its_descendants() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({}));
    talker.say(&session, TALK[0]);
    talker.post(&format!("{session}/fork"), json!({}));
    talker.say(&session, TALK[1]);
    let deeper = talker.post(&format!("{session}/fork"), json!({}));
    assert_eq!(deeper["branches"][2]["parent"], 1);
    let left = talker.ask("DELETE", &format!("{session}/branches/1"), &Value::Null).ok();
    assert_eq!(left["branches"].as_array().unwrap().len(), 1);
    assert_eq!((&left["branch"], texts(left["turns"].as_array().unwrap())), (&json!(0), vec![TALK[0]]));
}

#[test]
fn the_number_of_branches_is_limited() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({}));
    let fork = format!("{session}/fork");
    for branch in 1..64 {
        assert_eq!(talker.post(&fork, json!({}))["branch"], branch);
    }
    talker.ask("POST", &fork, &json!({})).fails_saying(429, "64 branches");
    // Each branch was forked from the previous one and is deleted with it.
    talker.ask("DELETE", &format!("{session}/branches/1"), &Value::Null).ok();
    assert_eq!(talker.post(&fork, json!({}))["branch"], 64);
}

#[test]
fn superseded_facts_return_when_the_newer_one_is_rewound() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({"facts": ["The user's dog is called Rex."]}));
    assert!(talker.say(&session, "What is my dog called?").contains("Rex"));
    let old = talker.turns(&session)[0]["id"].clone();
    let replace = format!("{session}/facts/{old}");
    let seen = talker.post(&replace, json!({"text": "The user's dog is called Bruno."}));
    let turns = seen["turns"].as_array().unwrap();
    let new = turns[2]["id"].clone();
    assert_eq!((&turns[0]["hidden"], &turns[0]["superseded_by"]), (&json!("superseded"), &new));
    assert_eq!((&turns[2]["kind"], &turns[2]["hidden"]), (&json!("fact"), &Value::Null));
    talker.ask("POST", &replace, &json!({"text": "x"})).fails(400, "fact");
    talker.ask("POST", &format!("{session}/turns/{old}"), &json!({"hidden": false})).fails(400, "hidden");
    talker.ask("POST", &format!("{session}/facts/99"), &json!({"text": "x"})).fails_saying(404, "no fact");
    let back = talker.post(&format!("{session}/rewind"), json!({"turn": new}));
    assert_eq!(
        (&back["turns"][0]["hidden"], &back["turns"][0]["superseded_by"]),
        (&Value::Null, &Value::Null)
    );
    assert!(talker.say(&session, "What is my dog called?").contains("Rex"));
    let long = "word ".repeat(600);
    talker.ask("POST", &format!("{session}/facts"), &json!({"text": long})).fails(400, "text");
}

#[test]
fn unpinned_turns_are_evicted() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({"turn_tokens": 120}));
    talker.say(&session, "My brother is called Tom.");
    let pinned = talker.turns(&session)[0]["id"].clone();
    let seen = talker.post(&format!("{session}/turns/{pinned}"), json!({"pinned": true}));
    assert_eq!(seen["turns"][0]["pinned"], true);
    for round in 0..6 {
        talker.say(&session, &format!("I have {round} apples and some pears too."));
    }
    let seen = talker.get(&session);
    let turns = seen["turns"].as_array().unwrap();
    let evicted: Vec<bool> = turns.iter().map(|turn| turn["evicted"].as_bool().unwrap()).collect();
    assert!(!evicted[0] && evicted[1] && !evicted[6], "{evicted:?}");
    assert!(seen["turn_tokens"]["held"].as_u64().unwrap() <= 120, "{seen}");
    let gone = turns[1]["id"].clone();
    talker.ask("POST", &format!("{session}/turns/{gone}"), &json!({"pinned": true})).text(404);
    let hidden = talker.post(&format!("{session}/turns/{}", turns[6]["id"]), json!({"hidden": true}));
    assert_eq!(hidden["turns"][6]["hidden"], "irrelevant");
    // A question that exceeds the capacity is rejected and changes nothing.
    let long = json!({"content": "word ".repeat(200)});
    talker.ask("POST", &format!("{session}/say"), &long).fails(400, "content");
    assert_eq!(talker.turns(&session).len(), 7);
    for (wish, field) in [
        (json!({"turn_tokens": 1000, "fact_tokens": 900}), "turn_tokens"),
        (json!({"turn_tokens": 2}), "turn_tokens"),
        (json!({"turn_tokens": 20, "system": "word ".repeat(40)}), "system"),
        (json!({"facts": [" "]}), "facts"),
    ] {
        talker.ask("POST", "/v1/sessions", &wish).fails(400, field);
    }
}

/// Evicted turns stay in the transcript, up to a limit.
#[test]
fn the_oldest_evicted_texts_are_dropped() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({"turn_tokens": 400, "facts": ["The user's dog is called Rex."]}));
    let text = |round: usize| format!("{round}{}", " multiplies".repeat(340));
    let (mut said, mut round) = (0, 0);
    while said < 360 << 10 {
        let body = json!({"content": text(round), "max_tokens": 1, "temperature": 0});
        talker.post(&format!("{session}/say"), body);
        (said, round) = (said + text(round).len(), round + 1);
    }
    let turns = talker.turns(&session);
    let texts = texts(&turns);
    let kept: usize = texts.iter().map(|text| text.len()).sum();
    assert!((200 << 10..260 << 10).contains(&kept), "{kept}");
    // The fact is older than all of them and is kept.
    assert_eq!(texts[0], "The user's dog is called Rex.");
    let newest: Vec<String> = (0..round).map(text).collect();
    assert_eq!(texts[1..], newest[round - (texts.len() - 1)..]);
}

/// The pocket model's hidden states do not separate topics, which calibration detects and reports.
#[test]
fn relevance_needs_a_model_that_can_be_calibrated() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    talker.ask("POST", "/v1/sessions", &json!({"relevance": true})).fails(400, "relevance");
}

#[test]
fn heads_are_selected_and_loaded() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let states = || -> Vec<(String, String)> {
        let heads = talker.get("/v1/heads");
        let of =
            |head: &Value| (head["head"].as_str().unwrap().into(), head["state"].as_str().unwrap().into());
        heads["data"].as_array().unwrap().iter().map(of).collect()
    };
    let state = |name: &str| states().into_iter().find(|(head, _)| head == name).unwrap().1;
    assert_eq!(state("code"), "on disk");
    let loaded = talker.post("/v1/heads", json!({"head": "code"}));
    assert_eq!((&loaded["id"], &loaded["state"]), (&json!("pocket:code"), &json!("warm")));
    let session = talker.begin(json!({"model": "pocket:summarize"}));
    let question = TALK[0];
    let summary = talker.say(&session, question);
    assert_eq!(state("summarize"), "active");
    let swapped = talker.post(&format!("{session}/head"), json!({"head": "code"}));
    assert_eq!((&swapped["head"], &swapped["swap"]["waited"]), (&json!("code"), &json!(false)));
    let turn = swapped["turns"][0]["id"].clone();
    talker.post(&format!("{session}/rewind"), json!({"turn": turn}));
    let code = talker.say(&session, question);
    assert_ne!(code, summary);
    let alone = talker.begin(json!({"model": "pocket:code"}));
    assert_eq!(talker.say(&alone, question), code, "a swap leaves nothing of the other head behind");
    talker.ask("POST", &format!("{session}/head"), &json!({"head": "nobody"})).fails(400, "head");
    assert_eq!(talker.get(&session)["head"], "code");
    let own = talker.post(&format!("{session}/head"), json!({"head": null}));
    assert_eq!(own["head"], Value::Null);
    talker.ask("POST", "/v1/heads", &json!({"head": "nobody"})).text(404);
    talker.ask("DELETE", &session, &Value::Null).ok();
    talker.ask("DELETE", &alone, &Value::Null).ok();
    let gone = talker.post("/v1/heads", json!({"head": "code", "loaded": false}));
    assert_eq!(gone["state"], "on disk");
}

#[test]
fn a_disconnect_cancels_the_answer_and_keeps_the_session() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({}));
    let mut client = listener(&server, &session);
    client.read_some();
    talker.ask("POST", &format!("{session}/fork"), &json!({})).fails_saying(409, "busy");
    assert_eq!(talker.get(&session)["busy"], true);
    drop(client);
    let began = std::time::Instant::now();
    while talker.get(&session)["busy"] == true {
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
    let turns = talker.turns(&session);
    let tokens = turns[0]["answer"]["tokens"].as_u64().unwrap();
    assert!(tokens < 700, "{tokens}");
    assert_eq!(turns[0]["answer"]["finish"], "cancelled");
    assert!(!talker.say(&session, TALK[0]).is_empty());
}

#[test]
fn sessions_are_limited() {
    let server = start(|config| config.sessions.max_sessions = 2);
    let talker = Talker::of(&server, "");
    talker.begin(json!({}));
    talker.begin(json!({}));
    talker.ask("POST", "/v1/sessions", &json!({})).fails_saying(429, "2 sessions");
}

/// They expire without further requests.
#[test]
fn idle_sessions_expire() {
    let server = start(|config| {
        config.sessions.max_sessions = 1;
        config.sessions.idle_timeout = Duration::from_secs(1);
    });
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({}));
    let began = std::time::Instant::now();
    while talker.get("/v1/engine")["sessions"] != 0 {
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(50));
    }
    talker.ask("GET", &session, &Value::Null).text(404);
    talker.begin(json!({}));
}

#[test]
fn file_names_are_restricted() {
    let folder = tempfile::tempdir().unwrap();
    let within = folder.path().join("saved");
    let server = start(|config| config.sessions.folder = Some(within.clone()));
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({}));
    for name in ["../out", "..", "a/b", "", ".x", "a\u{0}b", "C:\\x"] {
        talker.ask("POST", &format!("{session}/save"), &json!({"name": name})).fails(400, "name");
        talker.ask("POST", "/v1/sessions", &json!({"restore": name})).fails(400, "restore");
    }
    assert!(!within.exists());
    let nowhere = start(|_| {});
    let talker = Talker::of(&nowhere, "");
    let session = talker.begin(json!({}));
    talker.ask("POST", &format!("{session}/save"), &json!({"name": "a"})).fails_saying(400, "--sessions");
}

#[test]
fn the_console_needs_no_key_and_loads_nothing_external() {
    let server = start(|config| config.keys = ApiKeys::new(["one".to_owned()]).unwrap());
    let page = server.get("/");
    let policy = page.head.lines().find(|line| line.starts_with("content-security-policy")).unwrap();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    let text = page.text(200);
    assert!(text.contains("console/app.js"));
    let script = server.get("/console/app.js");
    assert!(script.head.contains("text/javascript"), "{}", script.head);
    script.text(200);
    server.get("/console/nothing.js").text(404);
    server.get("/console/..%2Fapp.js").text(404);
    server.get("/v1/sessions").text(401);
    server.get("/v1/engine").text(401);
}

const SERVED: &str = "FIREBOX_TEST_SESSIONS";

/// Runs in a process of its own, which the test kills.
#[test]
#[ignore = "helper: of a test that kills it"]
fn serves_until_it_is_killed() {
    let Some(folder) = std::env::var_os(SERVED) else { return };
    let server = start(|config| config.sessions.folder = Some(folder.into()));
    println!("\nserves at {}", server.address);
    std::io::stdout().flush().unwrap();
    std::thread::sleep(Duration::from_secs(600));
}

struct Killed(Child, SocketAddr);

impl Killed {
    fn start(folder: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "serves_until_it_is_killed", "--ignored", "--nocapture"])
            .env(SERVED, folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines
            .map_while(Result::ok)
            .find_map(|line| Some(line.strip_prefix("serves at ")?.parse().unwrap()));
        Self(child, address.unwrap())
    }

    fn talker(&self) -> Talker<'static> {
        let address = self.1;
        let send = move |text: &str| {
            use std::io::Read as _;
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            Answer::parse(&answer)
        };
        Talker { send: Box::new(send), key: "" }
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // SIGKILL: nothing is finished or flushed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_saved_session_survives_its_process() {
    let folder = tempfile::tempdir().unwrap();
    let first = Killed::start(folder.path());
    let talker = first.talker();
    let session = talker
        .begin(json!({"model": "pocket:code", "system": SYSTEM, "facts": ["The user's dog is called Rex."]}));
    talker.say(&session, TALK[0]);
    talker.post(&format!("{session}/save"), json!({"name": "trip"}));
    let before = talker.get(&session);
    let expected = [talker.say(&session, TALK[1]), talker.say(&session, "What is my dog called?")];
    // Another save is running when the process is killed: the file is the old or the new one, and complete.
    let path = format!("{session}/save");
    std::thread::scope(|scope| {
        let saving = scope.spawn(|| {
            for _ in 0..50 {
                let saved = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    first.talker().ask("POST", &path, &json!({"name": "other"}))
                }));
                if saved.is_err() {
                    return;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(40));
        let pid = first.0.id().to_string();
        Command::new("kill").args(["-9", &pid]).status().unwrap();
        saving.join().unwrap();
    });
    drop(first);

    let second = Killed::start(folder.path());
    let talker = second.talker();
    assert!(talker.get("/v1/sessions")["saved"].as_array().unwrap().contains(&json!("trip")));
    let restored = talker.post("/v1/sessions", json!({"restore": "trip"}));
    for field in ["turns", "tokens", "head", "turn_tokens", "fact_tokens"] {
        assert_eq!(restored[field], before[field], "{field}");
    }
    let heads = talker.get("/v1/heads");
    let code = heads["data"].as_array().unwrap().iter().find(|head| head["head"] == "code").unwrap();
    assert_eq!(code["state"], "active");
    let session = format!("/v1/sessions/{}", restored["id"].as_str().unwrap());
    let said = [talker.say(&session, TALK[1]), talker.say(&session, "What is my dog called?")];
    assert_eq!(said, expected);
    for name in talker.get("/v1/sessions")["saved"].as_array().unwrap() {
        talker.post("/v1/sessions", json!({"restore": name}));
    }
}
