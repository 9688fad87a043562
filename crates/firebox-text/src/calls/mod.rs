//! Calls of tools in what a model says. Every family of models writes them in a way of its own.

mod json;
mod markup;
mod reader;
mod syntax;
#[cfg(test)]
mod tests;
mod tools;
mod words;

pub use reader::{AnswerPart, CallReader};
pub use syntax::CallSyntax;
pub use words::tools_in_words;
