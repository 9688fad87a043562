//! Continuous batching of requests on one model and time slicing between several models.
//!
//! A [`EngineCore`] holds the models and their requests and runs one layer at a time. An [`Engine`] runs a core on a thread
//! of its own and delivers events as streams.

mod batch;
mod clock;
mod engine_core;
mod event;
mod lazy_model;
mod loaded_model;
mod pipeline;
mod prefetcher;
mod prefill_chunks;
mod prefill_pacer;
mod request;
mod request_setup;
mod sequence;
mod shield;
#[cfg(test)]
mod tests;
mod thread;

pub use clock::{Clock, WallClock};
pub use engine_core::{EngineConfig, EngineCore, StepOutcome};
pub use event::{Event, Failure, Outcome};
pub use loaded_model::RequestStatus;
pub use pipeline::{Asked, Piped, Pipeline, Prompting, Router, Stage};
pub use request::Request;
pub use sequence::RequestId;
pub use thread::{Engine, ResponseStream};
