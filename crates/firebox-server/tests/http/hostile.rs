//! Faulty and malicious clients.

use std::io::Write as _;
use std::time::{Duration, Instant};

use firebox_server::{AllowedOrigins, ApiKeys};
use serde_json::{Value, json};

use crate::client::{Answer, Running, chat, request};

/// A request that runs for many seconds unless cancelled.
pub fn endless() -> Value {
    json!({
        "prompt": "Hello", "max_tokens": 250, "temperature": 1, "ignore_eos": true, "stream": true, "n": 64,
        "logprobs": 20,
    })
}

#[test]
fn invalid_fields_are_rejected_by_name() {
    let server = Running::start(|_| {});
    let ask = |change: Value| {
        let mut body = chat("Hello", 4);
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body)
    };
    ask(json!({"temperature": "hot"})).fails(400, "temperature");
    ask(json!({"messages": "Hello"})).fails(400, "messages");
    ask(json!({"messages": []})).fails(400, "messages");
    ask(json!({"messages": [1]})).fails(400, "messages[0]");
    ask(json!({"messages": [{"content": "a"}]})).fails(400, "messages[0].role");
    ask(json!({"messages": [{"role": "user", "content": 1}]})).fails(400, "messages[0].content");
    ask(json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}))
        .fails(400, "messages");
    ask(json!({"model": "none"})).fails(404, "model");
    ask(json!({"model": "llama:none"})).fails(404, "model");
    ask(json!({"model": "../../etc/passwd"})).fails(404, "model");
    ask(json!({"model": 1})).fails(400, "model");
    ask(json!({"max_tokens": -2})).fails(400, "max_tokens");
    ask(json!({"max_tokens": -1, "top_k": -1})).ok();
    ask(json!({"functions": []})).fails_saying(400, "`tools`");
    ask(json!({"function_call": "auto"})).fails_saying(400, "`tool_choice`");
    ask(json!({"grammar": "nonsense"})).fails(400, "grammar");
    ask(json!({"json_schema": {"type": "nothing"}})).fails(400, "json_schema");
    ask(json!({"n": 1000})).fails(400, "n");
    ask(json!({"stop": [""]})).fails(400, "stop");
    ask(json!({"top_logprobs": 3})).fails(400, "top_logprobs");
    ask(json!({"messages": [{"role": "user", "content": "long ".repeat(400)}]}))
        .fails_saying(400, "do not fit into a context of 256");
    ask(json!({"a_field_of_tomorrow": {"deep": [1]}, "user": "me"})).ok();
    server.post("/v1/completions", &json!({"prompt": [1, 2, 99999]})).fails_saying(400, "99999");
    server.post("/v1/completions", &json!({"prompt": [1, -2]})).fails(400, "prompt[1]");
    server.post("/v1/completions", &json!({"prompt": [[1], "a"]})).fails(400, "prompt[1]");
    server.post("/v1/completions", &json!({})).fails(400, "prompt");
    server.post("/detokenize", &json!({"tokens": ["a"]})).fails(400, "tokens[0]");
    server.post("/nowhere", &json!({})).fails_saying(404, "/nowhere");
    server.get("/v1/chat/completions").fails_saying(405, "POST");
    server.post("/v1/models", &json!({})).fails_saying(405, "GET");
}

