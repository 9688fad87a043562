//! What is not finished yet: written beside its destination, made durable, and renamed into place.
//!
//! Its writer holds a lock on it, which the system gives back however the writer ends: what is not locked was
//! left behind. The number of a process would not tell: containers that share a disk have the same ones.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::StoreError;
use crate::files::{self, File, Lock, parent};

/// What stands between the destination's name and a number by chance.
const INFIX: &str = ".partial-";

/// Hexadecimal digits of that number.
const DIGITS: usize = 16;

/// How often something is made anew because somebody who clears up came before its lock.
const ATTEMPTS: usize = 16;

/// Destinations of the imports at work in this process: who comes second is told before all is written.
static AT_WORK: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// The directory beside the destination that an import works in; removed unless published.
pub(crate) struct Partial {
    pub(crate) path: PathBuf,
    /// Absent on Windows, where a directory cannot be opened as a file.
    _lock: Option<File>,
    _at_work: AtWork,
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
        let at_work = AtWork::begin(folder.join(name))?;
        let (path, lock) = begin(Kind::Folder, folder, name, make_folder)?;
        Ok(Self { path, _lock: lock, _at_work: at_work })
    }

    pub(crate) fn publish(self, destination: &Path) -> Result<(), StoreError> {
        sync_folder(&self.path)?;
        // Renaming over an empty directory is allowed, over any other it fails: what came in meanwhile is kept.
        match files::rename(&self.path, destination) {
            Ok(()) => sync_folder(parent(destination)),
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
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
    }
}

/// A destination that is nobody else's in this process.
struct AtWork(PathBuf);

impl AtWork {
    fn begin(destination: PathBuf) -> Result<Self, StoreError> {
        if AT_WORK.lock().unwrap_or_else(PoisonError::into_inner).insert(destination.clone()) {
            Ok(Self(destination))
        } else {
            Err(StoreError::DestinationExists { path: destination })
        }
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        AT_WORK.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// A file beside its destination; removed unless published.
pub(crate) struct PartialFile {
    pub(crate) path: PathBuf,
    destination: PathBuf,
    /// The lock of the file that is written to, which is closed before it is in its place.
    _lock: fs::File,
}

impl PartialFile {
    /// Makes one, and gives the file to write to.
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

/// What is made beside a destination.
#[derive(Clone, Copy)]
enum Kind {
    Folder,
    File,
}

impl Kind {
    /// Opens one so that it can be locked, where that is possible.
    fn open(self, path: &Path) -> io::Result<Option<File>> {
        match self {
            Self::Folder if cfg!(windows) => Ok(None),
            Self::Folder => File::open(path).map(Some),
            Self::File => File::open_with(path, fs::File::options().write(true)).map(Some),
        }
    }
}

/// Makes something beside a destination under a name that no other writer has, wherever that runs, and removes
/// what others have left there.
fn begin<T>(
    kind: Kind,
    folder: &Path,
    destination: &OsStr,
    mut make: impl FnMut(&Path) -> io::Result<T>,
) -> Result<(PathBuf, T), StoreError> {
    let mut prefix = OsString::from(destination);
    prefix.push(INFIX);
    clear_dead(kind, folder, &prefix);
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

/// Whether somebody else has the name, or what was made under it.
fn is_taken(error: ErrorKind) -> bool {
    matches!(error, ErrorKind::AlreadyExists | ErrorKind::NotFound | ErrorKind::WouldBlock)
}

fn make_file(path: &Path) -> io::Result<File> {
    let file = File::create_new(path)?;
    hold(&file, path)?;
    Ok(file)
}

fn make_folder(path: &Path) -> io::Result<Option<File>> {
    files::create_folder(path)?;
    let folder = Kind::Folder.open(path).inspect_err(|_| drop(files::remove_folder(path)))?;
    if let Some(folder) = &folder {
        hold(folder, path)?;
    }
    Ok(folder)
}

/// Locks what has just been made, unless somebody who clears up came before.
fn hold(file: &File, path: &Path) -> io::Result<()> {
    match file.try_lock()? {
        Lock::Busy => Err(ErrorKind::WouldBlock.into()),
        // Where there are no locks nobody clears up. Whoever had this one before has removed what it was of.
        Lock::Held | Lock::Absent => fs::symlink_metadata(path).map(drop),
    }
}

/// Removes what writers of the same destination left when they were killed: each can be as large as the model.
///
/// A failure is no reason not to write: what stays behind is not in the way.
fn clear_dead(kind: Kind, folder: &Path, prefix: &OsStr) {
    let Ok(entries) = files::list(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        // Of the entry itself: a link is not what a writer makes.
        let Ok(found) = entry.file_type() else { continue };
        let is_kind = match kind {
            Kind::Folder => found.is_dir(),
            Kind::File => found.is_file(),
        };
        if !is_kind || !number.is_some_and(is_number) {
            continue;
        }
        let path = entry.path();
        let Ok(Some(left)) = kind.open(&path) else { continue };
        // Without a lock it is not certain that nobody writes it any more.
        if matches!(left.try_lock(), Ok(Lock::Held)) {
            let _ = match kind {
                Kind::Folder => files::remove_folders(&path),
                Kind::File => files::remove_file(&path),
            };
        }
    }
}

/// Whether it is a number in the one spelling that a writer gives it: anything else is somebody's own.
fn is_number(digits: &[u8]) -> bool {
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
        let (at_work, _lock) = begin();
        let (beside, _lock) = begin();
        assert!(!left.exists() && at_work.exists() && beside.exists());
    }

    #[test]
    fn what_is_left_goes_and_what_is_written_stays() {
        check(Kind::File, make_file);
        #[cfg(unix)]
        check(Kind::Folder, make_folder);
    }

    #[test]
    fn what_is_cleared_away_before_it_is_locked_is_made_anew() {
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
            hold(&file, path)?;
            Ok(file)
        };
        let (path, _lock) = begin(Kind::File, folder.path(), OsStr::new("it"), make).unwrap();
        assert!(path.exists());
        assert_eq!((attempts, others.len()), (3, 1));
    }
}
