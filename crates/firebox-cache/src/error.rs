//! Errors of the cache.

use crate::TurnId;

/// An error of a sequence's cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// All pages of the pool are in use.
    #[error("all {pages} pages of the pool are in use; end a session or a branch, or make the pool larger")]
    PoolExhausted {
        /// The number of pages.
        pages: usize,
    },
    /// The turn does not fit, and turns are not split.
    #[error(
        "a turn of {tokens} tokens does not fit into the {room} that {capacity} leave beside pinned turns; shorten \
         it, unpin a turn or raise the capacity"
    )]
    TurnTooLong {
        /// The length of the turn.
        tokens: usize,
        /// The most tokens that eviction can make available for it.
        room: usize,
        /// The most tokens of all turns together.
        capacity: usize,
    },
    /// The facts do not fit into the persistent stream.
    #[error(
        "{tokens} tokens of facts do not fit into a persistent stream of {capacity}; supersede some, or raise its cap"
    )]
    FactsFull {
        /// The number of tokens of all facts.
        tokens: usize,
        /// The most tokens that facts may have.
        capacity: usize,
    },
    /// The cache holds no such turn.
    #[error("turn {} is not in the cache; it may have been evicted", turn.0)]
    NoSuchTurn {
        /// The requested turn.
        turn: TurnId,
    },
    /// The data was made for another model or another kind of cache.
    #[error("made for another model or another kind of cache: {reason}")]
    Mismatch {
        /// The difference.
        reason: String,
    },
}
