//! The OpenAPI document matches the routes.

use firebox_server::ApiKeys;
use serde_json::Value;

use crate::client::{Running, request};

const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];

/// Returns the operations of a document: path, method and description.
fn operations(document: &Value) -> Vec<(&str, &str, &Value)> {
    let paths = document["paths"].as_object().unwrap();
    let mut all = Vec::new();
    for (path, item) in paths {
        for (method, operation) in item.as_object().unwrap() {
            if METHODS.contains(&method.as_str()) {
                all.push((path.as_str(), method.as_str(), operation));
            }
        }
    }
    all
}

#[test]
fn every_documented_route_exists() {
    let server = Running::start(|_| {});
    let document = server.get("/openapi.json").ok();
    // The endless stream is tested elsewhere.
    let ends = operations(&document).into_iter().filter(|(path, ..)| *path != "/v1/engine/events");
    for (path, method, _) in ends {
        let path = path.replace("{model}", "llama").replace(['{', '}'], "");
        let asked = request(&path, "", "{}").replacen("POST", &method.to_uppercase(), 1);
        let answer = server.raw(&asked);
        assert_ne!(answer.status, 405, "{method} {path}");
        let head = answer.head.clone();
        assert!(!answer.body().contains("there is nothing at"), "{method} {path}: {head}");
    }
}

#[test]
fn every_route_is_documented() {
    let server = Running::start(|_| {});
    let document = server.get("/openapi.json").ok();
    let operations = operations(&document);
    for (method, path) in [
        ("get", "/health"),
        ("get", "/ready"),
        ("get", "/metrics"),
        ("get", "/openapi.json"),
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
        ("post", "/v1/chat/completions"),
        ("post", "/v1/responses"),
        ("post", "/v1/completions"),
        ("post", "/v1/embeddings"),
        ("post", "/v1/rerank"),
        ("post", "/rerank"),
        ("post", "/tokenize"),
        ("post", "/detokenize"),
        ("get", "/v1/engine"),
        ("get", "/v1/engine/events"),
        ("get", "/v1/heads"),
        ("get", "/v1/sessions"),
        ("post", "/v1/sessions"),
        ("post", "/v1/sessions/{id}/say"),
        ("delete", "/v1/sessions/saved/{name}"),
    ] {
        let found = operations.iter().filter(|(found, of, _)| (*of, *found) == (method, path)).count();
        assert_eq!(found, 1, "{method} {path}");
    }
    for (path, method, operation) in operations {
        let name = format!("{method} {path}");
        let responses = operation["responses"].as_object().unwrap();
        let well = responses.iter().find(|(status, _)| status.starts_with('2')).unwrap().1;
        assert!(well.get("content").is_some() || responses.contains_key("204"), "{name}");
        let events = &well["content"]["text/event-stream"]["schema"];
        assert!(events.is_null() || events["$ref"] == "#/components/schemas/StreamEvent", "{name}: {events}");
        let wrong = &responses["4XX"]["content"]["application/json"]["schema"]["$ref"];
        assert_eq!(wrong, "#/components/schemas/ErrorBody", "{name}");
        assert!(operation["description"].is_string() || operation["summary"].is_string(), "{name}");
        for name in path.split('{').skip(1).map(|rest| rest.split('}').next().unwrap()) {
            let parameters = operation["parameters"].as_array().unwrap();
            assert!(parameters.iter().any(|parameter| parameter["name"] == name), "{path}: {name}");
        }
    }
    check_references(&document, &document);
}

/// Asserts that every reference resolves.
fn check_references(document: &Value, at: &Value) {
    match at {
        Value::Object(fields) => {
            if let Some(Value::String(to)) = fields.get("$ref") {
                assert!(document.pointer(&to[1..]).is_some(), "{to}");
            }
            fields.values().for_each(|value| check_references(document, value));
        }
        Value::Array(values) => values.iter().for_each(|value| check_references(document, value)),
        _ => {}
    }
}

#[test]
fn the_document_needs_no_key() {
    let server = Running::start(|config| config.keys = ApiKeys::new(["secret".into()]).unwrap());
    let document = server.get("/openapi.json").ok();
    assert_eq!(document["components"]["securitySchemes"]["key"]["scheme"], "bearer");
}
