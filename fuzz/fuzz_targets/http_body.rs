//! Any body at any route of the server, without a socket.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use axum::Router;
use firebox_runtime::{Model, device};
use firebox_server::{EmbeddedServer, ServerConfig};
use tokio::runtime::{Builder, Runtime};

static SERVER: LazyLock<(Router, Runtime)> = LazyLock::new(|| {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gguf/llama/model.gguf");
    let model = Model::open(fixture, &device("cpu").expect("every build has it")).expect("a fixture");
    let config = ServerConfig { request_timeout: Some(Duration::from_secs(20)), ..ServerConfig::default() };
    let program = EmbeddedServer::new(config, vec![("small".into(), model)]).expect("an engine").router();
    (program, Builder::new_current_thread().enable_all().build().expect("a runtime"))
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let (program, runtime) = &*SERVER;
    firebox_testing::checks::http_body::check(program, runtime, input);
});
