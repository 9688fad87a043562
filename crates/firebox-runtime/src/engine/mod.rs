//! Continuous batching of requests on one model and time slicing between several models.
//!
//! A [`Host`] holds the models and their requests and runs one layer at a time. An [`Engine`] runs a host on a thread
//! of its own and delivers events as streams.

mod clock;
mod dormant;
mod event;
mod host;
mod hosted;
mod lane;
mod pipeline;
mod portions;
mod preparing;
mod request;
mod rhythm;
mod segments;
mod sequence;
#[cfg(test)]
mod tests;
mod thread;

pub use clock::{Clock, WallClock};
pub use event::{Event, Failure, Outcome};
pub use host::{Host, HostConfig, Worked};
pub use hosted::UnderWay;
pub use pipeline::{Asked, Piped, Pipeline, Prompting, Router, Stage};
pub use request::Request;
pub use sequence::RequestId;
pub use thread::{Answering, Engine};
