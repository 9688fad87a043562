//! A test server and an HTTP client that can misbehave.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firebox_engine::Engine;
use firebox_runtime::{Model, device};
use firebox_server::{CredentialStore, ModelSpec, Server, ServerConfig, ServerError, StopHandle};
use serde_json::{Value, json};

/// Longer than any step takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

pub fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

pub fn gguf(family: &str) -> Model {
    Model::open(root(&format!("tests/fixtures/gguf/{family}/model.gguf")), &device("cpu").unwrap()).unwrap()
}

/// Creates the small encoder of random weights with a tokenizer.
pub fn sentence_encoder() -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(root("tests/fixtures/reference/bert").join(name), folder.path().join(name)).unwrap();
    }
    let recorded =
        std::fs::read(root("crates/firebox-text/tests/fixtures/tokenizers/wordpiece.json")).unwrap();
    let recorded: Value = serde_json::from_slice(&recorded).unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), recorded["tokenizer"].to_string()).unwrap();
    let model = Model::open(folder.path(), &device("cpu").unwrap()).unwrap();
    (folder, model)
}

pub fn chat(text: &str, most: usize) -> Value {
    let messages = [json!({"role": "user", "content": text})];
    json!({"model": "llama", "messages": messages, "max_tokens": most, "temperature": 0})
}

/// A server on a thread of its own; dropping it stops the server.
pub struct Running {
    pub address: SocketAddr,
    pub engine: Engine,
    pub credentials: CredentialStore,
    stop: StopHandle,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
}

impl Running {
    pub fn start(change: impl FnOnce(&mut ServerConfig)) -> Self {
        Self::serve(vec![("llama".into(), gguf("llama"))], change)
    }

    pub fn serve(models: Vec<(String, Model)>, change: impl FnOnce(&mut ServerConfig)) -> Self {
        Self::with_models(
            models.into_iter().map(|(name, model)| ModelSpec::new(name, model)).collect(),
            change,
        )
    }

    pub fn with_models(offers: Vec<ModelSpec>, change: impl FnOnce(&mut ServerConfig)) -> Self {
        let mut config =
            ServerConfig { address: SocketAddr::from(([127, 0, 0, 1], 0)), ..ServerConfig::default() };
        change(&mut config);
        let server = Server::with_models(config, offers).unwrap();
        let (address, engine, stop) = (server.address(), server.engine(), server.stop());
        let credentials = server.credentials();
        Self { address, engine, credentials, stop, thread: Some(std::thread::spawn(|| server.run())) }
    }

    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Waits until the server has ended without an error.
    pub fn ends(&mut self) {
        self.thread.take().unwrap().join().unwrap().unwrap();
        assert!(TcpStream::connect(self.address).is_err());
    }

    pub fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        Client { stream, read: Vec::new() }
    }

    pub fn get(&self, path: &str) -> Answer {
        self.raw(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.raw(&request(path, "", &body.to_string()))
    }

    pub fn post_as(&self, key: &str, path: &str, body: &Value) -> Answer {
        self.raw(&request(path, &format!("Authorization: Bearer {key}\r\n"), &body.to_string()))
    }

    /// Sends bytes and reads until the server closes.
    pub fn raw(&self, text: &str) -> Answer {
        let mut client = self.connect();
        client.send(text);
        Answer::parse(&client.rest())
    }

    /// Sends a request and returns the connection for streaming.
    pub fn open(&self, path: &str, body: &Value) -> Client {
        let mut client = self.connect();
        client.send(&request(path, "", &body.to_string()));
        client
    }

    /// Returns a metric of the server.
    pub fn metric(&self, name: &str) -> u64 {
        self.metric_of(name, "llama")
    }

    fn metric_of(&self, name: &str, model: &str) -> u64 {
        let text = self.get("/metrics").text(200);
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}{{model=\"{model}\"}} ")));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    /// Waits until a metric has a value.
    #[track_caller]
    pub fn comes_to(&self, name: &str, expected: u64) {
        self.comes_to_of(name, "llama", expected);
    }

    /// Waits until the metric of a model has a value.
    #[track_caller]
    pub fn comes_to_of(&self, name: &str, model: &str, expected: u64) {
        let began = Instant::now();
        while self.metric_of(name, model) != expected {
            let found = self.metric_of(name, model);
            assert!(began.elapsed() < TIMEOUT, "{name} is {found}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub fn request(path: &str, headers: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n\
         Content-Length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
}

/// A connection.
pub struct Client {
    pub stream: TcpStream,
    read: Vec<u8>,
}

impl Client {
    pub fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).unwrap();
    }

    /// Waits for data and returns its length.
    pub fn read_some(&mut self) -> usize {
        let mut bytes = [0; 4096];
        let count = read_some(&mut self.stream, &mut bytes);
        self.read.extend(&bytes[..count]);
        count
    }

    /// Returns everything until the server closes, including what was read before.
    pub fn rest(&mut self) -> String {
        let _ = self.stream.read_to_end(&mut self.read);
        String::from_utf8(std::mem::take(&mut self.read)).unwrap()
    }
}

/// Reads available data; the process may be suspended meanwhile.
pub fn read_some(stream: &mut TcpStream, bytes: &mut [u8]) -> usize {
    loop {
        match stream.read(bytes) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            count => return count.unwrap(),
        }
    }
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    body: String,
}

impl Answer {
    pub fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer but {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = if head.contains("transfer-encoding: chunked") { joined(body) } else { body.to_owned() };
        Self { status, head: head.to_owned(), body }
    }

    pub fn body(self) -> String {
        self.body
    }

    #[track_caller]
    pub fn text(self, status: u16) -> String {
        assert_eq!(self.status, status, "{}\n{}", self.head, self.body);
        self.body
    }

    #[track_caller]
    pub fn ok(self) -> Value {
        serde_json::from_str(&self.text(200)).unwrap()
    }

    /// Returns the events of a complete stream.
    #[track_caller]
    pub fn events(self) -> Vec<Value> {
        let text = self.text(200);
        let mut events: Vec<&str> = text
            .split("\n\n")
            // Skips keep-alive comments, which a slow machine may cause.
            .filter(|event| !event.is_empty() && !event.starts_with(':'))
            .map(|event| &event["data: ".len()..])
            .collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{text}");
        events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// Asserts an error in OpenAI's format that names a field.
    #[track_caller]
    pub fn fails(self, status: u16, param: &str) {
        let error: Value = serde_json::from_str(&self.text(status)).unwrap();
        assert_eq!(error["error"]["param"], param, "{error}");
        assert!(error["error"]["type"].is_string() && error["error"].get("code").is_some(), "{error}");
    }

    /// Asserts an error whose message contains `words`.
    #[track_caller]
    pub fn fails_saying(self, status: u16, words: &str) {
        let error: Value = serde_json::from_str(&self.text(status)).unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{error}");
        assert!(error["error"]["type"].is_string(), "{error}");
    }
}

/// Removes the chunk lengths of a body.
fn joined(mut chunks: &str) -> String {
    let mut body = String::new();
    while let Some((length, rest)) = chunks.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).unwrap();
        body.push_str(&rest[..length]);
        chunks = &rest[length + 2..];
    }
    body
}
