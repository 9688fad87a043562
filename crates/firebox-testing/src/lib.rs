//! Helpers of tests, fuzzing and benchmarks of several crates. Never published.

#[cfg(feature = "text")]
pub mod calls;
#[cfg(feature = "text")]
pub mod chat_template;
pub mod control_group;
pub mod gbnf;
pub mod grammar;
#[cfg(feature = "heads")]
pub mod heads;
#[cfg(feature = "http")]
pub mod http_body;
pub mod model;
