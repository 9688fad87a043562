//! What was done in a session, in the order in which it was done.

/// An answer as its client was told it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heard {
    pub text: String,
    pub tokens: usize,
}

#[derive(Debug, Clone)]
pub enum Deed {
    Said {
        text: String,
        /// As many tokens as were asked for, or as many as there were when the answer was ended because the client had left.
        most: usize,
        /// Whether it goes on behind a token that would end it.
        ignores_end: bool,
        heard: Heard,
    },
    /// Nothing names the model's own head.
    Wore(Option<String>),
    /// Before a turn, or where it is.
    Forked(Option<u64>),
    Switched(u64),
    Promoted(u64),
    Dropped(u64),
    Rewound(u64),
    Pinned(u64, bool),
    Hidden(u64, bool),
    Told(String),
    Superseded(u64, String),
    /// Written to a file and begun from it again, by this server or the next.
    Restored,
}

/// What a session was begun with.
#[derive(Debug, Clone)]
pub struct Beginning {
    pub model: &'static str,
    pub system: Option<String>,
    pub facts: Vec<String>,
    pub head: Option<String>,
    /// As the server says.
    pub turn_tokens: usize,
    pub fact_tokens: usize,
}
