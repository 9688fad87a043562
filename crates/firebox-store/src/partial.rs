//! Files and directories under construction: written beside their destination, made durable, and renamed into place.
//!
//! The writer holds a lock, which the system releases however the writer ends: an unlocked one is a remnant. A process id would
//! not tell, because containers that share a disk reuse the same ids.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::StoreError;
use crate::files::{self, File, Lock, parent};

/// The separator between the destination's name and a random number.
const INFIX: &str = ".partial-";

/// Hexadecimal digits of the random number.
const DIGITS: usize = 16;

/// The most attempts to create an entry that another process's cleanup removed before it was locked.
const ATTEMPTS: usize = 16;

/// Destinations of running imports of this process, so that a second import to one is refused at once.
static RESERVED_DESTINATIONS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// The directory beside the destination in which an import works; removed unless published.
pub(crate) struct PartialFolder {
    pub(crate) path: PathBuf,
    /// `None` on Windows, where a directory cannot be opened as a file.
    _lock: Option<File>,
    _reserved: ReservedDestination,
}

impl PartialFolder {
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
        let reserved = ReservedDestination::begin(folder.join(name))?;
        let (path, lock) = begin(Kind::Folder, folder, name, make_folder)?;
        Ok(Self { path, _lock: lock, _reserved: reserved })
    }

    pub(crate) fn publish(self, destination: &Path) -> Result<(), StoreError> {
        sync_folder(&self.path)?;
        // Renaming over an empty directory is allowed and over any other fails, so data that arrived meanwhile is kept.
        match files::rename(&self.path, destination) {
            Ok(()) => sync_folder(parent(destination)),
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
                Err(StoreError::DestinationExists { path: destination.to_owned() })
            }
            Err(error) => Err(StoreError::io(destination, "rename the finished bundle to", error)),
        }
    }
}

impl Drop for PartialFolder {
    fn drop(&mut self) {
        // After publishing the directory is gone; after a failure that failure is what counts.
        let _ = files::remove_folders(&self.path);
    }
}

/// A destination reserved within this process.
struct ReservedDestination(PathBuf);

impl ReservedDestination {
    fn begin(destination: PathBuf) -> Result<Self, StoreError> {
        if RESERVED_DESTINATIONS.lock().unwrap_or_else(PoisonError::into_inner).insert(destination.clone()) {
            Ok(Self(destination))
        } else {
            Err(StoreError::DestinationExists { path: destination })
        }
    }
}

