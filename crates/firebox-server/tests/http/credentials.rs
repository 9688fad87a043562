//! Keys: what they permit, where a server needs them, and how they change while it runs.

use std::net::SocketAddr;

use firebox_runtime::heads::HeadPoolConfig;
use firebox_runtime::{Model, device};
use firebox_server::{AllowedOrigins, ApiKey, ApiKeys, Credentials, Server, ServerConfig, ServerError};
use serde_json::json;

use crate::client::{Running, chat, gguf, root};

fn key(text: &str) -> ApiKey {
    ApiKey::new(text.into()).unwrap()
}

fn with_heads(change: impl FnOnce(&mut ServerConfig)) -> Running {
    let model = Model::open(root("assets/pocket"), &device("cpu").unwrap()).unwrap();
    let model = model.with_heads(HeadPoolConfig::patient()).unwrap();
    Running::serve(vec![("pocket".into(), model)], change)
}

/// All addresses of this machine, at a free port.
fn exposed() -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], 0))
}

#[test]
fn heads_are_loaded_for_all_by_an_admin_key_alone() {
    let load = json!({"head": "code"});
    let server = with_heads(|config| {
        config.keys = ApiKeys::new(["user".into()]).unwrap().with([key("admin").with_admin(true)]);
    });
    server.post_as("user", "/v1/heads", &load).fails_saying(403, "admin key");
    server.post_as("user", "/v1/heads", &json!({"head": "code", "loaded": false})).fails_saying(403, "admin");
    assert_eq!(server.post_as("admin", "/v1/heads", &load).ok()["state"], "warm");
    // Those of one key alone are its own affair.
    let session = server.post_as("user", "/v1/sessions", &json!({})).ok()["id"].clone();
    let path = format!("/v1/sessions/{}/head", session.as_str().unwrap());
    server.post_as("user", &path, &load).ok();
    server.post("/v1/heads", &load).fails_saying(401, "Bearer");
    drop(server);
    // Without keys, the users of the machine itself may.
    with_heads(|_| {}).post("/v1/heads", &load).ok();
    let server = with_heads(|config| {
        config.address = exposed();
        config.insecure = true;
    });
    server.post("/v1/heads", &load).fails_saying(403, "admin key");
}

#[test]
fn an_exposed_server_needs_keys() {
    let bind = |change: &dyn Fn(&mut ServerConfig)| {
        let mut config = ServerConfig { address: exposed(), ..ServerConfig::default() };
        change(&mut config);
        Server::bind(config, vec![("llama".into(), gguf("llama"))]).map(drop)
    };
    let error = bind(&|_| {}).unwrap_err();
    assert!(matches!(error, ServerError::Exposed { .. }), "{error}");
    let message = error.to_string();
    assert!(["--api-key", "--insecure", "0.0.0.0"].iter().all(|word| message.contains(word)), "{message}");
    bind(&|config| config.insecure = true).unwrap();
    bind(&|config| config.keys = ApiKeys::new(["secret".into()]).unwrap()).unwrap();
    bind(&|config| config.address = SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
}

#[test]
fn host_names_are_checked_on_all_addresses() {
    let get = |server: &Running, host: &str| {
        let key = "Authorization: Bearer secret\r\n";
        server.raw(&format!("GET /v1/models HTTP/1.1\r\nHost: {host}\r\n{key}Connection: close\r\n\r\n"))
    };
    let keys = || ApiKeys::new(["secret".into()]).unwrap();
    let allowed = || AllowedOrigins::new([], ["models.example".to_owned()]).unwrap();
    let open = Running::start(|config| {
        config.address = exposed();
        config.insecure = true;
    });
    get(&open, "rebound.example").fails_saying(403, "--allow-host");
    get(&open, "192.168.0.7:8080").ok();
    let named = Running::start(|config| {
        config.address = exposed();
        config.keys = keys();
        config.allowed_origins = allowed();
    });
    get(&named, "rebound.example").fails_saying(403, "--allow-host");
    get(&named, "models.example").ok();
    // A page of another site has no key to send.
    let keyed = Running::start(|config| {
        config.address = exposed();
        config.keys = keys();
    });
    get(&keyed, "any.example").ok();
}

#[test]
fn keys_change_while_requests_run() {
    let server = Running::start(|config| config.keys = ApiKeys::new(["old".into(), "both".into()]).unwrap());
    let body = json!({
        "prompt": "Hello", "max_tokens": 200, "temperature": 0, "stream": true, "ignore_eos": true,
    });
    let mut running = server.connect();
    running.send(&crate::client::request(
        "/v1/completions",
        "Authorization: Bearer old\r\n",
        &body.to_string(),
    ));
    running.read_some();
    let session = server.post_as("both", "/v1/sessions", &json!({})).ok()["id"].clone();
    let keys = ApiKeys::new(["new".into(), "both".into()]).unwrap();
    server.credentials.replace(Credentials { keys, certificate: None });
    let ask = |key: &str| server.post_as(key, "/v1/chat/completions", &chat("Hello", 2));
    ask("old").fails_saying(401, "Bearer");
    ask("new").ok();
    // A key that stays has what it had, and a new one in its place has nothing of the old one.
    let sessions = |key: &str| {
        let head = format!("GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n");
        server.raw(&(head + "Connection: close\r\n\r\n")).ok()["data"].clone()
    };
    assert_eq!(sessions("both")[0]["id"], session);
    assert_eq!(sessions("new"), json!([]));
    // No keys at all are a mistake, which opens nothing.
    server.credentials.replace(Credentials::default());
    ask("old").fails_saying(401, "Bearer");
    ask("new").ok();
    assert!(running.rest().contains("data: [DONE]"), "the running request went on");
}
