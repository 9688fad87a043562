//! Tests of answers constrained by a JSON schema or a grammar.

use std::fs;

use serde_json::{Value, json};

use crate::args;
use crate::support::*;

fn schema() -> Value {
    json!({
        "type": "object", "required": ["fine", "kind"], "additionalProperties": false,
        "properties": { "fine": { "type": "boolean" }, "kind": { "enum": ["a", "b"] } },
    })
}

#[test]
fn an_answer_has_the_form_that_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let file = write("schema.json", &schema().to_string());
    for given in [schema().to_string().into(), file.into_os_string()] {
        let ran = firebox_with(args!["run", gguf("llama"), "Hello", "--json-schema", given.as_os_str()])
            .ends_with(0);
        let value: Value = serde_json::from_str(&ran.stdout).unwrap();
        assert!(value["fine"].is_boolean() && value["kind"].is_string(), "{value}");
    }
    let ran =
        firebox_with(args!["run", gguf("llama"), "Hello", "--regex", "(yes|no){2}", "--json"]).ends_with(0);
    assert!(["yesyes", "yesno", "noyes", "nono"].contains(&ran.json()["text"].as_str().unwrap()));
    assert_eq!(ran.json()["finish"], "stop");
    for (name, text) in
        [("a.gbnf", "root ::= \"ye\" \"s\"\n"), ("b", "start: \"yes\"\n"), ("c", "root ::= \"yes\"")]
    {
        let ran =
            firebox_with(args!["run", gguf("qwen3"), "Hello", "--grammar", write(name, text)]).ends_with(0);
        assert_eq!(ran.stdout, "yes\n", "{name}");
    }
    let ran = firebox_with(args!["run", gguf("llama"), "Hello", "--json-object", "-n", "30"]).ends_with(0);
    assert!(ran.stdout.starts_with('{'));
}

#[test]
fn a_form_that_makes_no_sense_is_a_usage_error() {
    let model = gguf("llama");
    let run = |flag: &str, value: &str| firebox_with(args!["run", model, "Hello", flag, value]);
    run("--regex", "a(b").fails(USAGE, &["regular expression", "unclosed"]);
    run("--json-schema", "{\"type\": ").fails(USAGE, &["--json-schema", "JSON"]);
    run("--json-schema", "{\"type\": \"odd\"}").fails(USAGE, &["JSON schema", "odd"]);
    run("--json-schema", "/nowhere.json").fails(UNUSABLE, &["/nowhere.json"]);
    run("--grammar", "/nowhere.lark").fails(UNUSABLE, &["/nowhere.lark"]);
    firebox_with(args!["run", model, "Hello", "--regex", "a", "--json-object"]).ends_with(USAGE);
    let ids = args!["run", fixture("reference/llama"), "--ids", "5", "--regex", "a"];
    firebox_with(ids).fails(USAGE, &["tokenizer"]);
}
