//! The shapes of requests and answers, for the OpenAPI document alone: requests are read field by field, so that what is
//! wrong is told by its name.

#![expect(dead_code, reason = "nothing but descriptions is made of these")]

use utoipa::ToSchema;

/// The sessions of a key.
#[derive(ToSchema)]
pub(crate) struct SessionList {
    object: String,
    data: Vec<Session>,
    /// Names of those that were saved.
    saved: Vec<String>,
}

/// What a session is to be, or which one is to go on.
#[derive(ToSchema)]
pub(crate) struct NewSession {
    /// Which model, or `model:head`; needed where there are several.
    model: Option<String>,
    /// What the model is told to be.
    system: Option<String>,
    /// What is never forgotten.
    facts: Option<Vec<String>>,
    /// Tokens of turns that are remembered.
    #[schema(minimum = 16)]
    turn_tokens: Option<u64>,
    /// Tokens of facts that are remembered.
    fact_tokens: Option<u64>,
    /// Whether turns are hidden that have little to do with a question.
    relevance: Option<bool>,
    /// The name of a saved session; nothing else but `model` may stand beside it.
    restore: Option<String>,
}

/// A conversation that stays.
#[derive(ToSchema)]
pub(crate) struct Session {
    id: String,
    object: String,
    created: u64,
    /// Whether an answer is under way.
    busy: bool,
    model: String,
    /// The head that answers; null is the model's own.
    #[schema(required)]
    head: Option<String>,
    /// The branch that goes on.
    branch: u64,
    tokens: u64,
    turn_tokens: SessionRoom,
    fact_tokens: SessionRoom,
    /// What keys and values take.
    cache_bytes: u64,
    relevance: bool,
    /// Not in lists.
    branches: Option<Vec<SessionBranch>>,
    /// Not in lists. What is not remembered any more is told up to 256 KiB, the newest of it.
    turns: Option<Vec<SessionTurn>>,
}

#[derive(ToSchema)]
pub(crate) struct SessionRoom {
    held: u64,
    capacity: u64,
}

#[derive(ToSchema)]
pub(crate) struct SessionBranch {
    id: u64,
    /// The branch it left; null for the first.
    #[schema(required)]
    parent: Option<u64>,
    /// How many of its first tokens are that one's too.
    from: u64,
    tokens: u64,
    active: bool,
    #[schema(required)]
    head: Option<String>,
    turns: u64,
    /// What was asked last.
    #[schema(required)]
    last: Option<String>,
}

#[derive(ToSchema)]
pub(crate) struct SessionTurn {
    id: u64,
    /// `opening`, `fact` or `turn`.
    kind: String,
    text: String,
    #[schema(required)]
    answer: Option<SessionTurnAnswer>,
    tokens: u64,
    /// The first of its tokens, and the one behind the last; null once it was evicted.
    #[schema(required)]
    range: Option<Vec<u64>>,
    roles: Vec<String>,
    #[schema(required)]
    relevance: Option<f64>,
    pinned: bool,
    /// `irrelevant` or `superseded`.
    #[schema(required)]
    hidden: Option<String>,
    evicted: bool,
    #[schema(required)]
    superseded_by: Option<u64>,
    /// Seconds since 1970.
    began: Option<f64>,
}

#[derive(ToSchema)]
pub(crate) struct SessionTurnAnswer {
    text: String,
    #[schema(required)]
    head: Option<String>,
    /// `stop`, `length`, or `cancelled` where it was not heard to its end.
    finish: String,
    tokens: u64,
    ttft_ms: f64,
    tokens_per_second: f64,
}

/// A question. How the answer is chosen may be said as in chats: `max_tokens`, `temperature`, `seed`, `stop`,
/// `response_format` and the like.
#[derive(ToSchema)]
pub(crate) struct SessionQuestion {
    content: String,
    stream: Option<bool>,
    #[schema(minimum = -1, maximum = 4294967295i64)]
    max_tokens: Option<i64>,
    temperature: Option<f64>,
    seed: Option<i64>,
}

/// An answer, and the session it has become part of.
#[derive(ToSchema)]
pub(crate) struct SessionAnswer {
    answer: String,
    finish_reason: String,
    #[schema(value_type = Object)]
    usage: (),
    ttft_ms: f64,
    tokens_per_second: f64,
    session: Session,
}

/// Where to leave the active branch; where it is now, where nothing is said.
#[derive(ToSchema)]
pub(crate) struct ForkAt {
    turn: Option<u64>,
}

/// The turn that is the first to go.
#[derive(ToSchema)]
pub(crate) struct RewindTo {
    turn: u64,
}

#[derive(ToSchema)]
pub(crate) struct WearHead {
    head: Option<String>,
}

#[derive(ToSchema)]
pub(crate) struct MarkTurn {
    pinned: Option<bool>,
    hidden: Option<bool>,
}

#[derive(ToSchema)]
pub(crate) struct FactText {
    text: String,
}

#[derive(ToSchema)]
pub(crate) struct SaveAs {
    /// At most 64 letters, digits, `-`, `_` and `.`.
    #[schema(max_length = 64, pattern = "^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
    name: String,
}

#[derive(ToSchema)]
pub(crate) struct Deleted {
    id: String,
    object: String,
    deleted: bool,
}

/// The heads of all models.
#[derive(ToSchema)]
pub(crate) struct HeadList {
    object: String,
    data: Vec<HeadEntry>,
}

#[derive(ToSchema)]
pub(crate) struct HeadEntry {
    object: String,
    /// `model:head`
    id: String,
    model: String,
    head: String,
    /// `active`, `warm`, `loading`, `on disk` or `failed`.
    state: String,
    /// Why it failed.
    #[schema(required)]
    reason: Option<String>,
    #[schema(required)]
    bytes: Option<u64>,
}

#[derive(ToSchema)]
pub(crate) struct LoadHead {
    model: Option<String>,
    head: String,
    /// False lets it go.
    loaded: Option<bool>,
}
