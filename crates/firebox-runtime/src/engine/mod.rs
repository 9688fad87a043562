//! Many requests at once: on one model together, and on several models in turn.
//!
//! A [`Host`] has models and requests and does one layer at a time; an [`Engine`] is a thread around it, from which events
//! come as a stream.

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
