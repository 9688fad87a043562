//! Schemas of `/v1/sessions` and `/v1/heads` for the OpenAPI document. Handlers read requests field by field,
//! so that errors name the field.

#![expect(dead_code, reason = "nothing but descriptions is made of these")]

use utoipa::ToSchema;

/// The sessions of a key.
#[derive(ToSchema)]
pub(crate) struct SessionList {
    object: String,
    data: Vec<Session>,
    /// Names of saved sessions.
    saved: Vec<String>,
}

/// Options of a new session, or the saved session to restore.
#[derive(ToSchema)]
pub(crate) struct NewSession {
    /// A model, or `model:head`; required if there are several models.
    model: Option<String>,
    /// The system prompt.
    system: Option<String>,
    /// Facts, which are never evicted.
    facts: Option<Vec<String>>,
    /// Capacity for turns, in tokens.
    #[schema(minimum = 16)]
    turn_tokens: Option<u64>,
    /// Capacity for facts, in tokens.
    fact_tokens: Option<u64>,
    /// Hides turns that are irrelevant to a question.
    relevance: Option<bool>,
    /// Name of a saved session. Only `model` may be given with it.
    restore: Option<String>,
}

/// A persistent conversation.
#[derive(ToSchema)]
pub(crate) struct Session {
    id: String,
    object: String,
    created: u64,
    /// An answer is being generated.
    busy: bool,
    model: String,
    /// The head that answers; null for the model's own.
    #[schema(required)]
    head: Option<String>,
    /// The active branch.
    branch: u64,
    tokens: u64,
    turn_tokens: SessionRoom,
    fact_tokens: SessionRoom,
    /// Size of the KV cache.
    cache_bytes: u64,
    relevance: bool,
    /// Absent in lists.
    branches: Option<Vec<SessionBranch>>,
    /// Absent in lists. Includes the newest 256 KiB of evicted turns.
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
    /// The branch it was forked from; null for the first.
    #[schema(required)]
    parent: Option<u64>,
    /// Length of the common prefix with the parent, in tokens.
    from: u64,
    tokens: u64,
    active: bool,
    #[schema(required)]
    head: Option<String>,
    turns: u64,
    /// The last question.
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
    /// First token and end of the turn; null once evicted.
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
    /// The thoughts before it.
    #[schema(required)]
    reasoning_content: Option<String>,
    #[schema(required)]
    head: Option<String>,
    /// `stop`, `length`, or `cancelled` if the client disconnected.
    finish: String,
    tokens: u64,
    ttft_ms: f64,
    tokens_per_second: f64,
}

/// A question. Sampling parameters are as in chats: `max_tokens`, `temperature`, `seed`, `stop`,
/// `response_format` and so on.
#[derive(ToSchema)]
pub(crate) struct SessionQuestion {
    content: String,
    stream: Option<bool>,
    #[schema(minimum = -1, maximum = 4294967295i64)]
    max_tokens: Option<i64>,
    temperature: Option<f64>,
    seed: Option<i64>,
}

/// An answer, and the session after it.
#[derive(ToSchema)]
pub(crate) struct SessionAnswer {
    answer: String,
    /// The thoughts before it.
    #[schema(required)]
    reasoning_content: Option<String>,
    finish_reason: String,
    #[schema(value_type = Object)]
    usage: (),
    ttft_ms: f64,
    tokens_per_second: f64,
    session: Session,
}

/// The turn to fork before; the end of the branch by default.
#[derive(ToSchema)]
pub(crate) struct ForkAt {
    turn: Option<u64>,
}

/// The first turn to remove.
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
    /// False evicts it.
    loaded: Option<bool>,
}
