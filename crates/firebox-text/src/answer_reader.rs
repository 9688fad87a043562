//! The reader of answers: thoughts, text and tool calls.

use crate::thoughts::ThoughtReader;
use crate::tokenizer::Tokenizer;
use crate::tool_calls::{AnswerPart, CallReader};

/// Divides an answer into thoughts, text and tool calls, as it arrives. [`ChatTemplate::answer_reader`] makes one for a model.
///
/// [`ChatTemplate::answer_reader`]: crate::ChatTemplate::answer_reader
#[derive(Debug, Clone, Default)]
pub struct AnswerReader {
    thoughts: Option<ThoughtReader>,
    calls: Option<CallReader>,
}

impl AnswerReader {
    /// A reader that takes out thoughts and calls if it is given readers of them; everything else is text.
    pub fn new(thoughts: Option<ThoughtReader>, calls: Option<CallReader>) -> Self {
        Self { thoughts, calls }
    }

    /// Takes thoughts for text, as in an answer that follows a grammar from its first token. Channels are read as before.
    #[must_use]
    pub fn without_thoughts(mut self) -> Self {
        self.thoughts = None;
        self
    }

    /// Returns whether the answer goes on with thoughts.
    pub fn is_thinking(&self) -> bool {
        self.thoughts.as_ref().is_some_and(ThoughtReader::is_thinking)
            || self.calls.as_ref().is_some_and(CallReader::is_thinking)
    }

    /// Adds the text of a token, and returns the parts that are certain now. Where the token is a mark of thoughts or calls that
    /// is absent from its text, the mark is restored.
    pub fn push_token(&mut self, text: &str, token: Option<u32>, tokenizer: &Tokenizer) -> Vec<AnswerPart> {
        let mut parts = self.push(text);
        if let Some(token) = token
            && tokenizer.is_special(token)
            && let Some(name) = tokenizer.id_to_token(token)
            && self.is_mark(name)
        {
            // The text precedes the control token.
            parts.extend(self.push(name));
        }
        parts
    }

    /// Adds a piece of text, and returns the parts that are certain now.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        let (thought, text) = match &mut self.thoughts {
            Some(reader) => reader.push(piece),
            None => (String::new(), piece.to_owned()),
        };
        self.parts(thought, &text)
    }

    /// Ends the answer: returns what was held back.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let (thought, text) = self.thoughts.as_mut().map(ThoughtReader::finish).unwrap_or_default();
        let mut parts = self.parts(thought, &text);
        parts.extend(self.calls.as_mut().map(CallReader::finish).unwrap_or_default());
        parts
    }

    fn parts(&mut self, thought: String, text: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        if !thought.is_empty() {
            parts.push(AnswerPart::Thought(thought));
        }
        match &mut self.calls {
            _ if text.is_empty() => {}
            Some(reader) => parts.extend(reader.push(text)),
            None => parts.push(AnswerPart::Text(text.to_owned())),
        }
        parts
    }

    fn is_mark(&self, token: &str) -> bool {
        let thoughts = self.thoughts.as_ref().map(|reader| reader.marks().control_tokens());
        let calls = self.calls.as_ref().map(|reader| reader.syntax().control_tokens());
        thoughts.is_some_and(|marks| marks.contains(&token))
            || calls.is_some_and(|marks| marks.contains(&token))
    }
}
