//! The single disk operations of a change of heads. The process may end after any of them.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;

use crate::error::StoreError;
use crate::files::{self, File};
use crate::partial;

#[cfg(test)]
use super::installed::tests::step;

/// Tests count the steps and end the process at one of them.
#[cfg(not(test))]
fn step() {}

/// Creates a directory unless it exists. A link in its place is refused, because writes must stay in the model.
pub(super) fn create_dir(path: &Path) -> Result<(), StoreError> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => {
            return Err(StoreError::UnsafePath {
                file: path.to_owned(),
                field: "directory".into(),
                target: fs::read_link(path).unwrap_or_default(),
                reason: "heads are written to a directory of the model's own; put one here".into(),
            });
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(StoreError::io(path, "look up", error)),
    }
    step();
    files::create_folder(path).map_err(|error| StoreError::io(path, "create", error))?;
    match path.parent() {
        Some(parent) => sync_folder(parent),
        None => Ok(()),
    }
}

pub(super) fn create(path: &Path) -> Result<File, StoreError> {
    step();
    File::create_new(path).map_err(|error| StoreError::io(path, "create", error))
}

pub(super) fn write(path: &Path, file: &mut File, bytes: &[u8]) -> Result<(), StoreError> {
    step();
    file.write_all(bytes).map_err(|error| StoreError::io(path, "write", error))
}

pub(super) fn sync(path: &Path, file: &File) -> Result<(), StoreError> {
    step();
    file.sync_all().map_err(|error| StoreError::io(path, "make durable", error))
}

pub(super) fn sync_folder(path: &Path) -> Result<(), StoreError> {
    step();
    partial::sync_folder(path)
}

pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let mut file = create(path)?;
    write(path, &mut file, bytes)?;
    sync(path, &file)
}

pub(super) fn rename(from: &Path, to: &Path) -> Result<(), StoreError> {
    step();
    files::rename(from, to).map_err(|error| StoreError::io(to, "rename what is finished to", error))
}

/// Removes a file, or a directory with its contents, if it exists. Links are removed and not followed.
pub(super) fn remove(path: &Path) -> Result<(), StoreError> {
    let fail = |error| StoreError::io(path, "remove", error);
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(fail(error)),
        Ok(metadata) if metadata.is_dir() => {
            for entry in files::list(path).map_err(fail)? {
                remove(&entry.map_err(fail)?.path())?;
            }
            step();
            files::remove_folder(path).map_err(fail)
        }
        Ok(_) => {
            step();
            files::remove_file(path).map_err(fail)
        }
    }
}

/// Removes a directory if it is empty.
pub(super) fn remove_if_empty(path: &Path) -> Result<(), StoreError> {
    step();
    match files::remove_folder(path) {
        Err(error) if error.kind() != ErrorKind::DirectoryNotEmpty => {
            Err(StoreError::io(path, "remove", error))
        }
        _ => Ok(()),
    }
}
