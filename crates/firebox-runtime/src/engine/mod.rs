//! Many requests at once: on one model together, and on several models in turn.

mod clock;
mod event;
mod lane;
mod rhythm;
mod sequence;
#[cfg(test)]
mod tests;

pub use clock::{Clock, WallClock};
pub use event::{Event, Outcome};
pub use sequence::RequestId;
