//! Small requests that would take much time or memory.

use std::io::Write as _;
use std::time::{Duration, Instant};

use firebox_server::ApiKeys;
use serde_json::{Value, json};

use crate::client::{Answer, Running, chat, request};
use crate::tools::{TAGGED, serving};

/// Bound for a bomb on a busy machine; unbounded ones would take hours.
const BOUND: Duration = Duration::from_secs(120);

/// Returns the resident memory of this process in MiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or_default() / 1024
}

#[test]
fn a_large_body_takes_no_memory() {
    let server = Running::start(|_| {});
    let before = resident();
    let head = |length: &str| {
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{length}\r\nConnection: close\r\n\r\n"
        )
    };
    let piece = vec![b' '; 1 << 20];
    for length in ["Content-Length: 104857600", "Transfer-Encoding: chunked"] {
        let mut client = server.connect();
        client.send(&head(length));
        for _ in 0..100 {
            let chunked = length.starts_with('T');
            let framed =
                if chunked { [b"100000\r\n".as_slice(), &piece, b"\r\n"].concat() } else { piece.clone() };
            // The server may have stopped reading.
            if client.stream.write_all(&framed).is_err() {
                break;
            }
        }
        let rest = client.rest();
        if !rest.is_empty() {
            Answer::parse(&rest).fails_saying(413, "exceeds");
        }
    }
    let grown = resident().saturating_sub(before);
    println!("{grown} MiB more");
    assert!(grown < 100, "{grown} MiB");
    server.get("/health").ok();
}

#[test]
fn many_small_values_are_rejected_before_parsing() {
    let server = Running::start(|_| {});
    let before = resident();
    for (path, field) in
        [("/v1/chat/completions", "messages"), ("/v1/embeddings", "input"), ("/tokenize", "a")]
    {
        for piece in ["{}", "[]", "{\"a\":1}", "0"] {
            let count = (8 << 20) / (piece.len() + 1) - 16;
            let body = format!("{{\"{field}\": [{}]}}", vec![piece; count].join(","));
            server.raw(&request(path, "", &body)).fails_saying(413, "too many values");
        }
    }
    // JSON in strings is parsed as well.
    let arguments = format!("{{\"a\": [{}]}}", vec!["[0]"; 1_500_000].join(","));
    let call = json!({"type": "function", "function": {"name": "f", "arguments": arguments}});
    let messages = json!([{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "and?"}]);
    server.post("/v1/chat/completions", &json!({"messages": messages})).fails_saying(413, "too many values");
    let call = json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments});
    server.post("/v1/responses", &json!({"input": [call]})).fails_saying(413, "too many values");
    println!("{} MiB more", resident().saturating_sub(before));
    // A prompt too long for this model is a valid body.
    let prompt: Vec<u32> = (0..130_000).map(|at| at % 150).collect();
    let answer = server.post("/v1/completions", &json!({"prompt": prompt}));
    answer.fails_saying(400, "do not fit into a context of 256");
    let texts: Vec<Vec<u32>> = vec![vec![7; 400]; 2049];
    server
        .post("/v1/embeddings", &json!({"input": texts}))
        .fails_saying(400, "2049 texts are more than 2048");
    let field = json!({"type": "string", "description": "The name of a town."});
    let fields: serde_json::Map<String, Value> =
        (0..20_000).map(|at| (format!("field {at}"), field.clone())).collect();
    let parameters = json!({"type": "object", "properties": fields});
    let tool = json!({"type": "function", "function": {"name": "a", "parameters": parameters}});
    let body = json!({"prompt": "Hello", "tools": [tool]});
    assert!(body.to_string().len() > 1 << 20);
    server.post("/tokenize", &body).ok();
}

