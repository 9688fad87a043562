//! The state of a request, for those who watch an engine.

use crate::sequence::RequestId;

/// A request that is queued or running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestStatus {
    /// The request.
    pub id: RequestId,
    /// The name of its model.
    pub model: String,
    /// How many requests come before it; `None` if it runs.
    pub waits: Option<usize>,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens generated so far.
    pub generated_tokens: usize,
}
