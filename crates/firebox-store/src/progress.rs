//! The progress of long work on files.

/// The progress of an import or a verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// The current tensor or segment.
    pub item: String,
    /// Bytes of the source that were processed.
    pub done: u64,
    /// Bytes of the source in total.
    pub total: u64,
}
