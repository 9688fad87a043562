use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use firebox_store::{StoreError, files};
use serde::{Deserialize, Serialize};

use crate::ScheduleError;

/// Counts are halved when one of them reaches this, so that what was usual long ago is outweighed by what is usual now.
const MOST: u32 = 1 << 10;

/// Names that are remembered: whoever makes names up fills no memory with them.
const MOST_NAMES: usize = 1 << 10;

/// How often what followed what: heads of one user, models of one pipeline.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Succession {
    /// From what was before to what came after.
    counts: BTreeMap<String, BTreeMap<String, u32>>,
    #[serde(skip)]
    path: Option<PathBuf>,
}

impl Succession {
    /// Reads what was saved there; nothing where there is no file. A file that cannot be understood counts as none: it
    /// only makes guesses worse.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ScheduleError> {
        let path = path.as_ref();
        let history = match files::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::NotFound => Self::default(),
            Err(error) => return Err(failed(path, "read", error)),
        };
        Ok(Self { path: Some(path.to_owned()), ..history })
    }

    /// Notes that one came after another.
    pub fn note(&mut self, before: &str, after: &str) {
        if self.counts.len() >= MOST_NAMES && !self.counts.contains_key(before) {
            return;
        }
        let counts = self.counts.entry(before.to_owned()).or_default();
        if counts.len() >= MOST_NAMES && !counts.contains_key(after) {
            return;
        }
        let count = counts.entry(after.to_owned()).or_default();
        // A file may say anything.
        *count = count.saturating_add(1);
        if *count >= MOST {
            counts.values_mut().for_each(|count| *count /= 2);
            counts.retain(|_, count| *count > 0);
        }
    }

    /// Those that followed another most often, the likeliest first.
    pub fn likeliest(&self, before: &str) -> Vec<&str> {
        let mut followers: Vec<_> = self.counts.get(before).into_iter().flatten().collect();
        followers.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), *name));
        followers.into_iter().map(|(name, _)| name.as_str()).collect()
    }

    /// The same, each with its share of all that followed.
    pub fn shares(&self, before: &str) -> Vec<(&str, f64)> {
        let Some(counts) = self.counts.get(before) else { return Vec::new() };
        let all: f64 = counts.values().map(|&count| f64::from(count)).sum();
        let share = |name| (name, f64::from(counts[name]) / all);
        self.likeliest(before).into_iter().map(share).collect()
    }

    /// Writes it to where it came from, as a whole, folder included; nothing where it came from nowhere.
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
            // Of what it was to become nothing is left; the failure is what matters.
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
    fn what_followed_most_is_likeliest_and_is_remembered() {
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
    fn names_that_are_made_up_fill_no_memory() {
        let mut history = Succession::default();
        (0..3 * MOST_NAMES).for_each(|name| history.note(&name.to_string(), "code"));
        (0..3 * MOST_NAMES).for_each(|name| history.note("0", &name.to_string()));
        assert_eq!((history.counts.len(), history.likeliest("0").len()), (MOST_NAMES, MOST_NAMES));
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
