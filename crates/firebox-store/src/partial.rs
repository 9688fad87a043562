//! What is not finished yet: written beside its destination, made durable, and renamed into place.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::StoreError;
use crate::files::{self, parent};

/// What stands between the destination's name and the number of the process.
const INFIX: &str = ".partial-";

/// Partial directories of imports at work in this process. A directory with this process's number that is not among
/// them was left behind by an earlier process of the same number.
static AT_WORK: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// The directory beside the destination that an import works in; removed unless published.
pub(crate) struct Partial {
    pub(crate) path: PathBuf,
}

impl Partial {
    pub(crate) fn create(destination: &Path) -> Result<Self, StoreError> {
        check_free(destination)?;
        let Some(name) = destination.file_name() else {
            return Err(StoreError::NotAModel {
                path: destination.to_owned(),
                reason: "the destination has to end in the name of a new directory".into(),
            });
        };
        let folder = parent(destination);
        files::create_folders(folder).map_err(|error| StoreError::io(folder, "create", error))?;
        let mut partial = OsString::from(name);
        partial.push(INFIX);
        clear_dead(folder, &partial, Left::Folder);
        partial.push(std::process::id().to_string());
        let path = folder.join(partial);
        if !AT_WORK.lock().unwrap_or_else(PoisonError::into_inner).insert(path.clone()) {
            return Err(StoreError::DestinationExists { path });
        }
        // From here on dropping it clears up.
        let partial = Self { path };
        if partial.path.exists() {
            files::remove_folders(&partial.path)
                .map_err(|error| StoreError::io(&partial.path, "clear", error))?;
        }
        files::create_folder(&partial.path)
            .map_err(|error| StoreError::io(&partial.path, "create", error))?;
        Ok(partial)
    }

    pub(crate) fn publish(self, destination: &Path) -> Result<(), StoreError> {
        sync_folder(&self.path)?;
        // Renaming over an empty directory is allowed, over any other it fails: what came in meanwhile is kept.
        match files::rename(&self.path, destination) {
            Ok(()) => sync_folder(parent(destination)),
            Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
                Err(StoreError::DestinationExists { path: destination.to_owned() })
            }
            Err(error) => Err(StoreError::io(destination, "rename the finished bundle to", error)),
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After publishing there is nothing there; after a failure the failure is what matters.
        let _ = files::remove_folders(&self.path);
        AT_WORK.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.path);
    }
}

/// A file beside its destination; removed unless published.
pub(crate) struct PartialFile {
    pub(crate) path: PathBuf,
    destination: PathBuf,
}

impl PartialFile {
    /// Finds a name that no other writer of the same destination has, in this process or another.
    pub(crate) fn create(destination: &Path) -> Result<Self, StoreError> {
        static WRITERS: AtomicU64 = AtomicU64::new(0);
        let Some(name) = destination.file_name() else {
            return Err(StoreError::Malformed {
                file: destination.to_owned(),
                field: "path".into(),
                reason: "it has to end in the name of a file".into(),
            });
        };
        let folder = parent(destination);
        files::create_folders(folder).map_err(|error| StoreError::io(folder, "create", error))?;
        let mut partial = OsString::from(name);
        partial.push(INFIX);
        clear_dead(folder, &partial, Left::File);
        let writer = WRITERS.fetch_add(1, Ordering::Relaxed);
        partial.push(format!("{}-{writer}", std::process::id()));
        let path = folder.join(partial);
        // Left behind by an earlier process of the same number, if it is there.
        match files::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(StoreError::io(&path, "clear", error))
            }
            _ => Ok(Self { path, destination: destination.to_owned() }),
        }
    }

    /// Puts the file, which has been made durable, in the place of what may be at its destination. Whoever has that
    /// open keeps what it was.
    pub(crate) fn publish(self) -> Result<(), StoreError> {
        files::rename(&self.path, &self.destination)
            .map_err(|error| StoreError::io(&self.destination, "rename the finished file to", error))?;
        sync_folder(parent(&self.destination))
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // After publishing there is nothing there; after a failure the failure is what matters.
        let _ = files::remove_file(&self.path);
    }
}

/// What a writer that was killed leaves behind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Left {
    /// Named by its process.
    Folder,
    /// Named by its process and a count.
    File,
}

/// Removes what writers of the same destination left when they were killed: each can be as large as the model.
///
/// A failure is no reason not to write: what stays behind is not in the way.
fn clear_dead(folder: &Path, prefix: &OsStr, left: Left) {
    let Ok(entries) = files::list(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes()).map(std::str::from_utf8);
        let Some(Ok(number)) = number else { continue };
        // Of the entry itself: a link is not what a writer makes.
        let Ok(kind) = entry.file_type() else { continue };
        match left {
            Left::Folder if kind.is_dir() && written(number).is_some_and(is_dead) => {
                let _ = files::remove_folders(&entry.path());
            }
            Left::File if kind.is_file() => {
                let process = number.split_once('-').filter(|(_, count)| written::<u64>(count).is_some());
                if process.and_then(|(process, _)| written(process)).is_some_and(is_dead) {
                    let _ = files::remove_file(&entry.path());
                }
            }
            _ => {}
        }
    }
}

/// A number in the one spelling that a writer gives it: anything else is somebody's own.
fn written<N: FromStr + ToString>(digits: &str) -> Option<N> {
    digits.parse::<N>().ok().filter(|number| number.to_string() == digits)
}

/// Whether a process is certain to be gone. Where there is no telling, it is not.
fn is_dead(process: u32) -> bool {
    let folder = |process: u32| Path::new("/proc").join(process.to_string());
    // This process being there shows that /proc is mounted and lists processes by the numbers that they see.
    cfg!(target_os = "linux") && folder(std::process::id()).exists() && !folder(process).exists()
}

fn check_free(destination: &Path) -> Result<(), StoreError> {
    match fs::symlink_metadata(destination) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(StoreError::io(destination, "look up", error)),
        Ok(metadata) if metadata.is_dir() => {
            let mut entries =
                files::list(destination).map_err(|error| StoreError::io(destination, "list", error))?;
            match entries.next() {
                None => Ok(()),
                Some(_) => Err(StoreError::DestinationExists { path: destination.to_owned() }),
            }
        }
        Ok(_) => Err(StoreError::DestinationExists { path: destination.to_owned() }),
    }
}

pub(crate) fn sync_folder(path: &Path) -> Result<(), StoreError> {
    files::sync_folder(path).map_err(|error| StoreError::io(path, "make durable", error))
}
