//! The entry of one model in `firebox.toml` or on the command line.

use std::path::{Path, PathBuf};

use firebox_runtime::schedule::Priority;

/// A `[[model]]` of the file, or one that the command line names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelEntry {
    /// The model's name; if absent, the last part of its path.
    pub name: Option<String>,
    /// Where it is, or what the hub calls it.
    pub path: PathBuf,
    /// Memory that it may take.
    pub memory: Option<u64>,
    /// Of the memory that it shares with others, what it is to have for itself. Nothing outranks that.
    pub reserved: Option<u64>,
    /// Heads that are made ready at the start.
    pub heads: Vec<String>,
    /// How urgent its requests are.
    pub priority: Option<Priority>,
    /// Whether it stays in memory.
    pub pinned: bool,
    /// Opens the model at its first request instead of at the start.
    pub lazy: bool,
}

impl ModelEntry {
    /// One of which nothing else is said.
    pub fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// Whether a command line means this one.
    pub fn is_called(&self, name: &Path) -> bool {
        self.name.as_deref().is_some_and(|own| Path::new(own) == name)
    }
}
