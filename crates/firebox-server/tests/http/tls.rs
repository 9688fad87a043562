//! A server that speaks TLS.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firebox_server::{ApiKeys, Credentials, ServerError, TlsCertificate};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::json;

use crate::client::{Answer, Running, chat, request};
use crate::hostile::endless;

/// A certificate for `localhost` that signs itself, and its key, as PEM.
fn write_certificate(folder: &Path, name: &str) -> (TlsCertificate, String) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let (certificate, key) = (folder.join(format!("{name}.pem")), folder.join(format!("{name}.key")));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    (TlsCertificate::read(&certificate, &key).unwrap(), made.cert.pem())
}

/// A connection of a client that trusts one certificate.
fn connect(server: &Running, trusted: &str) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(trusted.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_root_certificates(roots).with_no_client_auth());
    let client = ClientConnection::new(config, ServerName::try_from("localhost").unwrap()).unwrap();
    let stream = server.connect().stream;
    StreamOwned::new(client, stream)
}

fn ask(server: &Running, trusted: &str, text: &str) -> std::io::Result<Answer> {
    let mut stream = connect(server, trusted);
    stream.write_all(text.as_bytes())?;
    let mut answer = String::new();
    // An error here would be a connection that ends without saying so.
    stream.read_to_string(&mut answer)?;
    Ok(Answer::parse(&answer))
}

#[test]
fn answers_are_encrypted_and_limits_hold() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, trusted) = write_certificate(folder.path(), "first");
    let server = Running::start(|config| {
        config.certificate = Some(certificate);
        config.keys = ApiKeys::new(["secret".into()]).unwrap();
        config.client_timeout = Duration::from_secs(2);
    });
    let key = "Authorization: Bearer secret\r\n";
    let mut body = chat("Hello", 8);
    let whole =
        ask(&server, &trusted, &request("/v1/chat/completions", key, &body.to_string())).unwrap().ok();
    body["stream"] = true.into();
    let events =
        ask(&server, &trusted, &request("/v1/chat/completions", key, &body.to_string())).unwrap().events();
    let said: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, whole["choices"][0]["message"]["content"]);
    // The checks of origins and keys are those of a server without TLS.
    let page = format!("{key}Origin: https://evil.example\r\n");
    ask(&server, &trusted, &request("/v1/completions", &page, "{}"))
        .unwrap()
        .fails_saying(403, "other sites");
    let own = format!("{key}Origin: https://localhost\r\n");
    ask(&server, &trusted, &request("/v1/completions", &own, "{}")).unwrap().fails(400, "prompt");
    ask(&server, &trusted, &request("/v1/completions", "", "{}")).unwrap().fails_saying(401, "Bearer");
    // A request that does not come in time is refused, as is a handshake.
    let slow = ask(&server, &trusted, "GET /hea").unwrap();
    slow.fails_saying(408, "in time");
    let mut silent = server.connect();
    assert_eq!(silent.read_some(), 0, "the server closes a connection without a handshake");
    let mut plain = server.connect();
    plain.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let mut answer = Vec::new();
    let _ = plain.stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&answer));
}

#[test]
fn a_client_that_does_not_read_loses_its_connection() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, trusted) = write_certificate(folder.path(), "first");
    let server = Running::start(|config| {
        config.certificate = Some(certificate);
        config.engine.admission.most_running = 1;
        config.client_timeout = Duration::from_secs(2);
    });
    let mut silent = connect(&server, &trusted);
    silent.write_all(request("/v1/completions", "", &endless().to_string()).as_bytes()).unwrap();
    let mut some = [0; 64];
    silent.read_exact(&mut some).unwrap();
    // As long as the connection stays, a choice runs and others wait.
    let began = Instant::now();
    let metrics = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let is_idle = |metrics: &str| {
        let names = ["firebox_running_requests", "firebox_waiting_requests"];
        names.iter().all(|name| metrics.contains(&format!("{name}{{model=\"llama\"}} 0\n")))
    };
    while !is_idle(&ask(&server, &trusted, metrics).unwrap().text(200)) {
        assert!(began.elapsed() < Duration::from_secs(60), "the request still runs");
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut rest = Vec::new();
    let _ = silent.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
}

#[test]
fn a_certificate_changes_while_connections_are_open() {
    let folder = tempfile::tempdir().unwrap();
    let (first, trusted) = write_certificate(folder.path(), "first");
    let (second, renewed) = write_certificate(folder.path(), "second");
    let server = Running::start(|config| config.certificate = Some(first));
    let get = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let mut open = connect(&server, &trusted);
    open.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut some = [0; 16];
    open.read_exact(&mut some).unwrap();
    server.credentials.replace(Credentials { keys: ApiKeys::default(), certificate: Some(second) });
    assert!(ask(&server, &trusted, get).is_err(), "the old certificate is gone");
    assert_eq!(ask(&server, &renewed, get).unwrap().ok(), json!({"status": "ok"}));
    open.write_all(get.as_bytes()).unwrap();
    let mut rest = String::new();
    open.read_to_string(&mut rest).unwrap();
    assert_eq!(rest.matches("HTTP/1.1 200").count(), 1, "{rest}");
    // Without a new one, the certificate stays.
    server.credentials.replace(Credentials::default());
    ask(&server, &renewed, get).unwrap().ok();
}

#[test]
fn unusable_certificates_are_named() {
    let folder = tempfile::tempdir().unwrap();
    write_certificate(folder.path(), "one");
    write_certificate(folder.path(), "other");
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("empty.pem"), "").unwrap();
    for (certificate, key, named) in [
        ("none.pem", "one.key", "none.pem"),
        ("one.pem", "none.key", "none.key"),
        ("empty.pem", "one.key", "empty.pem"),
        ("one.pem", "empty.pem", "empty.pem"),
        ("one.pem", "other.key", "one.pem"),
    ] {
        let error = TlsCertificate::read(&at(certificate), &at(key)).unwrap_err();
        assert!(matches!(&error, ServerError::Tls { path, .. } if path.ends_with(named)), "{error}");
        assert!(error.to_string().contains("PEM"), "{error}");
    }
}
