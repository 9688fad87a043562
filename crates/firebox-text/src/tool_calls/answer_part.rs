//! The parts of a model's answer.

use crate::message::FunctionCall;

/// A part of a model's answer: of its thoughts, of its text, or of a tool call.
#[derive(Debug, Clone, PartialEq)]
pub enum AnswerPart {
    /// Thoughts.
    Thought(String),
    /// Text.
    Text(String),
    /// The beginning of a call of this tool.
    CallStart(String),
    /// The next part of the current call's arguments. All parts together are one JSON text.
    Arguments(String),
    /// The end of the current call: the whole call, with its arguments as a JSON text.
    Call(FunctionCall),
}
