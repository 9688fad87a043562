//! A queue of parts of an answer.

use serde_json::Value;

use super::answer_part::AnswerPart;
use crate::message::FunctionCall;

/// Parts of an answer that were not returned yet.
#[derive(Debug, Clone, Default)]
pub(super) struct PartQueue {
    parts: Vec<AnswerPart>,
    /// The current call: its tool, and its arguments so far.
    calling: Option<(String, String)>,
}

impl PartQueue {
    /// Returns and removes all parts.
    pub fn take(&mut self) -> Vec<AnswerPart> {
        std::mem::take(&mut self.parts)
    }

    pub fn text(&mut self, text: &str) {
        match self.parts.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerPart::Text(before)) => before.push_str(text),
            _ => self.parts.push(AnswerPart::Text(text.to_owned())),
        }
    }

    /// Adds a piece of thoughts.
    pub fn thought(&mut self, piece: &str) {
        match self.parts.last_mut() {
            _ if piece.is_empty() => {}
            Some(AnswerPart::Thought(before)) => before.push_str(piece),
            _ => self.parts.push(AnswerPart::Thought(piece.to_owned())),
        }
    }

    /// Begins a call.
    pub fn begin(&mut self, tool: &str) {
        self.parts.push(AnswerPart::CallStart(tool.to_owned()));
        self.calling = Some((tool.to_owned(), String::new()));
    }

    /// Appends to the arguments of the current call.
    pub fn arguments(&mut self, piece: &str) {
        let Some((_, arguments)) = &mut self.calling else { return };
        arguments.push_str(piece);
        match self.parts.last_mut() {
            _ if piece.is_empty() => {}
            Some(AnswerPart::Arguments(before)) => before.push_str(piece),
            _ => self.parts.push(AnswerPart::Arguments(piece.to_owned())),
        }
    }

    /// Ends the current call, if there is one.
    pub fn end(&mut self) {
        let Some((name, arguments)) = self.calling.take() else { return };
        self.parts.push(AnswerPart::Call(FunctionCall { name, arguments: Value::String(arguments) }));
    }

    /// Adds a complete call.
    pub fn call(&mut self, call: &FunctionCall) {
        self.begin(&call.name);
        self.arguments(call.arguments.as_str().unwrap_or("{}"));
        self.end();
    }
}
