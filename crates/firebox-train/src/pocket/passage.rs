//! Conversations as the model reads them.

use std::ops::Range;

use firebox_text::Tokenizer;

use super::{Conversation, Kind, Line, Role, Task};
use crate::error::TrainError;

/// A conversation in tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passage {
    /// The head it is for.
    pub task: Task,
    /// The tokens of the passage.
    pub tokens: Vec<u32>,
    /// The answers that are targets of training.
    pub answers: Vec<Answer>,
}

/// An answer that is a target of training.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The kind of request that it answers.
    pub kind: Kind,
    /// Its tokens, the one that ends it included.
    pub tokens: Range<usize>,
}

/// Writes conversations down in a model's tokens, as its chat template does.
#[derive(Debug, Clone)]
pub struct Scribe {
    tokenizer: Tokenizer,
    roles: [u32; 3],
    end: u32,
}

impl Scribe {
    /// For a tokenizer that has the pieces of the pocket model's template.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, TrainError> {
        let piece = |text: &str| {
            tokenizer.token_to_id(text).ok_or_else(|| TrainError::NoData {
                what: "the tokenizer".into(),
                reason: format!("it has no piece {text}; take one that was made for the pocket model"),
            })
        };
        Ok(Self {
            roles: [piece("<|system|>")?, piece("<|user|>")?, piece("<|assistant|>")?],
            end: piece("<|end|>")?,
            tokenizer: tokenizer.clone(),
        })
    }

    /// The piece that ends an answer.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// One message in tokens.
    pub fn line(&self, line: &Line) -> Result<Vec<u32>, TrainError> {
        let mut tokens = vec![self.roles[line.role as usize]];
        tokens.extend(self.tokenizer.encode_literal(&line.content, false)?);
        tokens.push(self.end);
        Ok(tokens)
    }

    /// A conversation in tokens.
    pub fn write(&self, conversation: &Conversation) -> Result<Passage, TrainError> {
        let mut tokens = Vec::new();
        let mut answers = Vec::new();
        let mut kinds = conversation.kinds.iter();
        for line in &conversation.messages {
            // Behind the piece that says who speaks.
            let begin = tokens.len() + 1;
            tokens.extend(self.line(line)?);
            if line.role == Role::Assistant && line.weight != Some(0) {
                let Some(&kind) = kinds.next() else {
                    let reason = "a conversation has more answers than kinds".into();
                    return Err(TrainError::NoData { what: line.content.clone(), reason });
                };
                answers.push(Answer { kind, tokens: begin..tokens.len() });
            }
        }
        Ok(Passage { task: conversation.task, tokens, answers })
    }
}

impl Passage {
    /// Returns the weight of each token in the loss; tokens outside the learned answers have the weight `prompt`. The weight of
    /// the first token is 0, since no token comes before it.
    pub fn weights(&self, prompt: f32) -> Vec<f32> {
        let mut weights = vec![prompt; self.tokens.len()];
        for answer in &self.answers {
            weights[answer.tokens.clone()].fill(1.0);
        }
        if let Some(first) = weights.first_mut() {
            *first = 0.0;
        }
        weights
    }
}