impl Drop for ReservedDestination {
    fn drop(&mut self) {
        RESERVED_DESTINATIONS.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// A file under construction beside its destination; removed unless published.
pub(crate) struct PartialFile {
    pub(crate) path: PathBuf,
    destination: PathBuf,
    /// The locked handle of the file, which is closed before the rename.
    _lock: fs::File,
}

impl PartialFile {
    /// Creates a file and returns it for writing.
    pub(crate) fn create(destination: &Path) -> Result<(Self, File), StoreError> {
        let Some(name) = destination.file_name() else {
            return Err(StoreError::Malformed {
                file: destination.to_owned(),
                field: "path".into(),
                reason: "it has to end in the name of a file".into(),
            });
        };
        let folder = parent(destination);
        files::create_folders(folder).map_err(|error| StoreError::io(folder, "create", error))?;
        let (path, file) = begin(Kind::File, folder, name, make_file)?;
        let lock = file.system().try_clone().map_err(|error| StoreError::io(&path, "lock", error))?;
        Ok((Self { path, destination: destination.to_owned(), _lock: lock }, file))
    }

    /// Moves the durable file to its destination and replaces an existing one. Readers that have the old one open keep it.
    pub(crate) fn publish(self) -> Result<(), StoreError> {
        files::rename(&self.path, &self.destination)
            .map_err(|error| StoreError::io(&self.destination, "rename the finished file to", error))?;
        sync_folder(parent(&self.destination))
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // After publishing the file is gone; after a failure that failure is what counts.
        let _ = files::remove_file(&self.path);
    }
}

/// A kind of entry created beside a destination.
#[derive(Clone, Copy)]
enum Kind {
    Folder,
    File,
}

impl Kind {
    /// Opens the entry for locking, if possible.
    fn open(self, path: &Path) -> io::Result<Option<File>> {
        match self {
            Self::Folder if cfg!(windows) => Ok(None),
            Self::Folder => File::open(path).map(Some),
            Self::File => File::open_with(path, fs::File::options().write(true)).map(Some),
        }
    }
}

/// Creates an entry beside a destination under a name that no other writer uses, on any machine, and removes remnants of
/// other writers.
fn begin<T>(
    kind: Kind,
    folder: &Path,
    destination: &OsStr,
    mut make: impl FnMut(&Path) -> io::Result<T>,
) -> Result<(PathBuf, T), StoreError> {
    let mut prefix = OsString::from(destination);
    prefix.push(INFIX);
    remove_remnants(kind, folder, &prefix);
    let mut attempts = 0;
    loop {
        let mut name = prefix.clone();
        name.push(format!("{:0DIGITS$x}", RandomState::new().build_hasher().finish()));
        let path = folder.join(name);
        attempts += 1;
        match make(&path) {
            Ok(made) => return Ok((path, made)),
            Err(error) if attempts < ATTEMPTS && is_taken(error.kind()) => {}
            Err(error) => return Err(StoreError::io(&path, "create", error)),
        }
    }
}

/// Returns whether another writer has the name or has removed the entry.
fn is_taken(error: ErrorKind) -> bool {
    matches!(error, ErrorKind::AlreadyExists | ErrorKind::NotFound | ErrorKind::WouldBlock)
}

fn make_file(path: &Path) -> io::Result<File> {
    let file = File::create_new(path)?;
    lock_entry(&file, path)?;
    Ok(file)
}

fn make_folder(path: &Path) -> io::Result<Option<File>> {
    files::create_folder(path)?;
    let folder = Kind::Folder.open(path).inspect_err(|_| drop(files::remove_folder(path)))?;
    if let Some(folder) = &folder {
        lock_entry(folder, path)?;
    }
    Ok(folder)
}

/// Locks a new entry, unless another process's cleanup removed it first.
fn lock_entry(file: &File, path: &Path) -> io::Result<()> {
    match file.try_lock()? {
        Lock::Busy => Err(ErrorKind::WouldBlock.into()),
        // Without locks nothing is cleaned up. A previous holder of the lock has removed the entry that it locked.
        Lock::Held | Lock::Absent => fs::symlink_metadata(path).map(drop),
    }
}

/// Removes remnants of killed writers of the same destination, each of which can be as large as the model.
///
/// Failures are ignored, because remnants do not obstruct the new writer.
fn remove_remnants(kind: Kind, folder: &Path, prefix: &OsStr) {
    let Ok(entries) = files::list(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        // Checks the entry itself: writers do not create links.
        let Ok(found) = entry.file_type() else { continue };
        let is_kind = match kind {
            Kind::Folder => found.is_dir(),
            Kind::File => found.is_file(),
        };
        if !is_kind || !number.is_some_and(is_random_number) {
            continue;
        }
        let path = entry.path();
        let Ok(Some(left)) = kind.open(&path) else { continue };
        // Without a lock, another writer may still be active.
        if matches!(left.try_lock(), Ok(Lock::Held)) {
            let _ = match kind {
                Kind::Folder => files::remove_folders(&path),
                Kind::File => files::remove_file(&path),
            };
        }
    }
}

/// Returns whether it is a number in a writer's spelling; other names belong to the user.
fn is_random_number(digits: &[u8]) -> bool {
    digits.len() == DIGITS && digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

fn check_free(destination: &Path) -> Result<(), StoreError> {
    match fs::symlink_metadata(destination) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T>(kind: Kind, make: fn(&Path) -> io::Result<T>) {
        let folder = tempfile::tempdir().unwrap();
        let begin = || begin(kind, folder.path(), OsStr::new("it"), make).unwrap();
        let left = folder.path().join("it.partial-0123456789abcdef");
        let made = match kind {
            Kind::Folder => fs::create_dir(&left),
            Kind::File => fs::write(&left, "half of it"),
        };
        made.unwrap();
        let (reserved, _lock) = begin();
        let (beside, _lock) = begin();
        assert!(!left.exists() && reserved.exists() && beside.exists());
    }

    #[test]
    fn remnants_are_removed_and_active_files_stay() {
        check(Kind::File, make_file);
        #[cfg(unix)]
        check(Kind::Folder, make_folder);
    }

    #[test]
    fn an_entry_removed_before_it_was_locked_is_created_again() {
        let folder = tempfile::tempdir().unwrap();
        let (mut attempts, mut others) = (0, Vec::new());
        let make = |path: &Path| -> io::Result<File> {
            let file = File::create_new(path)?;
            attempts += 1;
            match attempts {
                1 => fs::remove_file(path)?,
                2 => {
                    let other = fs::File::open(path)?;
                    other.lock()?;
                    others.push(other);
                }
                _ => {}
            }
            lock_entry(&file, path)?;
            Ok(file)
        };
        let (path, _lock) = begin(Kind::File, folder.path(), OsStr::new("it"), make).unwrap();
        assert!(path.exists());
        assert_eq!((attempts, others.len()), (3, 1));
    }
}
