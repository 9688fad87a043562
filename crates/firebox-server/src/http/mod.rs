//! HTTP/1.1 over tokio, as far as an API needs it: bodies of limited size, answers that stream, and an eye on clients
//! that are slow or gone.
//!
//! It is not hyper, because hyper and axum turn on features of `futures-core` that Burn is built without, and that would
//! build Burn anew. Nothing beyond this folder knows how requests come.

mod connection;
mod request;
mod response;

pub(crate) use connection::{Limits, serve};
pub(crate) use request::{Method, Request};
pub(crate) use response::{Chunks, Response, Status};
