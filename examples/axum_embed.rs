//! What `firebox serve` answers, inside another axum program: beside its own routes, on its own listener.
//!
//! `cargo run --release --example axum_embed`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use firebox::{Model, device};
use firebox_server::{EmbeddedServer, ServerConfig};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let model = Model::open("assets/pocket", &device("cpu")?)?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    // The address tells it that only this machine listens; whom a key is asked of is said here too.
    let config = ServerConfig { address, ..ServerConfig::default() };
    let firebox = EmbeddedServer::new(config, vec![("pocket".into(), model)])?;

    let program = Router::new().route("/greeting", get(|| async { "Hello from the program." }));
    let program = program.merge(firebox.router());
    let (leave, left) = oneshot::channel::<()>();
    let serving = axum::serve(listener, program).with_graceful_shutdown(async {
        let _ = left.await;
    });
    let serving = tokio::spawn(serving.into_future());

    tokio::task::spawn_blocking(move || visit(address)).await??;

    // Streams that would go on for ever end first.
    firebox.stop().stop();
    let _ = leave.send(());
    serving.await??;
    println!("the program has ended");
    Ok(())
}

/// What a client of either sees.
fn visit(address: SocketAddr) -> Result<(), Failure> {
    println!("{}", ureq::get(format!("http://{address}/greeting")).call()?.body_mut().read_to_string()?);
    let question = json!({
        "model": "pocket",
        "messages": [{ "role": "user", "content": "Who are you?" }],
        "max_tokens": 24,
    });
    let mut response = ureq::post(format!("http://{address}/v1/chat/completions"))
        .content_type("application/json")
        .send(question.to_string())?;
    let answer: Value = serde_json::from_str(&response.body_mut().read_to_string()?)?;
    println!("{}", answer["choices"][0]["message"]["content"].as_str().unwrap_or_default());
    Ok(())
}
