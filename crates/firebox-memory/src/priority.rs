//! How urgent a request is.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The urgency of a request. Among equal priorities the earlier deadline comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Runs when nothing else is ready.
    Background,
    /// The client waits for the whole result.
    #[default]
    Normal,
    /// The client reads tokens as they come.
    Interactive,
    /// Has to be answered on time whatever else runs, and is never demoted.
    Pinned,
}

impl Priority {
    /// All priorities, the least urgent first.
    pub const ALL: [Self; 4] = [Self::Background, Self::Normal, Self::Interactive, Self::Pinned];

    /// Returns the priority `steps` levels higher, at most [`Interactive`](Self::Interactive): waiting does not make a
    /// request pinned.
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
