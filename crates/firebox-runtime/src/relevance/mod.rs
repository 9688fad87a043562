//! How much the earlier turns of a conversation have to do with what was just said.
//!
//! A [`RelevanceScorer`] gives every turn a number on a scale that all scorers share: from [`RELEVANT`] on a turn counts
//! as relevant, and what lies behind that number was [fitted](Calibration) for the scorer at hand.

mod calibration;
mod encoder;
mod examples;
mod own_states;
mod similarity;

use std::fmt::Debug;

pub use calibration::Calibration;
pub use encoder::SentenceEncoder;
pub use own_states::OwnStates;
pub use similarity::{LabelledPair, Similarity};

use crate::RuntimeError;

/// The score from which on a turn counts as relevant.
pub const RELEVANT: f32 = 0.6;

/// What was said in a turn: words only, without the markers of a chat template, which all turns have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TurnContent<'a> {
    /// As text, for scorers with a vocabulary of their own.
    pub text: &'a str,
    /// As tokens of the model that leads the conversation, for scorers that share its vocabulary.
    pub tokens: &'a [u32],
}

/// A turn that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlierTurn<'a> {
    /// Always of this content: a turn that changed needs another, or has to be [forgotten](RelevanceScorer::forget).
    pub id: u64,
    /// May be empty where the scorer [knows](RelevanceScorer::knows) the turn.
    pub content: TurnContent<'a>,
}

/// Says how much turns have to do with each other.
pub trait RelevanceScorer: Debug + Send {
    /// How relevant each of the earlier turns is to the newest message, from 0 to 1.
    ///
    /// An earlier turn is read the first time it is scored, the newest message every time.
    fn score(
        &mut self,
        newest: TurnContent<'_>,
        earlier: &[EarlierTurn<'_>],
    ) -> Result<Vec<f32>, RuntimeError>;

    /// The score from which on a turn counts as relevant.
    fn threshold(&self) -> f32 {
        RELEVANT
    }

    /// Whether a turn was read already.
    fn knows(&self, id: u64) -> bool;

    /// Lets go of what is kept of a turn, as of one that was evicted.
    fn forget(&mut self, id: u64);
}

/// Turns what was said into a vector whose direction says what it is about.
pub trait TurnEncoder: Debug + Send {
    /// A vector of any length, always of as many elements; empty where nothing was said.
    fn encode(&mut self, content: TurnContent<'_>) -> Result<Vec<f32>, RuntimeError>;

    /// Whether vectors share much that says nothing about their text and has to be taken off before their directions
    /// mean anything. Those of language models do; those of an encoder that was trained to have unrelated texts point
    /// in unrelated directions do not.
    fn has_background(&self) -> bool {
        true
    }
}
