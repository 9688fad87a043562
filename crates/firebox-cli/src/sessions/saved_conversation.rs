//! Reading of a saved conversation file without its model.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use firebox_runtime::SessionSummary;
use firebox_text::Message;

/// A conversation in its file.
#[derive(Debug)]
pub struct SavedConversation {
    pub path: PathBuf,
    pub summary: SessionSummary,
    /// The messages, if it is a conversation of `chat`.
    pub messages: Option<Vec<Message>>,
}

impl SavedConversation {
    /// Reads it, without the model that it is of.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        if path.is_file() && !SessionSummary::is_session_file(path) {
            return Err(anyhow!(
                "{} is no saved conversation; `firebox session list` shows those",
                path.display()
            ));
        }
        let summary = SessionSummary::open(path)?;
        let messages = serde_json::from_str(&summary.note).ok();
        Ok(Self { path: path.to_owned(), summary, messages })
    }
}
