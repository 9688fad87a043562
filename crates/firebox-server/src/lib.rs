//! Serves models over HTTP, in the shape of OpenAI's API.
//!
//! | path | what |
//! |---|---|
//! | `POST /v1/chat/completions` | answers in a conversation, whole or as they come |
//! | `POST /v1/responses` | the same in the newer form of OpenAI's API |
//! | `POST /v1/completions` | texts that are continued |
//! | `POST /v1/embeddings` | texts as vectors |
//! | `POST /v1/rerank` | documents by how well they answer a query |
//! | `GET /v1/models` | models, and their heads as `model:head` |
//! | `/v1/sessions` | conversations that stay, with what is done to their memory: turns, facts, branches, files |
//! | `/v1/heads` | heads of models, and where each is |
//! | `GET /v1/engine`, `GET /v1/engine/events` | what runs, what waits, what is in memory; once, or as it changes |
//! | `GET /` | the console: all of that as a page; without a key |
//! | `POST /tokenize`, `POST /detokenize` | text to tokens and back |
//! | `GET /metrics` | numbers for Prometheus |
//! | `GET /health`, `GET /ready` | whether it runs, and whether it lets requests in; without a key |
//! | `GET /openapi.json` | all of this as an OpenAPI document; without a key |
//!
//! A [`Server`] has an engine that answers all requests together. A client that leaves ends its requests, and one that
//! does not take what it is sent is left. What requests of different keys remember is never shared. [`Embedded`] is the
//! same inside another program.

mod answers;
mod app;
mod asked;
mod catalog;
mod chat;
mod completions;
mod connection;
mod console;
mod deadline;
mod description;
mod embedded;
mod engine_state;
mod error;
mod events;
mod fields;
mod form;
mod gate;
mod heads;
mod health;
mod keys;
mod likelihood;
mod listener;
mod metrics;
mod models;
mod neighbours;
mod offer;
mod responses;
mod schema;
mod served;
mod server;
mod sessions;
mod tokens;
mod tools;
mod turn;
mod vectors;
mod weight;
mod wishes;

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

pub use embedded::Embedded;
pub use error::ServerError;
pub use keys::Keys;
pub use neighbours::Neighbours;
pub use offer::Offer;
pub use server::{Server, ServerConfig, Stop};
pub use sessions::SessionsConfig;

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What no other request is called.
fn unique() -> String {
    // The keys of the standard library's hashes are the random numbers that need no dependency.
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}
