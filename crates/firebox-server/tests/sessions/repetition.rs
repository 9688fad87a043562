//! Answers that only repeat themselves.

use serde_json::{Value, json};

use super::start;

#[test]
fn an_answer_that_only_repeats_itself_ends() {
    let server = start(|_| {});
    let session =
        server.post("/v1/sessions", &json!({"model": "pocket"})).ok()["id"].as_str().unwrap().to_owned();
    let say = |more: Value| {
        let mut body =
            json!({"content": "Hello", "max_tokens": 300, "temperature": 0, "logit_bias": {"9": 100}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.post(&format!("/v1/sessions/{session}/say"), &body).ok();
        assert_eq!(answer["finish_reason"], "length");
        answer["usage"]["completion_tokens"].as_u64().unwrap()
    };
    let (guarded, unguarded) = (json!({}), json!({"loop_guard": false}));
    assert_eq!([guarded, unguarded, json!({"ignore_eos": true})].map(say), [256, 300, 300]);
    let mut body = json!({"model": "pocket", "prompt": "Hello", "max_tokens": 300, "temperature": 0, "logit_bias": {"9": 100}});
    let mut complete = |guard: Option<bool>| {
        body.as_object_mut().unwrap().extend(guard.map(|guard| ("loop_guard".to_owned(), guard.into())));
        let answer = server.post("/v1/completions", &body).ok();
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        answer["usage"]["completion_tokens"].as_u64().unwrap()
    };
    assert_eq!((complete(None), complete(Some(true))), (300, 256));
}
