//! Answers many requests of several models at once.
//!
//! - An [`EngineCore`] holds the open models with their queues and requests. Each call of [`work`](EngineCore::work) runs one layer of
//!   the model that the scheduler chooses.
//! - A batch holds the running sequences of one model, which go through its layers together: decode rows in one pass, chunks of
//!   prompts in another between two decode steps.
//! - An [`Engine`] runs a core on a thread of its own. It takes a [`Request`] and delivers [`Event`]s as a [`ResponseStream`].
//!
//! A panic on that thread fails the requests at hand; the engine then starts again with the same models, or ends: see
//! [`OnFailure`] and [`Engine::health`].
//!
//! A request embeds texts instead if it has an [`Embedding`](firebox_runtime::Embedding): they share the passes of prompts.
//!
//! A [`Pipeline`] lets a router choose which model or head answers. What one sequence needs, its session, decoding loop and
//! residency, is in `firebox-runtime`.

mod batch;
mod clock;
mod decode_share;
mod embedding_queue;
mod embedding_request;
mod engine;
mod engine_core;
mod engine_thread;
mod error;
mod event;
mod heartbeat;
mod in_flight;
mod lazy_model;
mod loaded_model;
mod on_failure;
mod pass_chunks;
mod pipeline;
mod prefetcher;
mod prefill_chunks;
mod prefill_pacer;
mod recent_rows;
mod request;
mod request_setup;
mod request_status;
mod sequence;
mod shield;
#[cfg(test)]
mod tests;

pub use clock::{Clock, WallClock};
pub use engine::{Engine, ResponseStream};
pub use engine_core::{EngineConfig, EngineCore, StepOutcome};
pub use error::EngineError;
pub use event::{EmbeddingSummary, Event, Failure, Outcome};
pub use heartbeat::EngineHealth;
pub use on_failure::OnFailure;
pub use pipeline::{Pipeline, PipelineEvent, PipelineStream, PromptEncoder, Router, Stage};
pub use request::Request;
pub use request_status::RequestStatus;
pub use sequence::RequestId;
