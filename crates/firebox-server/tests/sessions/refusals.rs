//! Rejected requests, failing answers, and limits of saved sessions.

use firebox_server::ApiKeys;
use serde_json::{Value, json};

use crate::client::Answer;
use crate::{TALK, Talker, listener, start};

#[test]
fn a_failing_answer_ends_its_stream() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let mut client = listener(&server, &talker.begin(json!({})));
    server.engine.remove("pocket").unwrap();
    let events = Answer::parse(&client.rest()).events();
    assert_eq!(events.last().unwrap()["type"], "error", "{events:?}");
}

#[test]
fn fields_of_chats_are_rejected_by_name() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let say = format!("{}/say", talker.begin(json!({})));
    for (field, value) in
        [("n", json!(2)), ("logprobs", json!(true)), ("tools", json!([{}])), ("tool_choice", json!("auto"))]
    {
        talker.ask("POST", &say, &json!({"content": "Hello", field: value})).fails(400, field);
    }
    let usual = json!({"content": "Hello", "max_tokens": 1, "n": 1, "logprobs": false, "tools": []});
    talker.post(&say, usual);
}

#[test]
fn saved_sessions_are_removed_by_their_key() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(|config| {
        config.keys = ApiKeys::new(["one", "two"].map(String::from)).unwrap();
        config.sessions.folder = Some(folder.path().into());
    });
    let (one, two) = (Talker::of(&server, "one"), Talker::of(&server, "two"));
    let session = one.begin(json!({}));
    one.post(&format!("{session}/save"), json!({"name": "mine"}));
    let remove = |talker: &Talker<'_>, name: &str| {
        talker.ask("DELETE", &format!("/v1/sessions/saved/{name}"), &Value::Null)
    };
    remove(&two, "mine").fails_saying(404, "no saved session");
    remove(&one, "..%2Fmine").fails(400, "name");
    assert_eq!(one.get("/v1/sessions")["saved"], json!(["mine"]));
    assert_eq!(remove(&one, "mine").ok()["deleted"], true);
    assert_eq!(one.get("/v1/sessions")["saved"], json!([]));
    remove(&one, "mine").fails_saying(404, "no saved session");
}

#[test]
fn the_number_of_saved_sessions_is_limited() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(|config| {
        config.keys = ApiKeys::new(["one", "two"].map(String::from)).unwrap();
        config.sessions.folder = Some(folder.path().into());
        config.sessions.max_saved = 2;
    });
    let (one, two) = (Talker::of(&server, "one"), Talker::of(&server, "two"));
    let save = |talker: &Talker<'_>, session: &str, name: &str| {
        talker.ask("POST", &format!("{session}/save"), &json!({"name": name}))
    };
    let session = one.begin(json!({}));
    for name in ["a", "b", "a"] {
        assert_eq!(save(&one, &session, name).ok()["saved"], name);
    }
    let refused = save(&one, &session, "c");
    assert!(
        !refused.head.to_ascii_lowercase().contains("retry-after"),
        "retrying later would not help: {}",
        refused.head
    );
    refused.fails_saying(507, "--saved-sessions");
    save(&one, &session, "c").fails_saying(507, "DELETE /v1/sessions/saved/NAME");
    assert_eq!(one.get("/v1/sessions")["saved"], json!(["a", "b"]));
    let other = two.begin(json!({}));
    save(&two, &other, "c").ok();
    one.ask("DELETE", "/v1/sessions/saved/a", &Value::Null).ok();
    save(&one, &session, "c").ok();
    assert_eq!(one.get("/v1/sessions")["saved"], json!(["b", "c"]));
}

#[test]
fn the_size_of_saved_sessions_is_limited() {
    let folder = tempfile::tempdir().unwrap();
    let begun = |bytes: u64| {
        start(|config| {
            config.sessions.folder = Some(folder.path().into());
            config.sessions.max_saved_bytes = bytes;
        })
    };
    let file = folder.path().join("open/a.session");
    let size = || std::fs::metadata(&file).unwrap().len();
    let server = begun(1 << 30);
    let talker = Talker::of(&server, "");
    let session = talker.begin(json!({}));
    talker.say(&session, TALK[0]);
    talker.post(&format!("{session}/save"), json!({"name": "a"}));
    drop(talker);
    drop(server);
    let before = size();

    // Space for the saved session, and for no other.
    let server = begun(before + before / 2);
    let talker = Talker::of(&server, "");
    let restored = talker.post("/v1/sessions", json!({"restore": "a"}));
    let session = format!("/v1/sessions/{}", restored["id"].as_str().unwrap());
    let save = |name: &str| talker.ask("POST", &format!("{session}/save"), &json!({"name": name}));
    save("a").ok();
    save("b").fails_saying(507, "--saved-size");
    for text in TALK.iter().cycle().take(9) {
        talker.say(&session, text);
    }
    save("a").fails_saying(507, "--saved-size");
    assert_eq!(talker.get("/v1/sessions")["saved"], json!(["a"]));
    // Rejected saves left the saved one intact.
    let again = talker.post("/v1/sessions", json!({"restore": "a"}));
    assert_eq!(again["turns"].as_array().unwrap().len(), 1);
    assert_eq!(talker.turns(&session).len(), 10);
}
