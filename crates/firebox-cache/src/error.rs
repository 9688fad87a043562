use crate::TurnId;

/// Why a sequence could not remember more, or not what was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// All pages of the pool are taken.
    #[error("all {pages} pages of the pool are in use; end a session or a branch, or make the pool larger")]
    PoolExhausted {
        /// How many there are.
        pages: usize,
    },
    /// A turn cannot be cut, and there is no room for all of it.
    #[error(
        "a turn of {tokens} tokens does not fit into the {room} that {capacity} leave beside pinned turns; shorten \
         it, unpin a turn or raise the capacity"
    )]
    TurnTooLong {
        /// How long it would be.
        tokens: usize,
        /// What could be made free for it.
        room: usize,
        /// Tokens that turns may have together.
        capacity: usize,
    },
    /// The persistent stream has no room.
    #[error(
        "{tokens} tokens of facts do not fit into a persistent stream of {capacity}; supersede some, or raise its cap"
    )]
    FactsFull {
        /// How many there would be.
        tokens: usize,
        /// How many there may be.
        capacity: usize,
    },
    /// No such turn is remembered.
    #[error("turn {} is not remembered, or not any more", turn.0)]
    NoSuchTurn {
        /// What was asked for.
        turn: TurnId,
    },
    /// Something that was made for another model.
    #[error("made for another model or another kind of cache: {reason}")]
    Mismatch {
        /// What differs.
        reason: String,
    },
}
