use std::time::SystemTime;

/// Which turn of a sequence. Never used again for another one of the same sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TurnId(pub u64);

/// Who speaks in a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Whoever set the model up.
    System,
    /// Whoever asks.
    User,
    /// The model.
    Assistant,
    /// What a call has returned.
    Tool,
}

/// Which stream a turn's tokens belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TurnKind {
    /// Part of the conversation: evicted when room is needed.
    Turn,
    /// Part of what is always there: only superseded.
    Fact,
}

/// Why a turn is not seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hidden {
    /// It has little to do with what is talked about now; it may come back.
    Irrelevant,
    /// Another fact has taken its place.
    Superseded,
}

/// Consecutive tokens that are remembered or forgotten together.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// Which one.
    pub id: TurnId,
    /// The stream it belongs to.
    pub kind: TurnKind,
    /// How many tokens of it are remembered.
    pub tokens: usize,
    /// Who speaks, in order.
    pub roles: Vec<Role>,
    /// When it began.
    pub began: SystemTime,
    /// How much it has to do with what is talked about, as last judged.
    pub relevance: f32,
    /// Whether it stays when room is needed.
    pub pinned: bool,
    /// Why later tokens do not see it, if they do not.
    pub hidden: Option<Hidden>,
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
