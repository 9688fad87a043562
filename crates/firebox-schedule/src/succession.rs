//! Counts of which name followed which.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use firebox_store::{StoreError, files};
use serde::{Deserialize, Serialize};

use crate::ScheduleError;

/// All counts are halved when one of them reaches this, so that recent habits outweigh old ones.
const MAX_COUNT: u32 = 1 << 10;

/// The most names that are remembered, so that made-up names fill no memory.
const MAX_NAMES: usize = 1 << 10;

/// Counts which name followed which: heads of a user, or models of a pipeline.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Succession {
    /// The followers of each name, with their counts.
    counts: BTreeMap<String, BTreeMap<String, u32>>,
    #[serde(skip)]
    path: Option<PathBuf>,
}

impl Succession {
    /// Reads a file. A missing file counts as empty, and so does one that cannot be parsed: it only makes predictions worse.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ScheduleError> {
        let path = path.as_ref();
        let history = match files::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::NotFound => Self::default(),
            Err(error) => return Err(failed(path, "read", error)),
        };
        Ok(Self { path: Some(path.to_owned()), ..history })
    }

    /// Counts that `after` followed `before`.
    pub fn note(&mut self, before: &str, after: &str) {
        if self.counts.len() >= MAX_NAMES && !self.counts.contains_key(before) {
            return;
        }
        let counts = self.counts.entry(before.to_owned()).or_default();
        if counts.len() >= MAX_NAMES && !counts.contains_key(after) {
            return;
        }
        let count = counts.entry(after.to_owned()).or_default();
        // A file may contain any number.
        *count = count.saturating_add(1);
        if *count >= MAX_COUNT {
            counts.values_mut().for_each(|count| *count /= 2);
            counts.retain(|_, count| *count > 0);
        }
    }

    /// Returns the followers of a name, the most frequent first.
    pub fn likeliest(&self, before: &str) -> Vec<&str> {
        let mut followers: Vec<_> = self.counts.get(before).into_iter().flatten().collect();
        followers.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), *name));
        followers.into_iter().map(|(name, _)| name.as_str()).collect()
    }

    /// Returns the followers of a name with their shares, the most frequent first.
    pub fn shares(&self, before: &str) -> Vec<(&str, f64)> {
        let Some(counts) = self.counts.get(before) else { return Vec::new() };
        let all: f64 = counts.values().map(|&count| f64::from(count)).sum();
        let share = |name| (name, f64::from(counts[name]) / all);
        self.likeliest(before).into_iter().map(share).collect()
    }

    /// Replaces the file it was opened from, if any, and creates its directory.
    pub fn save(&self) -> Result<(), ScheduleError> {
        let Some(path) = &self.path else { return Ok(()) };
        let beside = path.with_extension(format!("{}.tmp", std::process::id()));
        let json = serde_json::to_vec(self).map_err(|error| failed(path, "write", error.into()))?;
        let written = path
            .parent()
            .map_or(Ok(()), files::create_folders)
            .and_then(|()| files::write(&beside, &json))
            .and_then(|()| files::rename(&beside, path));
        written.map_err(|error| {
            // The partial file is removed; only the first error matters.
            let _ = files::remove_file(&beside);
            failed(path, "write", error)
        })
    }
}

fn failed(path: &Path, action: &str, source: std::io::Error) -> ScheduleError {
    StoreError::io(path, action, source).into()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_most_frequent_follower_is_likeliest_and_is_saved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("firebox/history.json");
        let mut history = Succession::open(&path).unwrap();
        assert!(history.likeliest("chat").is_empty());
        for after in ["code", "summarize", "code", "chat"] {
            history.note("chat", after);
        }
        assert_eq!(history.likeliest("chat"), ["code", "chat", "summarize"]);
        assert_eq!(history.shares("chat"), [("code", 0.5), ("chat", 0.25), ("summarize", 0.25)]);
        assert!(history.shares("code").is_empty());
        history.save().unwrap();
        assert_eq!(Succession::open(&path).unwrap(), history);
        fs::write(&path, "{").unwrap();
        assert!(Succession::open(&path).unwrap().likeliest("chat").is_empty());
        fs::write(&path, format!(r#"{{"counts":{{"chat":{{"code":{0},"edit":{0}}}}}}}"#, u32::MAX)).unwrap();
        let mut history = Succession::open(&path).unwrap();
        assert_eq!(history.shares("chat"), [("code", 0.5), ("edit", 0.5)]);
        history.note("chat", "edit");
        assert_eq!(history.likeliest("chat").len(), 2);
    }

    #[test]
    fn made_up_names_fill_no_memory() {
        let mut history = Succession::default();
        (0..3 * MAX_NAMES).for_each(|name| history.note(&name.to_string(), "code"));
        (0..3 * MAX_NAMES).for_each(|name| history.note("0", &name.to_string()));
        assert_eq!((history.counts.len(), history.likeliest("0").len()), (MAX_NAMES, MAX_NAMES));
        history.note("0", "code");
        assert_eq!(history.likeliest("0")[0], "code");
    }

    #[test]
    fn new_habits_outweigh_old_ones() {
        let mut history = Succession::default();
        (0..1000).for_each(|_| history.note("chat", "code"));
        (0..2000).for_each(|_| history.note("chat", "summarize"));
        assert_eq!(history.likeliest("chat")[0], "summarize");
    }
}
