//! Files that are there as a whole or not at all.

use std::io;
use std::path::{Path, PathBuf};

pub(crate) use firebox_store::files::parent;
use firebox_store::files::{self, File, Lock};

use crate::error::TrainError;

/// The prefix of the names of unfinished files and folders.
pub(crate) const UNFINISHED: &str = ".unfinished-";

/// Puts a text in the place of what may be there.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<(), TrainError> {
    write_bytes(path, text.as_bytes())
}

/// Puts a file in the place of what may be there.
pub(crate) fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let beside = beside(path);
    files::write(&beside, bytes).map_err(|error| TrainError::io(&beside, "write", error))?;
    files::rename(&beside, path).map_err(|error| TrainError::io(path, "rename the new file to", error))?;
    sync_folder(parent(path))
}

/// Where something is written before it is renamed to its place.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{UNFINISHED}{name}"))
}

pub(crate) fn create_folder(path: &Path) -> Result<(), TrainError> {
    files::create_folders(path).map_err(|error| TrainError::io(path, "create", error))
}

/// Removes a folder with all that is in it. Gone already is as good.
pub(crate) fn remove_folder(path: &Path) -> Result<(), TrainError> {
    match files::remove_folders(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(TrainError::io(path, "remove", error)),
        _ => Ok(()),
    }
}

/// Locks a file for this process until the file is closed or the process ends; `busy` is the reason of the error if another
/// process holds the lock.
pub(crate) fn lock(file: &File, path: &Path, busy: &str) -> Result<(), TrainError> {
    if file.try_lock().map_err(|error| TrainError::io(path, "lock", error))? == Lock::Busy {
        return Err(TrainError::malformed(path, busy));
    }
    // The process that held the lock before may have finished the file and renamed it.
    match is_at(file, path) {
        Ok(true) => Ok(()),
        Ok(false) => Err(TrainError::malformed(path, "another process has just taken it away; try again")),
        Err(error) => Err(TrainError::io(path, "look up", error)),
    }
}

/// Returns whether an open file is the one at a path.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;

    let held = file.system().metadata()?;
    match std::fs::metadata(path) {
        Ok(there) => Ok((held.dev(), held.ino()) == (there.dev(), there.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> io::Result<bool> {
    Ok(true)
}

/// Makes renames in a folder survive a loss of power.
pub(crate) fn sync_folder(path: &Path) -> Result<(), TrainError> {
    files::sync_folder(path).map_err(|error| TrainError::io(path, "sync", error))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_has_another_name_by_now_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let file = File::create(&path).unwrap();
        lock(&file, &path, "busy").unwrap();
        std::fs::rename(&path, folder.path().join("finished")).unwrap();
        assert!(matches!(lock(&file, &path, "busy"), Err(TrainError::Malformed { .. })));
        std::fs::write(&path, "next").unwrap();
        assert!(matches!(lock(&file, &path, "busy"), Err(TrainError::Malformed { .. })));
    }
}
