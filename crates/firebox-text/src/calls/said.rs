use serde_json::Value;

use super::reader::AnswerPart;
use crate::message::FunctionCall;

/// What is certain of an answer and was not handed on yet.
#[derive(Debug, Clone, Default)]
pub(super) struct Said {
    parts: Vec<AnswerPart>,
    /// The call that has begun: its tool, and its arguments so far.
    calling: Option<(String, String)>,
}

impl Said {
    /// Hands on what there is.
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

    /// Begins a call.
    pub fn begin(&mut self, tool: &str) {
        self.parts.push(AnswerPart::Calling(tool.to_owned()));
        self.calling = Some((tool.to_owned(), String::new()));
    }

    /// Goes on with the arguments of the call that has begun.
    pub fn arguments(&mut self, piece: &str) {
        let Some((_, arguments)) = &mut self.calling else { return };
        arguments.push_str(piece);
        match self.parts.last_mut() {
            _ if piece.is_empty() => {}
            Some(AnswerPart::Arguments(before)) => before.push_str(piece),
            _ => self.parts.push(AnswerPart::Arguments(piece.to_owned())),
        }
    }

    /// Ends the call that has begun, if one has.
    pub fn end(&mut self) {
        let Some((name, arguments)) = self.calling.take() else { return };
        self.parts.push(AnswerPart::Call(FunctionCall { name, arguments: Value::String(arguments) }));
    }

    /// A call that came at once.
    pub fn call(&mut self, call: &FunctionCall) {
        self.begin(&call.name);
        self.arguments(call.arguments.as_str().unwrap_or("{}"));
        self.end();
    }
}
