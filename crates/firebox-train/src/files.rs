//! Files that are there as a whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::TrainError;

/// What names of unfinished files and folders begin with.
pub(crate) const UNFINISHED: &str = ".unfinished-";

/// Puts a text in the place of what may be there.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<(), TrainError> {
    write_bytes(path, text.as_bytes())
}

/// Puts a file in the place of what may be there.
pub(crate) fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let beside = beside(path);
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|error| TrainError::io(&beside, "write", error))?;
    fs::rename(&beside, path).map_err(|error| TrainError::io(path, "rename the new file to", error))?;
    sync_folder(parent(path))
}

/// Where something is written before it is renamed to its place.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{UNFINISHED}{name}"))
}

pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

pub(crate) fn create_folder(path: &Path) -> Result<(), TrainError> {
    fs::create_dir_all(path).map_err(|error| TrainError::io(path, "create", error))
}

/// Removes a folder with all that is in it. Gone already is as good.
pub(crate) fn remove_folder(path: &Path) -> Result<(), TrainError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(TrainError::io(path, "remove", error)),
        _ => Ok(()),
    }
}

/// Makes renames in a folder survive a loss of power.
pub(crate) fn sync_folder(path: &Path) -> Result<(), TrainError> {
    if cfg!(unix) {
        let synced = File::open(path).and_then(|folder| folder.sync_all());
        synced.map_err(|error| TrainError::io(path, "sync", error))?;
    }
    Ok(())
}
