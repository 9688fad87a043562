//! Events that an engine sends about a request.

use std::sync::Arc;
use std::time::Duration;

use firebox_runtime::{Finish, Piece, Session, Summary, TextVector};

use crate::error::EngineError;

/// An event of a request. The last one is [`Finished`](Self::Finished), [`Embedded`](Self::Embedded) or
/// [`Failed`](Self::Failed).
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// The request waits in the queue.
    Waiting {
        /// How many requests come before it.
        place: usize,
    },
    /// A token, or text that was held back.
    Piece(Piece),
    /// Vectors of texts, in order.
    Vectors(Vec<TextVector>),
    /// The request has ended.
    Finished(Box<Outcome>),
    /// A request for vectors has ended.
    Embedded(EmbeddingSummary),
    /// The request has failed.
    Failed(Box<Failure>),
}

impl Event {
    /// Returns whether no event follows.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Finished(_) | Self::Embedded(_) | Self::Failed(_))
    }
}

/// The result of a request that ended.
#[derive(Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// Its text, tokens and timings.
    pub summary: Summary,
    /// Tokens of the prompt that the prefix cache supplied.
    pub cached_tokens: usize,
    /// How long it waited in the queue.
    pub waited: Duration,
    /// The session, which includes the answer and can go on.
    pub session: Session,
}

/// How a request for vectors ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EmbeddingSummary {
    /// Whether all vectors were returned or the request was cancelled.
    pub finish: Finish,
    /// How long it waited in the queue.
    pub waited: Duration,
}

/// The error of a request that failed, and its session.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The error.
    pub error: EngineError,
    /// The session as far as it got, if it still exists.
    pub session: Option<Box<Session>>,
}

impl Failure {
    /// Returns the last event of each of `count` choices of one request. The first has the session.
    pub(crate) fn of_choices(self: Box<Self>, count: usize) -> Vec<Event> {
        if count == 1 {
            return vec![Event::Failed(self)];
        }
        let Self { error, mut session } = *self;
        let source = Arc::new(error);
        let of_choice = |_| {
            let error = EngineError::Together { source: source.clone() };
            Event::Failed(Box::new(Self { error, session: session.take() }))
        };
        (0..count).map(of_choice).collect()
    }
}

impl From<EngineError> for Box<Failure> {
    fn from(error: EngineError) -> Self {
        Self::new(Failure { error, session: None })
    }
}
