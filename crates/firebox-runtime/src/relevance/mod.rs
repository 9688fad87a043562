//! Scores how relevant earlier turns of a conversation are to the newest message.
//!
//! All [`RelevanceScorer`]s use one scale: a turn is relevant if its score is [`RELEVANT`] or more. A [`Calibration`]
//! is fitted for each scorer to reach that.

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

/// The least score of a relevant turn.
pub const RELEVANT: f32 = 0.6;

/// The words of a turn, without the markers of a chat template, which all turns share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TurnContent<'a> {
    /// The text, for scorers with their own vocabulary.
    pub text: &'a str,
    /// The tokens of the conversation's model, for scorers that share its vocabulary.
    pub tokens: &'a [u32],
}

/// A turn before the newest message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlierTurn<'a> {
    /// Its id. A turn whose content changed needs another id, or has to be [forgotten](RelevanceScorer::forget).
    pub id: u64,
    /// May be empty if the scorer [knows](RelevanceScorer::knows) the turn.
    pub content: TurnContent<'a>,
}

/// Scores the relevance of turns.
pub trait RelevanceScorer: Debug + Send {
    /// Scores how relevant each of the earlier turns is to the newest message, from 0 to 1.
    ///
    /// An earlier turn is encoded when it is scored first, the newest message every time.
    fn score(
        &mut self,
        newest: TurnContent<'_>,
        earlier: &[EarlierTurn<'_>],
    ) -> Result<Vec<f32>, RuntimeError>;

    /// The score from which on a turn counts as relevant.
    fn threshold(&self) -> f32 {
        RELEVANT
    }

    /// Returns whether a turn was scored before.
    fn knows(&self, id: u64) -> bool;

    /// Removes what is stored of a turn, for example after its eviction.
    fn forget(&mut self, id: u64);
}

/// Encodes a turn as a vector whose direction is its topic.
pub trait TurnEncoder: Debug + Send {
    /// Returns a vector, always with as many elements, or an empty one for an empty turn.
    fn encode(&mut self, content: TurnContent<'_>) -> Result<Vec<f32>, RuntimeError>;

    /// Returns whether vectors have a common part that is independent of the text and has to be removed first.
    /// Vectors of language models have; those of encoders that were trained to give unrelated texts unrelated
    /// directions do not.
    fn has_background(&self) -> bool {
        true
    }
}
