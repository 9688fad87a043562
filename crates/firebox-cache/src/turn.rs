//! Turns: groups of consecutive tokens that are evicted, hidden and pinned as a whole.

use std::time::SystemTime;

/// The id of a turn, unique within its sequence and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TurnId(pub u64);

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The system prompt.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// The stream that a turn's tokens belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TurnKind {
    /// Part of the conversation: evicted when room is needed.
    Turn,
    /// A persistent fact: never evicted, only superseded.
    Fact,
}

/// The reason why a turn is hidden.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HiddenReason {
    /// It is not relevant to the current topic; it may be shown again.
    Irrelevant,
    /// Another fact has replaced it.
    Superseded,
}

/// Consecutive tokens that are kept or evicted together.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// The turn's id.
    pub id: TurnId,
    /// The stream it belongs to.
    pub kind: TurnKind,
    /// The number of its tokens in the cache.
    pub tokens: usize,
    /// The authors of its messages, in order.
    pub roles: Vec<Role>,
    /// The time it began.
    pub began: SystemTime,
    /// The relevance to the current topic, as last scored.
    pub relevance: f32,
    /// Whether it is exempt from eviction.
    pub pinned: bool,
    /// The reason why later tokens do not attend to it, if it is hidden.
    pub hidden: Option<HiddenReason>,
}

impl Turn {
    pub(crate) fn new(id: TurnId, kind: TurnKind, roles: Vec<Role>) -> Self {
        Self {
            id,
            kind,
            tokens: 0,
            roles,
            began: SystemTime::now(),
            relevance: 1.0,
            pinned: false,
            hidden: None,
        }
    }
}
