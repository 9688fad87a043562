//! How urgent a request is.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Whose deadline counts more. Among equals the earlier deadline does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// When there is nothing else to do; nobody waits for it.
    Background,
    /// Somebody waits for all of it.
    #[default]
    Normal,
    /// Somebody reads along.
    Interactive,
    /// Has to answer, whatever else goes on, and is never demoted.
    Pinned,
}

impl Priority {
    /// All of them, the least urgent first.
    pub const ALL: [Self; 4] = [Self::Background, Self::Normal, Self::Interactive, Self::Pinned];

    /// The next more urgent one, short of pinned: who waits does not become pinned by it.
    pub fn raised(self, steps: u32) -> Self {
        let most = self.max(Self::Interactive);
        Self::ALL[(self as usize).saturating_add(steps as usize).min(most as usize)]
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Background => "background",
            Self::Normal => "normal",
            Self::Interactive => "interactive",
            Self::Pinned => "pinned",
        })
    }
}
