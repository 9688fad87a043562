//! Calls of tools in what a model says. Every family of models writes them in a way of its own.

mod channels;
mod head;
mod json;
mod marked;
mod markup;
mod reader;
mod said;
mod syntax;
#[cfg(test)]
mod tests;
mod tools;
mod words;

pub(crate) use channels::parted_thoughts;
pub use markup::can_be_called;
pub use reader::{AnswerPart, CallReader};
pub use syntax::CallSyntax;
pub(crate) use words::{tools_in_system, tools_in_words};
