//! Checks of one input each, for tests of the corpora and for fuzzing: they panic where a promise is broken.

#[cfg(feature = "text")]
pub mod chat_template;
pub mod gbnf;
#[cfg(feature = "http")]
pub mod http_body;
#[cfg(feature = "text")]
pub mod tool_calls;
