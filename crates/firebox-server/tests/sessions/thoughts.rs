//! Answers with thoughts.

use firebox_runtime::{Model, device};
use firebox_testing::thinking::{self, ANSWER, THOUGHTS};
use serde_json::json;

use crate::client::Running;

#[test]
fn thoughts_are_separated_from_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    thinking::write(folder.path());
    let model = Model::open(folder.path(), &device("cpu").unwrap()).unwrap();
    let server = Running::serve(vec![("pocket".into(), model)], |_| {});
    let session =
        server.post("/v1/sessions", &json!({"model": "pocket"})).ok()["id"].as_str().unwrap().to_owned();
    let say = format!("/v1/sessions/{session}/say");
    let mut body = json!({"content": "Who are you?", "temperature": 0, "max_tokens": 40});
    let found = server.post(&say, &body).ok();
    assert_eq!((&found["reasoning_content"], &found["answer"]), (&json!(THOUGHTS), &json!(ANSWER)));
    let turn = found["session"]["turns"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(turn["answer"]["reasoning_content"], THOUGHTS);
    assert_eq!(turn["answer"]["text"], ANSWER);

    let back = format!("/v1/sessions/{session}/rewind");
    server.post(&back, &json!({"turn": turn["id"]})).ok();
    body["stream"] = true.into();
    let events = server.post(&say, &body).events();
    let joined = |kind: &str| -> String {
        let pieces = events.iter().filter(|event| event["type"] == kind);
        pieces.map(|event| event["text"].as_str().unwrap()).collect()
    };
    assert_eq!((joined("reasoning").as_str(), joined("delta").as_str()), (THOUGHTS, ANSWER));
}
