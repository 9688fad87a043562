//! The entry of one model in `firebox.toml` or on the command line.

use std::path::{Path, PathBuf};

use firebox_runtime::schedule::Priority;

/// A `[[model]]` of the file, or one that the command line names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelEntry {
    /// The model's name; if absent, the last part of its path.
    pub name: Option<String>,
    /// Its path, or its name on the hub.
    pub path: PathBuf,
    /// Memory that it may take.
    pub memory: Option<u64>,
    /// The part of the shared memory that is reserved for it. Nothing outranks that.
    pub reserved: Option<u64>,
    /// Heads that are made ready at the start.
    pub heads: Vec<String>,
    /// The priority of its requests.
    pub priority: Option<Priority>,
    /// Keeps it in memory.
    pub pinned: bool,
    /// Opens the model at its first request instead of at the start.
    pub lazy: bool,
}

impl ModelEntry {
    /// Returns an entry with a path and no other settings.
    pub fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// Returns whether a name on the command line means this model.
    pub fn is_called(&self, name: &Path) -> bool {
        self.name.as_deref().is_some_and(|own| Path::new(own) == name)
    }
}