#[test]
fn malformed_json_is_rejected() {
    let server = Running::start(|_| {});
    let deep = "[".repeat(100_000);
    for body in
        ["", "{", "nonsense", "[1, 2]", "\"text\"", "{\"messages\": [}", &deep, "{\"model\": \"\\ud800\"}"]
    {
        let answer = server.raw(&request("/v1/chat/completions", "", body));
        answer.fails_saying(400, "the body is");
    }
    let mut client = server.connect();
    client.stream.write_all(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n").unwrap();
    assert_eq!(Answer::parse(&client.rest()).status, 400);
    server.get("/health").ok();
}

#[test]
fn a_large_body_is_rejected_before_it_is_read() {
    let server = Running::start(|_| {});
    let body = " ".repeat(20 << 20);
    server.raw(&request("/v1/chat/completions", "", &body)).fails_saying(413, "exceeds");
    let chunk = format!("{:x}\r\n{}\r\n", 1 << 20, " ".repeat(1 << 20));
    let mut client = server.connect();
    client.send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
    for _ in 0..20 {
        // The server may have stopped reading.
        if client.stream.write_all(chunk.as_bytes()).is_err() {
            break;
        }
    }
    Answer::parse(&client.rest()).fails_saying(413, "exceeds");
}

#[test]
fn other_routes_need_the_key() {
    let server = Running::start(|config| config.keys = ApiKeys::new(["secret".into()]).unwrap());
    server.get("/health").ok();
    server.get("/ready").ok();
    for path in ["/v1/models", "/metrics", "/v1/models/llama"] {
        server.get(path).fails_saying(401, "Bearer");
    }
    let body = chat("Hello", 4);
    server.post("/v1/chat/completions", &body).fails_saying(401, "Bearer");
    for wrong in ["", "secre", "secrets", "SECRET"] {
        server.post_as(wrong, "/v1/chat/completions", &body).fails_saying(401, "Bearer");
    }
    // Without a key, the body is not examined.
    server.raw(&request("/v1/chat/completions", "", "nonsense")).fails_saying(401, "Bearer");
    server.post_as("secret", "/v1/chat/completions", &body).ok();
}

#[test]
fn pages_of_other_sites_are_rejected() {
    let server = Running::start(|_| {});
    let body = chat("Hello", 4).to_string();
    let path = "/v1/chat/completions";
    server.raw(&request(path, "Origin: https://evil.example\r\n", &body)).fails_saying(403, "other sites");
    server.raw(&request(path, "Origin: null\r\n", &body)).fails_saying(403, "other sites");
    server.raw(&request(path, "Origin: http://localhost\r\n", &body)).ok();
    let rebound = "GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    server.raw(rebound).fails_saying(403, "localhost");
}

#[test]
fn pages_of_allowed_origins_may_use_all_routes() {
    let server = Running::start(|config| {
        config.keys = ApiKeys::new(["secret".into()]).unwrap();
        config.allowed_origins = AllowedOrigins::new(["https://app.example".to_owned()], None).unwrap();
    });
    let ask_whether = |origin: &str, host: &str| {
        server.raw(&format!(
            "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nOrigin: {origin}\r\nConnection: close\r\n\
             Access-Control-Request-Method: POST\r\n\
             Access-Control-Request-Headers: authorization,x-stainless-os\r\n\
             Access-Control-Request-Private-Network: true\r\n\r\n"
        ))
    };
    // Preflight requests have no key.
    let asked = ask_whether("https://app.example", "localhost");
    let head = asked.head.to_ascii_lowercase();
    for line in [
        "access-control-allow-origin: https://app.example",
        "access-control-allow-headers: authorization,x-stainless-os",
        "access-control-allow-methods: get, post, delete",
        "access-control-allow-private-network: true",
        "vary: origin",
    ] {
        assert!(head.lines().any(|found| found == line), "no {line} in {head}");
    }
    assert_eq!(asked.text(204), "");
    for (origin, host, words) in [
        ("https://evil.example", "localhost", "--allow-origin"),
        ("http://app.example", "localhost", "--allow-origin"),
        ("https://app.example", "evil.example", "--allow-host"),
    ] {
        ask_whether(origin, host).fails_saying(403, words);
    }
    let body = chat("Hello", 4).to_string();
    let page = |key: &str| {
        let headers = format!("Origin: https://app.example\r\nAuthorization: Bearer {key}\r\n");
        server.raw(&request("/v1/chat/completions", &headers, &body))
    };
    let (answered, refused) = (page("secret"), page("wrong"));
    for answer in [&answered, &refused] {
        // Pages may read error responses.
        assert!(answer.head.contains("access-control-allow-origin: https://app.example"), "{}", answer.head);
        assert!(!answer.head.contains("access-control-allow-credentials"), "{}", answer.head);
    }
    answered.ok();
    refused.fails_saying(401, "Bearer");
    let own = server.raw(&request("/v1/chat/completions", "Authorization: Bearer secret\r\n", &body));
    assert!(!own.head.contains("access-control"), "{}", own.head);
    own.ok();
}

#[test]
fn allowed_host_names_are_accepted() {
    let server = Running::start(|config| {
        config.allowed_origins = AllowedOrigins::new(None, ["models.example".to_owned()]).unwrap();
    });
    let ask = |headers: &str| {
        server.raw(&format!("GET /v1/models HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n"))
    };
    ask("Host: models.example").ok();
    ask("Host: Models.Example:8080").ok();
    // A request of the console through a proxy.
    ask("Host: models.example\r\nOrigin: https://models.example").ok();
    ask("Host: evil.example").fails_saying(403, "--allow-host");
    ask("Host: models.example\r\nOrigin: https://evil.example").fails_saying(403, "--allow-origin");
}

#[test]
fn a_full_queue_is_reported() {
    let server = Running::start(|config| {
        config.engine.admission.most_running = 1;
        config.engine.admission.most_waiting = 40;
    });
    let several = |n: usize| {
        let mut body = endless();
        body["n"] = n.into();
        body
    };
    // More choices than will ever fit must not be retried.
    server.post("/v1/completions", &several(42)).fails(400, "n");
    let mut client = server.open("/v1/completions", &several(40));
    client.read_some();
    let mut whole = several(20);
    whole["stream"] = false.into();
    let answer = server.post("/v1/completions", &whole);
    assert!(answer.head.contains("retry-after"), "{}", answer.head);
    answer.fails_saying(429, "--queue");
    drop(client);
    // The accepted requests were cancelled with the rejected ones.
    server.comes_to("firebox_waiting_requests", 0);
    server.comes_to("firebox_running_requests", 0);
    server.post("/v1/chat/completions", &chat("Hello", 4)).ok();
}

#[test]
fn a_failing_stream_reports_the_error_and_ends() {
    let server = Running::start(|_| {});
    let mut client = server.open("/v1/completions", &endless());
    client.read_some();
    server.engine.remove("llama").unwrap();
    let events = Answer::parse(&client.rest()).events();
    assert!(events.last().unwrap()["error"]["message"].is_string(), "{events:?}");
}

#[test]
fn a_disconnect_cancels_the_request() {
    let server = Running::start(|config| config.engine.admission.most_running = 1);
    for stream in [true, false] {
        let mut body = endless();
        body["stream"] = stream.into();
        let mut client = server.open("/v1/completions", &body);
        if stream {
            client.read_some();
        }
        server.comes_to("firebox_running_requests", 1);
        let before = server.metric("firebox_generated_tokens_total");
        drop(client);
        let began = Instant::now();
        server.comes_to("firebox_running_requests", 0);
        server.comes_to("firebox_waiting_requests", 0);
        server.post("/v1/chat/completions", &chat("Hello", 4)).ok();
        let took = began.elapsed();
        let after = server.metric("firebox_generated_tokens_total");
        println!("stream {stream}: free after {took:?}, {} tokens later", after - before);
        // All of it would have been 16,000.
        assert!(after - before < 8000, "{}", after - before);
    }
}

#[test]
fn a_client_that_does_not_read_is_disconnected() {
    const TIMEOUT: Duration = Duration::from_secs(3);
    let server = Running::start(|config| {
        config.engine.admission.most_running = 1;
        config.client_timeout = TIMEOUT;
    });
    let mut client = server.open("/v1/completions", &endless());
    client.read_some();
    // An unread response fills the buffers, and then the connection is closed. Between two choices none runs, but others wait.
    server.comes_to("firebox_waiting_requests", 0);
    server.comes_to("firebox_running_requests", 0);
    server.post("/v1/chat/completions", &chat("Hello", 4)).ok();
    // A finished response is also lost after the timeout.
    std::thread::sleep(TIMEOUT + Duration::from_secs(1));
    // A server that was suspended has not noticed the timeout; by its second response it has.
    for _ in 0..2 {
        server.post("/v1/chat/completions", &chat("Hello", 4)).ok();
    }
    assert!(!client.rest().contains("[DONE]"));
}

#[test]
fn a_slow_sender_times_out() {
    let server = Running::start(|config| config.client_timeout = Duration::from_secs(1));
    let began = Instant::now();
    let mut client = server.connect();
    for byte in "POST /v1/completions HTTP/1.1\r\nX-Slow: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".as_bytes() {
        if client.stream.write_all(&[*byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(40));
    }
    assert_eq!(Answer::parse(&client.rest()).status, 408);
    assert!(began.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_connection_serves_several_requests() {
    let server = Running::start(|_| {});
    let mut client = server.connect();
    // Pipelined.
    let one = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    client.send(&format!("{one}{one}{}", one.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")));
    assert_eq!(client.rest().matches("HTTP/1.1 200 OK").count(), 3);
}

#[test]
fn idle_connections_make_room_for_others() {
    let server = Running::start(|config| config.max_clients = 8);
    let mut streamed = server.open("/v1/chat/completions", &endless());
    streamed.read_some();
    // Some have sent nothing, and some have begun a request.
    let idle: Vec<_> = (0..30)
        .map(|number| {
            let mut client = server.connect();
            if number % 2 == 0 {
                client.send("GET /hea");
            }
            client
        })
        .collect();
    let began = Instant::now();
    assert_eq!(server.get("/health").status, 200);
    assert!(began.elapsed() < Duration::from_secs(10), "not the time after which idle connections end");
    // The one with a request goes on.
    streamed.read_some();
    streamed.read_some();
    drop(idle);
}