#[test]
fn bodies_in_flight_have_one_bound() {
    // Room for one body of this size with its JSON.
    let server = Running::start(|config| (config.max_body_bytes, config.max_bodies_bytes) = (64 << 10, 0));
    let body = format!("{{\"prompt\": \"Hello\", \"max_tokens\": 1, \"user\": \"{}\"}}", "a".repeat(60_000));
    let partly = request("/v1/completions", "", &body);
    let partly = &partly[..partly.len() - 1];
    let mut sending: Vec<_> = (0..20).map(|_| server.connect()).collect();
    sending.iter_mut().for_each(|client| client.send(partly));
    let answered = |status: u16| {
        let began = Instant::now();
        loop {
            let answer = server.raw(&request("/v1/completions", "", &body));
            if answer.status == status {
                return answer;
            }
            assert!(began.elapsed() < Duration::from_secs(40), "{answer:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let refused = answered(429);
    assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
    refused.fails_saying(429, "the bodies of requests take");
    drop(sending);
    answered(200);
}

#[test]
fn deep_nesting_is_rejected_or_parsed() {
    let (_folder, server) = serving(TAGGED);
    let deep = |depth: usize, leaf: Value| {
        (0..depth).fold(leaf, |inner, _| json!({"type": "object", "properties": {"a": inner}}))
    };
    let schema =
        |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    let ask = |more: Value| {
        let mut body = chat("Hello", 4);
        body["model"] = "pocket".into();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body)
    };
    ask(json!({"response_format": schema(deep(55, json!(true)))})).fails_saying(400, "nested");
    let tool = |schema: Value| json!([{"type": "function", "function": {"name": "a", "parameters": schema}}]);
    ask(json!({"tools": tool(deep(55, json!({}))), "tool_choice": "required"})).fails(400, "tools");
    ask(json!({"tools": tool(deep(20, json!({})))})).ok();
    ask(json!({"chat_template_kwargs": deep(55, json!({}))})).ok();
    let brackets = format!("{{\"messages\": {}", "[".repeat(1 << 20));
    server.raw(&request("/v1/chat/completions", "", &brackets)).fails_saying(400, "the body is not JSON");
    let brackets = format!("{{\"a\": {}1{}}}", "{\"a\": ".repeat(200_000), "}".repeat(200_000));
    server.raw(&request("/v1/responses", "", &brackets)).fails_saying(400, "the body is not JSON");
}

#[test]
fn names_cannot_traverse_folders() {
    let server = Running::start(|_| {});
    let passwd = "../../../../../../etc/passwd";
    for name in
        [passwd, &format!("llama:{passwd}"), "/etc/passwd", "llama:", ":", "llama\0", "llama:a/../../b", "."]
    {
        let mut body = chat("Hello", 4);
        body["model"] = (*name).into();
        server.post("/v1/chat/completions", &body).fails(404, "model");
        for path in
            ["/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/tokenize", "/detokenize"]
        {
            let mut body =
                json!({"model": name, "input": "a", "query": "a", "documents": ["a"], "tokens": [1]});
            if path != "/v1/responses" {
                body["prompt"] = "a".into();
            }
            server.post(path, &body).fails(404, "model");
        }
    }
    for path in [
        "/v1/models/..%2F..%2Fetc%2Fpasswd",
        "/v1/models/llama%3A..%2F..",
        "/v1/models/%00",
        "/v1/models/a/../../b",
    ] {
        let answer = server.get(path);
        assert_eq!(answer.status, 404, "{path}");
    }
    for path in
        ["/../etc/passwd", "/openapi.json/../../etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd"]
    {
        server.get(path).fails_saying(404, "there is nothing at");
    }
    server.get("/v1/models/%ff").fails_saying(400, "the path is invalid");
}

#[test]
fn requests_cannot_inject_headers() {
    let server = Running::start(|_| {});
    let evil = "a\r\nX-Evil: 1\r\n\r\nHTTP/1.1 200 OK";
    let mut body = chat("Hello", 4);
    body["model"] = evil.into();
    let answer = server.post("/v1/chat/completions", &body);
    assert!(!answer.head.to_ascii_lowercase().contains("x-evil"), "{}", answer.head);
    answer.fails(404, "model");
    let answer = server.get("/a%0d%0aX-Evil:%201%0d%0a");
    assert!(!answer.head.to_ascii_lowercase().contains("x-evil"), "{}", answer.head);
    answer.fails_saying(404, "there is nothing at");
    for header in ["X-Request-Id: a\nX-Evil: 1\r\n", "X: a\r X-Evil: 1\r\n", "Authorization: Bearer \0\r\n"] {
        let answer = server.raw(&request("/v1/chat/completions", header, "{}"));
        assert!(answer.status == 400 && !answer.head.to_ascii_lowercase().contains("x-evil"), "{header:?}");
    }
}

#[test]
fn an_endless_template_is_stopped_and_delays_no_request() {
    let bomb = "{% for m in messages %}{{ m.content }}{% if m.content == 'bomb' %}{% for a in range(90000) %}\
        {% for b in range(90000) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}";
    let (_folder, server) = serving(bomb);
    let ask = |text: &str| {
        let mut body = chat(text, 4);
        body["model"] = "pocket".into();
        server.post("/v1/chat/completions", &body)
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        let bombs: Vec<_> = (0..4).map(|_| scope.spawn(|| ask("bomb").fails_saying(400, "steps"))).collect();
        std::thread::sleep(Duration::from_millis(50));
        server.get("/health").ok();
        assert!(
            bombs.iter().all(|bomb| !bomb.is_finished()),
            "who is healthy says so before any of them has ended"
        );
        bombs.into_iter().for_each(|bomb| bomb.join().unwrap());
    });
    println!("four bombs took {:?}", began.elapsed());
    assert!(began.elapsed() < BOUND);
    ask("Hello").ok();
    // As many messages as a body holds are parsed, and then exceed the context.
    let messages = vec![json!({"role": "user", "content": "a"}); 100_000];
    let began = Instant::now();
    assert_eq!(server.post("/v1/chat/completions", &json!({"messages": messages})).status, 400);
    println!("100,000 messages took {:?}", began.elapsed());
    assert!(began.elapsed() < BOUND);
}

#[test]
fn an_exploding_grammar_is_rejected_and_delays_no_request() {
    let server = Running::start(|_| {});
    let text = |more: Value| {
        let mut schema = json!({"type": "string"});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    let many: Vec<String> = (0..100_000).map(|at| format!("word {at}")).collect();
    let fields: serde_json::Map<String, Value> =
        (0..20_000).map(|at| (format!("field {at}"), json!({"type": ["string", "number"]}))).collect();
    let bombs = [
        ("a repetition of repetitions", text(json!({"pattern": "^((a{1,1000}){1,1000}){1,1000}$"}))),
        ("a choice of choices", text(json!({"pattern": "^(a|aa)+(b|bb)+.*(a|b){200}c{500}$"}))),
        ("a class far behind", text(json!({"pattern": "^.*a.{400}$"}))),
        ("a length", text(json!({"minLength": 1_000_000_000}))),
        (
            "lengths of items",
            json!({"type": "array", "minItems": 100_000_000, "items": {"type": "array", "minItems": 100_000_000}}),
        ),
        ("many words", json!({"enum": many})),
        ("many fields", json!({"type": "object", "properties": fields, "additionalProperties": false})),
        ("itself", json!({"$ref": "#"})),
        (
            "itself in a circle",
            json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        ),
        ("another machine", json!({"$ref": "http://127.0.0.1:1/schema"})),
        ("a file", json!({"$ref": "file:///etc/passwd"})),
    ];
    for (name, schema) in bombs {
        let mut body = chat("Hello", 4);
        body["response_format"] =
            json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
        let began = Instant::now();
        let (answer, health) = std::thread::scope(|scope| {
            let answer = scope.spawn(|| server.post("/v1/chat/completions", &body));
            std::thread::sleep(Duration::from_millis(20));
            let began = Instant::now();
            server.get("/health").ok();
            let health = began.elapsed();
            (answer.join().unwrap(), health)
        });
        let took = began.elapsed();
        println!("{name}: {} after {took:?}, health after {health:?}", answer.status);
        assert!([200, 400].contains(&answer.status), "{name}: {}", answer.body());
        assert!(took < BOUND, "{name}: {took:?}");
        assert!(health < Duration::from_secs(10), "{name}: {health:?}");
    }
    server.post("/v1/chat/completions", &chat("Hello", 4)).ok();
}

#[test]
fn almost_correct_keys_are_rejected() {
    let server = Running::start(|config| config.keys = ApiKeys::new(["secret".into()]).unwrap());
    for header in [
        "Authorization: secret\r\n",
        "Authorization: Basic secret\r\n",
        "Authorization: Bearer\r\n",
        "Authorization: Bearer secret, Bearer secret\r\n",
        "Authorization: Bearer wrong\r\nAuthorization: Bearer secret\r\n",
        "X-Api-Key: secret\r\n",
        "Authorization: Bearer \u{e9}\r\n",
    ] {
        for path in ["/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/rerank"] {
            let answer = server.raw(&request(path, header, "{"));
            assert!(answer.head.contains("www-authenticate"), "{}", answer.head);
            answer.fails_saying(401, "Bearer");
        }
    }
}
