//! The events that an engine emits for a request.

use std::time::Duration;

use crate::{Piece, RuntimeError, Session, Summary};

/// What an engine says of a request, in order. The last is [`Finished`](Self::Finished) or [`Failed`](Self::Failed).
#[derive(Debug)]
pub enum Event {
    /// It waits, with so many before it.
    Waiting {
        /// How many come first.
        place: usize,
    },
    /// A token, or text that was held back.
    Piece(Piece),
    /// The end.
    Finished(Box<Outcome>),
    /// The end of a request that could not go on.
    Failed(Box<Failure>),
}

impl Event {
    /// Whether nothing comes after it.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Finished(_) | Self::Failed(_))
    }
}

/// What a request came to.
#[derive(Debug)]
pub struct Outcome {
    /// Its text, tokens and times.
    pub summary: Summary,
    /// Tokens of the prompt that were remembered from another request.
    pub cached_tokens: usize,
    /// How long it waited until it ran.
    pub waited: Duration,
    /// The session, answer included, for what comes next.
    pub session: Session,
}

/// Why a request could not go on, and what is left of it.
#[derive(Debug)]
pub struct Failure {
    /// Why.
    pub error: RuntimeError,
    /// The session as far as it came, if it is there still.
    pub session: Option<Box<Session>>,
}

impl From<RuntimeError> for Box<Failure> {
    fn from(error: RuntimeError) -> Self {
        Self::new(Failure { error, session: None })
    }
}
