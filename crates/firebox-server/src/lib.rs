//! Serves models over HTTP with OpenAI's API.
//!
//! | path | what |
//! |---|---|
//! | `POST /v1/chat/completions` | answers in a conversation, whole or streamed |
//! | `POST /v1/responses` | OpenAI's newer form of it |
//! | `POST /v1/completions` | continues texts |
//! | `POST /v1/embeddings` | embeds texts |
//! | `POST /v1/rerank` | ranks documents by relevance to a query |
//! | `GET /v1/models` | lists models, and their heads as `model:head` |
//! | `/v1/sessions` | persistent conversations with control of their memory: turns, facts, branches, files |
//! | `/v1/heads` | the heads of models and their state |
//! | `GET /v1/engine`, `GET /v1/engine/events` | running and waiting requests and the use of memory, once or continuously |
//! | `GET /` | the console, a page that shows all of this; needs no key |
//! | `POST /tokenize`, `POST /detokenize` | text to tokens and back |
//! | `GET /metrics` | metrics for Prometheus |
//! | `GET /health`, `GET /ready` | liveness and readiness; need no key |
//! | `GET /openapi.json` | the API as an OpenAPI document; needs no key |
//!
//! A [`Server`] has one engine that batches all requests. Requests of a client that disconnects are cancelled, and a client
//! that reads too slowly is disconnected. Prefix caches and sessions of different keys are separate. [`EmbeddedServer`] is
//! the same API within another axum program.

mod allowed_origins;
mod answer_grammar;
mod answer_parser;
mod api_keys;
mod app;
mod background_work;
mod blocking;
mod body_memory;
mod catalog;
mod chat;
mod choices;
mod client_slots;
mod completion_format;
mod completions;
mod connection;
mod console;
mod conversation_request;
mod credentials;
mod deadline;
mod embedded_server;
mod embedding_body;
mod embeddings;
mod engine_state;
mod engine_watchers;
mod error;
mod extract;
mod heads;
mod health;
mod ids;
mod json_fields;
mod json_limits;
mod key_share;
mod logprobs;
mod metrics;
mod middleware;
mod model_routing;
mod model_spec;
mod models;
mod openapi;
mod pipeline;
mod prompt_length;
mod request_fields;
mod response_meta;
mod responses;
mod router;
mod sampling_params;
#[cfg(test)]
mod schema;
mod served_model;
mod server;
mod server_config;
mod sessions;
mod sse;
mod stop_handle;
mod text_vectors;
mod tls;
mod tokens;
mod tools;

pub use allowed_origins::AllowedOrigins;
pub use api_keys::{ApiKey, ApiKeys};
pub use credentials::{CredentialSource, CredentialStore, Credentials};
pub use embedded_server::EmbeddedServer;
pub use error::ServerError;
pub use key_share::KeyShare;
pub use model_spec::ModelSpec;
pub use pipeline::PipelineSpec;
pub use server::Server;
pub use server_config::ServerConfig;
pub use sessions::registry::SessionsConfig;
pub use stop_handle::StopHandle;
pub use tls::TlsCertificate;
