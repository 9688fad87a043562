//! What is refused, what fails on its way, and what is removed.

use firebox_server::Keys;
use serde_json::{Value, json};

use crate::client::Answer;
use crate::{Talker, listener, start};

#[test]
fn an_answer_that_fails_on_its_way_ends_as_others_do() {
    let server = start(|_| {});
    let talker = Talker::of(&server, "");
    let mut client = listener(&server, &talker.begin(json!({})));
    server.engine.remove("pocket").unwrap();
    let events = Answer::parse(&client.rest()).events();
    assert_eq!(events.last().unwrap()["type"], "error", "{events:?}");
}

#[test]
fn what_only_chats_have_is_refused_by_name() {
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
fn what_was_saved_is_removed_by_whose_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(|config| {
        config.keys = Keys::new(["one", "two"].map(String::from)).unwrap();
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
