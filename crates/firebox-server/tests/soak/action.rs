//! The actions in a session, in order.

/// An answer as the client received it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    pub text: String,
    pub tokens: usize,
}

#[derive(Debug, Clone)]
pub enum Action {
    Said {
        text: String,
        /// The requested length, or the actual one if the client disconnected.
        most: usize,
        /// Ignores end tokens.
        ignores_end: bool,
        heard: Answered,
    },
    /// `None` selects the model's own head.
    SetHead(Option<String>),
    /// Before a turn, or at the end.
    Forked(Option<u64>),
    Switched(u64),
    Promoted(u64),
    Dropped(u64),
    Rewound(u64),
    Pinned(u64, bool),
    Hidden(u64, bool),
    BranchState(String),
    Superseded(u64, String),
    /// Saved and restored, by this server or the next.
    Restored,
}

/// How a session began.
#[derive(Debug, Clone)]
pub struct Beginning {
    pub model: &'static str,
    pub system: Option<String>,
    pub facts: Vec<String>,
    pub head: Option<String>,
    /// As the server reported it.
    pub turn_tokens: usize,
    pub fact_tokens: usize,
}
