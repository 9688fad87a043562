//! Saved sessions on disk, with limits per key.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use firebox_runtime::human_bytes;
use firebox_store::files::{self, File, Lock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// File name extension of saved sessions.
const EXTENSION: &str = ".session";
const MAX_NAME_CHARS: usize = 64;

/// Prefix of the file name while a session is being saved. Names cannot begin with it.
const DRAFT_PREFIX: &str = ".";

/// Infix that the store adds to the names of unfinished files.
const PARTIAL_INFIX: &str = ".partial-";

/// Advice for a full archive.
const DELETE_HINT: &str = "delete one with DELETE /v1/sessions/saved/NAME";

/// Saved sessions, in one folder per key.
#[derive(Debug)]
pub(crate) struct Archive {
    folder: Option<PathBuf>,
    /// Saved sessions that a key may have.
    most: usize,
    /// Bytes that a key's saved sessions may take.
    bytes: u64,
    /// A permit per key: two concurrent saves could both use the remaining space.
    saving: Mutex<HashMap<String, Arc<Semaphore>>>,
}

impl Archive {
    pub fn new(folder: Option<PathBuf>, most: usize, bytes: u64) -> Self {
        Self { folder, most, bytes, saving: Mutex::default() }
    }

    /// Returns the folder of a key's saved sessions.
    pub fn folder(&self, owner: &str) -> Result<PathBuf, ApiError> {
        let folder = self.folder.as_ref().ok_or_else(|| {
            ApiError::invalid("sessions cannot be saved; start the server with --sessions FOLDER")
        })?;
        Ok(folder.join(owner))
    }

    /// Returns the names of a key's saved sessions.
    pub fn names(&self, owner: &str) -> Vec<String> {
        let Ok(folder) = self.folder(owner) else { return Vec::new() };
        let saved = saved_in(&folder).unwrap_or_default();
        let mut names: Vec<String> = saved.into_iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        names
    }

    /// Waits until no other request saves with the key.
    pub async fn save_permit(&self, owner: &str) -> Result<OwnedSemaphorePermit, ApiError> {
        let turn = {
            let mut saving = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
            saving.entry(owner.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
        };
        turn.acquire_owned().await.map_err(|_| ApiError::stopping())
    }

    /// Saves a file through `write`, replacing one of the same name, unless the key's limits would be exceeded.
    /// The size is known only once written, so the file is written as a draft and then renamed. The caller
    /// holds the save permit.
    pub fn save(
        &self,
        (folder, name): (&Path, &str),
        write: impl FnOnce(&Path) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        clear_drafts(folder).map_err(|error| not_saved(name, &error))?;
        let saved = saved_in(folder).map_err(|error| not_saved(name, &error))?;
        let before = saved.iter().find(|(known, _)| known == name).map(|(_, bytes)| *bytes);
        let others = saved.iter().map(|(_, bytes)| bytes).sum::<u64>() - before.unwrap_or_default();
        if before.is_none() && saved.len() >= self.most {
            return Err(ApiError::storage_full(format!(
                "{} sessions are saved, and a key may have {}; {DELETE_HINT}, or start the server with more \
                 --saved-sessions",
                saved.len(),
                self.most
            )));
        }
        if before.is_none() && others >= self.bytes {
            return Err(self.full(others, None));
        }
        let draft = folder.join(format!("{DRAFT_PREFIX}{name}{EXTENSION}"));
        let kept = write(&draft).and_then(|()| self.publish((folder, name), &draft, others, before));
        if kept.is_err() {
            let _ = files::remove_file(&draft);
        }
        kept
    }

    fn publish(
        &self,
        (folder, name): (&Path, &str),
        draft: &Path,
        others: u64,
        before: Option<u64>,
    ) -> Result<(), ApiError> {
        let failed = |error: io::Error| not_saved(name, &error);
        let bytes = std::fs::metadata(draft).map_err(failed)?.len();
        // Above the limit, which may have been lowered, a file may still be replaced by a smaller one.
        if others.saturating_add(bytes) > self.bytes && before.is_none_or(|before| bytes > before) {
            return Err(self.full(others, Some(bytes)));
        }
        files::rename(draft, &path_of(folder, name)).map_err(failed)?;
        files::sync_folder(folder).map_err(failed)
    }

    fn full(&self, others: u64, own: Option<u64>) -> ApiError {
        let own = own.map(|bytes| format!(" and this one {}", human_bytes(bytes))).unwrap_or_default();
        ApiError::storage_full(format!(
            "the saved sessions of a key may take {}; others take {}{own}: {DELETE_HINT}, or start the server with more \
             --saved-size",
            human_bytes(self.bytes),
            human_bytes(others)
        ))
    }
}

/// Lists the saved sessions of a folder with their sizes.
fn saved_in(folder: &Path) -> io::Result<Vec<(String, u64)>> {
    let entries = match files::list(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut saved = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str().and_then(|name| name.strip_suffix(EXTENSION)) else { continue };
        match entry.metadata() {
            Ok(found) if is_name(name) => saved.push((name.to_owned(), found.len())),
            // Removed meanwhile, or not a saved session.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(saved)
}

/// Removes drafts of processes that were killed while saving. The caller holds the save permit; other processes
/// lock the files they write.
fn clear_drafts(folder: &Path) -> io::Result<()> {
    let entries = match files::list(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if !entry.file_name().to_str().is_some_and(is_draft) {
            continue;
        }
        // A draft that cannot be removed takes space and does no other harm.
        let path = entry.path();
        let Ok(left) = File::open_with(&path, OpenOptions::new().write(true)) else { continue };
        if matches!(left.try_lock(), Ok(Lock::Held)) {
            let _ = files::remove_file(&path);
        }
    }
    Ok(())
}

/// Returns true for drafts and their unfinished files.
fn is_draft(file: &str) -> bool {
    let of_name = |file: &str| file.strip_suffix(EXTENSION).is_some_and(is_name);
    let Some(rest) = file.strip_prefix(DRAFT_PREFIX) else { return false };
    of_name(rest) || rest.rsplit_once(PARTIAL_INFIX).is_some_and(|(rest, _)| of_name(rest))
}

/// Returns the file of a saved session.
pub(crate) fn file(folder: &Path, name: &str, field: &str) -> Result<PathBuf, ApiError> {
    check_name(name, field)?;
    Ok(path_of(folder, name))
}

/// Rejects names that could mean anything else to a file system.
pub(crate) fn check_name(name: &str, field: &str) -> Result<(), ApiError> {
    if is_name(name) {
        return Ok(());
    }
    Err(ApiError::field(
        field,
        format!(
            "a name has at most {MAX_NAME_CHARS} letters, digits, `-`, `_` and `.`, and does not begin with `.`"
        ),
    ))
}

/// Removes a saved session.
pub(crate) fn remove(path: &Path, name: &str) -> Result<(), ApiError> {
    files::remove_file(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => no_saved(name),
        _ => ApiError::internal(format!("the saved session {name:?} cannot be removed: {error}")),
    })
}

pub(crate) fn no_saved(name: &str) -> ApiError {
    ApiError::not_found(format!("there is no saved session {name:?}"))
}

fn not_saved(name: &str, error: &io::Error) -> ApiError {
    ApiError::internal(format!("the session cannot be saved as {name:?}: {error}"))
}

fn path_of(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}{EXTENSION}"))
}

fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAME_CHARS).contains(&name.len()) && name.bytes().all(plain) && !name.starts_with('.')
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use axum::http::StatusCode;
    use firebox_store::files::{Fault, Faults};
    use tokio::time::timeout;

    use super::*;

    fn keep(archive: &Archive, folder: &Path, name: &str, bytes: usize) -> Result<(), ApiError> {
        let write = |draft: &Path| {
            files::write(draft, &vec![7; bytes]).map_err(|error| ApiError::internal(error.to_string()))
        };
        archive.save((folder, name), write)
    }

    /// Lists a folder with file sizes.
    fn entries(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let describe = |entry: fs::DirEntry| {
            format!("{} {}", entry.file_name().to_str().unwrap(), entry.metadata().unwrap().len())
        };
        let mut all: Vec<String> = entries.map(describe).collect();
        all.sort();
        all
    }

    #[track_caller]
    fn full(kept: Result<(), ApiError>, option: &str) {
        let error = kept.unwrap_err();
        assert_eq!(error.status, StatusCode::INSUFFICIENT_STORAGE);
        let message = error.value()["error"]["message"].to_string();
        assert!(message.contains(option) && message.contains("DELETE /v1/sessions/saved/NAME"), "{message}");
    }

    #[test]
    fn names_cannot_leave_their_folder() {
        let folder = Path::new("/saved/open");
        assert_eq!(file(folder, "Trip-2.a", "name").unwrap(), Path::new("/saved/open/Trip-2.a.session"));
        let long = "a".repeat(65);
        for name in ["", ".", "..", "../a", "a/b", "a\\b", ".hidden", "a\0", "ä", "a b", &long, "C:"] {
            assert!(file(folder, name, "name").is_err(), "{name:?}");
        }
    }

    #[test]
    fn the_number_of_saved_sessions_is_limited() {
        let folder = tempfile::tempdir().unwrap();
        let archive = Archive::new(Some(folder.path().into()), 2, 1000);
        let own = archive.folder("open").unwrap();
        fs::create_dir(&own).unwrap();
        keep(&archive, &own, "a", 10).unwrap();
        keep(&archive, &own, "b", 10).unwrap();
        full(keep(&archive, &own, "c", 10), "--saved-sessions");
        keep(&archive, &own, "a", 20).unwrap();
        assert_eq!(archive.names("open"), ["a", "b"]);
        assert_eq!(entries(&own), ["a.session 20", "b.session 10"]);
        let other = archive.folder("other").unwrap();
        fs::create_dir(&other).unwrap();
        keep(&archive, &other, "c", 10).unwrap();
        remove(&file(&own, "b", "name").unwrap(), "b").unwrap();
        keep(&archive, &own, "c", 10).unwrap();
        assert_eq!(archive.names("open"), ["a", "c"]);
    }

    #[test]
    fn the_size_of_saved_sessions_is_limited_without_loss() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path();
        let archive = |bytes| Archive::new(Some(own.into()), 10, bytes);
        keep(&archive(100), own, "a", 60).unwrap();
        full(keep(&archive(100), own, "b", 41), "--saved-size");
        keep(&archive(100), own, "b", 40).unwrap();
        let there = ["a.session 60", "b.session 40"];
        assert_eq!(entries(own), there);
        full(keep(&archive(100), own, "b", 41), "--saved-size");
        full(keep(&archive(100), own, "c", 1), "--saved-size");
        assert_eq!(entries(own), there, "what was refused has left nothing and changed nothing");
        keep(&archive(100), own, "b", 40).unwrap();
        // The limit may be lowered.
        full(keep(&archive(50), own, "a", 61), "--saved-size");
        keep(&archive(50), own, "a", 59).unwrap();
        assert_eq!(entries(own), ["a.session 59", "b.session 40"]);
    }

    #[test]
    fn saves_are_serialized_per_key() {
        let archive = Archive::new(None, 2, 1000);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let slow = archive.save_permit("one").await.unwrap();
            let other = timeout(Duration::from_secs(10), archive.save_permit("two")).await;
            drop(other.expect("other keys do not wait").unwrap());
            let same = timeout(Duration::from_millis(20), archive.save_permit("one")).await;
            assert!(same.is_err(), "two of one key would both have the room that is left");
            drop(slow);
            drop(archive.save_permit("one").await.unwrap());
        });
    }

    #[test]
    fn drafts_of_killed_processes_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path();
        let (left, unfinished) = (".a.session", ".b.partial-1.session.partial-0123456789abcdef");
        let written = own.join(".c.session.partial-0123456789abcdef");
        let others = ["b.session", ".keep", ".session", "..session", "notes.partial-0"];
        for name in [left, unfinished].into_iter().chain(others) {
            fs::write(own.join(name), [0; 5]).unwrap();
        }
        let writer = fs::File::create(&written).unwrap();
        writer.lock().unwrap();
        // A rejected save removes drafts as well.
        let archive = Archive::new(Some(own.into()), 1, 1000);
        full(keep(&archive, own, "c", 10), "--saved-sessions");
        assert!(written.exists(), "another process is writing it");
        drop(writer);
        keep(&archive, own, "b", 10).unwrap();
        let mut stay = others.map(|name| format!("{name} {}", if name == "b.session" { 10 } else { 5 }));
        stay.sort();
        assert_eq!(entries(own), stay);
    }

    #[test]
    fn a_certain_rejection_writes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path();
        keep(&Archive::new(Some(own.into()), 9, 10), own, "a", 10).unwrap();
        for (most, bytes) in [(1, 100), (9, 10)] {
            let refused =
                Archive::new(Some(own.into()), most, bytes).save((own, "b"), |_| panic!("it is written"));
            assert_eq!(refused.unwrap_err().status, StatusCode::INSUFFICIENT_STORAGE);
        }
    }

    #[test]
    fn a_disk_error_keeps_the_old_or_the_new_file() {
        for fault in [Fault::Full, Fault::Broken] {
            for nth in 0.. {
                let folder = tempfile::tempdir().unwrap();
                let own = folder.path();
                let archive = Archive::new(Some(own.into()), 2, 1000);
                keep(&archive, own, "a", 10).unwrap();
                let faults = Faults::below(own);
                faults.from(nth, fault);
                let kept = keep(&archive, own, "a", 20);
                let struck = faults.lift();
                let saved = fs::metadata(own.join("a.session")).unwrap().len();
                assert!(saved == 20 || (saved == 10 && kept.is_err()), "{fault:?} {nth}: {saved}, {kept:?}");
                // The next save works, whatever was left.
                keep(&archive, own, "a", 30).unwrap();
                assert_eq!(entries(own), ["a.session 30"], "{fault:?} {nth}");
                if struck == 0 {
                    assert!(kept.is_ok() && nth > 2);
                    break;
                }
                assert!(kept.is_err(), "{fault:?} {nth}");
            }
        }
    }
}
