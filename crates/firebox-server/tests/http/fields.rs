//! Fields of requests: honoured, refused, or named as ignored.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::client::{Answer, Running, gguf, root, sentence_encoder};
use crate::tools::serving;

const TABLE: &str = "docs/book/src/fields.md";

/// A minimal request of every endpoint.
const REQUESTS: [(&str, &str); 5] = [
    (
        "/v1/chat/completions",
        r#"{"model": "llama", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}"#,
    ),
    ("/v1/completions", r#"{"model": "llama", "prompt": "a", "max_tokens": 1}"#),
    ("/v1/responses", r#"{"model": "llama", "input": "a", "max_output_tokens": 1}"#),
    ("/v1/embeddings", r#"{"model": "bert", "input": "a"}"#),
    ("/v1/rerank", r#"{"model": "bert", "query": "a", "documents": ["b"]}"#),
];

fn servers(change: impl FnOnce(&mut firebox_server::ServerConfig)) -> (tempfile::TempDir, Running) {
    let (folder, encoder) = sentence_encoder();
    (folder, Running::serve(vec![("llama".into(), gguf("llama")), ("bert".into(), encoder)], change))
}

/// Returns the fields that an answer names as ignored.
fn ignored(answer: &Answer) -> Vec<String> {
    let line = answer.head.lines().find_map(|line| line.strip_prefix("x-firebox-ignored: "));
    line.map(|line| line.split(", ").map(str::to_owned).collect()).unwrap_or_default()
}

fn with(body: &str, field: &str, value: Value) -> Value {
    let mut body: Value = serde_json::from_str(body).unwrap();
    body[field] = value;
    body
}

/// Returns the rows of the book's table for an endpoint: field and treatment.
fn rows(endpoint: &str) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(root(TABLE)).unwrap();
    let section = text.split("\n## ").find(|section| section.starts_with(&format!("`{endpoint}`")));
    let section = section.unwrap_or_else(|| panic!("{TABLE} has no section about {endpoint}"));
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
        Some((cells.next()?.trim_end_matches('`').to_owned(), cells.next()?.to_owned()))
    };
    section.lines().filter_map(row).collect()
}

#[test]
fn unknown_fields_are_named_or_refused() {
    let (_folder, server) = servers(|_| {});
    for (path, body) in REQUESTS {
        assert_eq!(ignored(&server.post(path, &with(body, "user", Value::Null))), [""; 0], "{path}");
        let answer = server.post(path, &with(body, "of_no_use", 1.into()));
        assert_eq!((answer.status, ignored(&answer)), (200, vec!["of_no_use".to_owned()]), "{path}");
    }
    let nested = json!({
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "model": "llama", "stream": true,
        "stream_options": {"include_usage": true, "include_obfuscation": true},
        "response_format": {"type": "text", "odd\nname": 1}, "extra": [{"a": 1}],
    });
    let answer = server.post("/v1/chat/completions", &nested);
    let named: BTreeSet<String> = ignored(&answer).into_iter().collect();
    let expected = ["stream_options.include_obfuscation", "response_format.odd?name", "extra"];
    assert_eq!(named, expected.map(str::to_owned).into());
    assert!(answer.events().len() > 1);
    // A header stays short.
    let many: Map<String, Value> = (0..500).map(|at| (format!("field_{at}"), at.into())).collect();
    let mut body = with(REQUESTS[1].1, "user", Value::Null);
    body.as_object_mut().unwrap().extend(many);
    let answer = server.post("/v1/completions", &body);
    assert!(answer.status == 200 && answer.head.len() < 2000, "{}", answer.head);
    assert!(ignored(&answer).len() > 10);
}

/// The book's table, the OpenAPI document and the server agree.
#[test]
fn the_table_of_fields_is_true() {
    let (_folder, server) = servers(|_| {});
    let document = server.get("/openapi.json").ok();
    for (path, body) in REQUESTS {
        let rows = rows(path);
        let of = |treatment: &str| -> BTreeSet<String> {
            rows.iter().filter(|(_, of)| of == treatment).map(|(field, _)| field.clone()).collect()
        };
        let schema = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        let mut documented = BTreeSet::new();
        properties(&document, schema, &mut documented);
        let honoured = of("honoured");
        let objects: BTreeSet<&str> =
            rows.iter().filter_map(|(field, _)| Some(field.rsplit_once('.')?.0)).collect();
        for object in objects {
            let within: BTreeSet<String> = honoured
                .iter()
                .filter_map(|field| Some(field.strip_prefix(object)?.strip_prefix('.')?.to_owned()))
                .filter(|field| !field.contains('.'))
                .collect();
            let mut documented = BTreeSet::new();
            let schema =
                object.split('.').fold(schema.clone(), |schema, name| property(&document, &schema, name));
            properties(&document, &schema, &mut documented);
            // The forms of this field in both of OpenAI's interfaces are taken in both.
            if object.starts_with("tool_choice") {
                assert!(documented.is_subset(&within), "{path}: {object}");
            } else {
                assert_eq!(within, documented, "{path}: honoured and documented in {object}");
            }
        }
        let at_top: BTreeSet<String> =
            honoured.iter().filter(|field| !field.contains('.')).cloned().collect();
        assert_eq!(at_top, documented, "{path}: honoured and documented");
        for (field, treatment) in rows.iter().filter(|(field, _)| !field.contains('.')) {
            let answer = server.post(path, &with(body, field, json!({"?": 1})));
            let named = ignored(&answer);
            match treatment.as_str() {
                "honoured" => {
                    assert!(!named.contains(field), "{path}: {field} is honoured");
                    let status = answer.status;
                    // It is read: its value is taken, or refused by its name.
                    if status != 200 {
                        let error: Value = serde_json::from_str(&answer.text(400)).unwrap();
                        let param = error["error"]["param"].as_str().unwrap_or_default();
                        let is_named = param.starts_with(field.as_str()) || param == "messages";
                        assert!(is_named, "{path}, {field}: {error}");
                    }
                }
                "refused" => answer.fails(400, field),
                "ignored" => {
                    assert_eq!((answer.status, &named), (200, &vec![field.clone()]), "{path}: {field}");
                }
                other => panic!("{path}, {field}: {other}"),
            }
        }
    }
}

/// Collects the names of an object's properties, or of those of the objects in a list.
fn properties(document: &Value, schema: &Value, names: &mut BTreeSet<String>) {
    for schema in parts(document, schema) {
        names.extend(schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.clone()));
    }
}

/// Returns the schema of a property.
fn property(document: &Value, schema: &Value, name: &str) -> Value {
    let found: Vec<Value> =
        parts(document, schema).iter().filter_map(|schema| schema["properties"].get(name).cloned()).collect();
    json!({"anyOf": found})
}

/// Returns the schemas that a schema consists of.
fn parts(document: &Value, schema: &Value) -> Vec<Value> {
    if let Some(to) = schema["$ref"].as_str() {
        return parts(document, document.pointer(&to[1..]).unwrap());
    }
    let several =
        ["allOf", "anyOf", "oneOf"].into_iter().filter_map(|kind| schema[kind].as_array()).flatten();
    let mut all: Vec<Value> =
        several.chain(schema.get("items")).flat_map(|part| parts(document, part)).collect();
    all.push(schema.clone());
    all
}

#[test]
fn reasoning_effort_reaches_the_template_or_is_refused() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort }}";
    let (_folder, server) = serving(template);
    let length = |path: &str, more: Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "a"}], "input": "a", "temperature": 0,
            "max_tokens": 1, "max_output_tokens": 1,
        });
        let others: &[&str] = if path == "/v1/responses" {
            &["messages", "max_tokens"]
        } else {
            &["input", "max_output_tokens"]
        };
        others.iter().for_each(|field| {
            body.as_object_mut().unwrap().remove(*field);
        });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let usage = server.post(path, &body).ok()["usage"].clone();
        usage["prompt_tokens"].as_u64().or_else(|| usage["input_tokens"].as_u64()).unwrap()
    };
    let chat = "/v1/chat/completions";
    assert!(length(chat, json!({"reasoning_effort": "low"})) > length(chat, json!({})));
    let responses = "/v1/responses";
    let high = length(responses, json!({"reasoning": {"effort": "high"}}));
    assert!(high > length(responses, json!({})));
    assert_eq!(high, length(chat, json!({"reasoning_effort": "high"})));
    let variable = json!({"chat_template_kwargs": {"reasoning_effort": "high"}});
    assert_eq!(high, length(chat, variable));

    let server = Running::start(|_| {});
    let mut body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
    body["reasoning_effort"] = "low".into();
    server.post(chat, &body).fails(400, "reasoning_effort");
    body["reasoning_effort"] = 3.into();
    server.post(chat, &body).fails(400, "reasoning_effort");
    let body = json!({"input": "a", "max_output_tokens": 1, "reasoning": {"effort": "low"}});
    server.post(responses, &body).fails(400, "reasoning.effort");
}

#[test]
fn strict_fields_refuse_what_would_be_ignored() {
    let (_folder, server) = servers(|config| config.strict_fields = true);
    for (path, body) in REQUESTS {
        server.post(path, &serde_json::from_str(body).unwrap()).ok();
        server.post(path, &with(body, "of_no_use", 1.into())).fails(400, "of_no_use");
        server.post(path, &with(body, "user", "me".into())).fails(400, "user");
    }
    // A field that asks for nothing is no mistake.
    server.post("/v1/responses", &with(REQUESTS[2].1, "store", false.into())).ok();
    server.post("/v1/responses", &with(REQUESTS[2].1, "store", true.into())).fails(400, "store");
    let mut body = with(REQUESTS[0].1, "stream", true.into());
    body["stream_options"] = json!({"include_obfuscation": false});
    server.post("/v1/chat/completions", &body).fails(400, "stream_options.include_obfuscation");
}
