//! File access for everything that outlives the process and for files that are read in parts.
//!
//! The functions mirror those of the standard library, including their errors, and let a test inject [faults](Faults) at
//! every single operation. The hook is part of every build, so tested code is the code that ships; while no fault is
//! planned it costs one atomic load per system call. Lookups of metadata bypass it because they change nothing, and so do
//! mapped files: a page that cannot be read ends the process, which no test can catch. Code that has to survive a bad disk
//! therefore reads by position first.

mod faults;

pub(crate) use faults::EIO;
pub use faults::{Fault, Faults};

use std::fs;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use faults::{Operation, Outcome, outcome};

/// The result of locking a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// This process holds the lock.
    Held,
    /// Another process holds the lock.
    Busy,
    /// The file system does not support locks.
    Absent,
}

fn has_no_locks(error: &io::Error) -> bool {
    // Returned by network file systems whose server has no locks.
    #[cfg(target_os = "linux")]
    if error.raw_os_error() == Some(libc::ENOLCK) {
        return true;
    }
    error.kind() == ErrorKind::Unsupported
}

/// An open file that knows its path.
#[derive(Debug)]
pub struct File {
    file: fs::File,
    path: PathBuf,
}

impl File {
    /// Opens a file for reading.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_with(path, fs::File::options().read(true))
    }

    /// Creates a file for writing and truncates an existing one.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::open_with(path, fs::File::options().write(true).create(true).truncate(true))
    }

    /// Creates a file for writing; fails if it exists.
    pub fn create_new(path: &Path) -> io::Result<Self> {
        Self::open_with(path, fs::File::options().read(true).write(true).create_new(true))
    }

    /// Opens a file with other options.
    pub fn open_with(path: &Path, options: &fs::OpenOptions) -> io::Result<Self> {
        check_faults(Operation::Open, path)?;
        Ok(Self { file: options.open(path)?, path: path.to_owned() })
    }

    /// Locks the file for this process until it and its clones are closed, however the process ends.
    pub fn try_lock(&self) -> io::Result<Lock> {
        match self.file.try_lock() {
            Ok(()) => Ok(Lock::Held),
            Err(fs::TryLockError::WouldBlock) => Ok(Lock::Busy),
            Err(fs::TryLockError::Error(error)) if has_no_locks(&error) => Ok(Lock::Absent),
            Err(fs::TryLockError::Error(error)) => Err(error),
        }
    }

    /// The underlying file, for mapping and metadata.
    pub fn system(&self) -> &fs::File {
        &self.file
    }

    /// Makes all writes durable.
    pub fn sync_all(&self) -> io::Result<()> {
        check_faults(Operation::Sync, &self.path)?;
        self.file.sync_all()
    }

    /// Truncates the file, or extends it with zeros.
    pub fn set_len(&self, length: u64) -> io::Result<()> {
        check_faults(Operation::Change, &self.path)?;
        self.file.set_len(length)
    }

    /// Reads from byte `start` on, as much as the system returns. Returns the number of bytes, 0 at the end.
    pub fn read_at(&self, buffer: &mut [u8], start: u64) -> io::Result<usize> {
        let most = self.readable(buffer.len())?;
        read_at(&self.file, &mut buffer[..most], start)
    }

    /// Fills a buffer from byte `start` on.
    pub fn read_exact_at(&self, mut buffer: &mut [u8], mut start: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.read_at(buffer, start) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    buffer = &mut buffer[count..];
                    start += count as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The part of a read that is let through.
    fn readable(&self, length: usize) -> io::Result<usize> {
        match outcome(Operation::Read, &self.path) {
            None => Ok(length),
            Some(Outcome::Few) => Ok(length.min(length.div_ceil(2))),
            Some(Outcome::End) => Ok(0),
            Some(other) => Err(other.error()),
        }
    }
}

impl Read for File {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = self.readable(buffer.len())?;
        self.file.read(&mut buffer[..most])
    }
}

impl Write for File {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match outcome(Operation::Write, &self.path) {
            None => self.file.write(buffer),
            Some(outcome) => {
                self.file.write_all(&buffer[..buffer.len() / 2])?;
                if outcome == Outcome::Few { Ok(buffer.len()) } else { Err(outcome.error()) }
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// Reads a whole file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a whole text file.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(text)
}

/// Overwrites a file and makes it durable. To keep the old content in case of a failure, write beside it and rename.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Lists the entries of a folder.
pub fn list(path: &Path) -> io::Result<fs::ReadDir> {
    check_faults(Operation::Open, path)?;
    fs::read_dir(path)
}

/// Creates a folder.
pub fn create_folder(path: &Path) -> io::Result<()> {
    check_faults(Operation::Change, path)?;
    fs::create_dir(path)
}

/// Creates a folder and its missing parents.
pub fn create_folders(path: &Path) -> io::Result<()> {
    check_faults(Operation::Change, path)?;
    fs::create_dir_all(path)
}

/// Renames a file or folder and replaces an existing one.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    check_faults(Operation::Change, to)?;
    fs::rename(from, to)
}

/// Removes a file.
pub fn remove_file(path: &Path) -> io::Result<()> {
    check_faults(Operation::Remove, path)?;
    fs::remove_file(path)
}

/// Removes an empty folder.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    check_faults(Operation::Remove, path)?;
    fs::remove_dir(path)
}

/// Removes a folder and all its contents.
pub fn remove_folders(path: &Path) -> io::Result<()> {
    check_faults(Operation::Remove, path)?;
    fs::remove_dir_all(path)
}

/// Makes renames in a folder durable.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(windows) {
        // Windows cannot open a directory as a file, and journals its entries.
        return Ok(());
    }
    check_faults(Operation::Sync, path)?;
    fs::File::open(path)?.sync_all()
}

/// The folder that contains a path.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn check_faults(operation: Operation, path: &Path) -> io::Result<()> {
    outcome(operation, path).map_or(Ok(()), |outcome| Err(outcome.error()))
}

#[cfg(unix)]
fn read_at(file: &fs::File, buffer: &mut [u8], start: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, start)
}

#[cfg(windows)]
fn read_at(file: &fs::File, buffer: &mut [u8], start: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, start)
}
