//! The one way to files that outlive a process, and to those that are read a part at a time.
//!
//! What stands here is what the standard library has, with the same answers. It stands here so that a test can have files
//! [fail](Faults) where they are used for real, at every single operation. The hook is part of every build: what is tested
//! is what runs, and while nothing is to fail it is the look at one number beside a call of the system. Looking files up
//! changes nothing and goes past it, and so does memory that a file is mapped into: a page that cannot be read there ends
//! the process, which no test can catch. So whatever has to survive a bad disk is read by position first.

mod faults;

pub(crate) use faults::EIO;
pub use faults::{Fault, Faults};

use std::fs;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use faults::{Operation, Strike, strike};

/// What came of locking a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// Nobody else can have it now.
    Held,
    /// Somebody else has it.
    Busy,
    /// There are none on this file system.
    Absent,
}

fn has_no_locks(error: &io::Error) -> bool {
    // What a network's file system says whose server has none.
    #[cfg(target_os = "linux")]
    if error.raw_os_error() == Some(libc::ENOLCK) {
        return true;
    }
    error.kind() == ErrorKind::Unsupported
}

/// An open file that knows where it is.
#[derive(Debug)]
pub struct File {
    file: fs::File,
    path: PathBuf,
}

impl File {
    /// Opens a file to read it.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_with(path, fs::File::options().read(true))
    }

    /// Makes a file to write to, in the place of what is there.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::open_with(path, fs::File::options().write(true).create(true).truncate(true))
    }

    /// Makes a file to write to where there is none.
    pub fn create_new(path: &Path) -> io::Result<Self> {
        Self::open_with(path, fs::File::options().read(true).write(true).create_new(true))
    }

    /// Opens a file in any other way.
    pub fn open_with(path: &Path, options: &fs::OpenOptions) -> io::Result<Self> {
        pass(Operation::Open, path)?;
        Ok(Self { file: options.open(path)?, path: path.to_owned() })
    }

    /// Takes it for this process alone, until it and what was cloned of it are closed, however the process ends.
    pub fn try_lock(&self) -> io::Result<Lock> {
        match self.file.try_lock() {
            Ok(()) => Ok(Lock::Held),
            Err(fs::TryLockError::WouldBlock) => Ok(Lock::Busy),
            Err(fs::TryLockError::Error(error)) if has_no_locks(&error) => Ok(Lock::Absent),
            Err(fs::TryLockError::Error(error)) => Err(error),
        }
    }

    /// The system's own file, to map it and to look it up.
    pub fn system(&self) -> &fs::File {
        &self.file
    }

    /// Makes all that was written survive a loss of power.
    pub fn sync_all(&self) -> io::Result<()> {
        pass(Operation::Sync, &self.path)?;
        self.file.sync_all()
    }

    /// Cuts the file off, or appends zeros.
    pub fn set_len(&self, length: u64) -> io::Result<()> {
        pass(Operation::Change, &self.path)?;
        self.file.set_len(length)
    }

    /// Reads from byte `start` on, as far as the system likes. Returns how many bytes that were; none at the end.
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

    /// How much of a read is let through.
    fn readable(&self, length: usize) -> io::Result<usize> {
        match strike(Operation::Read, &self.path) {
            None => Ok(length),
            Some(Strike::Few) => Ok(length.min(length.div_ceil(2))),
            Some(Strike::End) => Ok(0),
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
        match strike(Operation::Write, &self.path) {
            None => self.file.write(buffer),
            Some(strike) => {
                self.file.write_all(&buffer[..buffer.len() / 2])?;
                if strike == Strike::Few { Ok(buffer.len()) } else { Err(strike.error()) }
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

/// All of a file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// All of a file that is text.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(text)
}

/// Writes a file in the place of what is there, and makes it durable. Whoever must not lose what is there writes beside it
/// and renames.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// What a folder has.
pub fn list(path: &Path) -> io::Result<fs::ReadDir> {
    pass(Operation::Open, path)?;
    fs::read_dir(path)
}

/// Makes a folder where there is none.
pub fn create_folder(path: &Path) -> io::Result<()> {
    pass(Operation::Change, path)?;
    fs::create_dir(path)
}

/// Makes a folder and those above it, as far as they are not there.
pub fn create_folders(path: &Path) -> io::Result<()> {
    pass(Operation::Change, path)?;
    fs::create_dir_all(path)
}

/// Gives a file or folder another name, in the place of what has that name.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    pass(Operation::Change, to)?;
    fs::rename(from, to)
}

/// Removes a file.
pub fn remove_file(path: &Path) -> io::Result<()> {
    pass(Operation::Remove, path)?;
    fs::remove_file(path)
}

/// Removes a folder that has nothing in it.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    pass(Operation::Remove, path)?;
    fs::remove_dir(path)
}

/// Removes a folder with all that is in it.
pub fn remove_folders(path: &Path) -> io::Result<()> {
    pass(Operation::Remove, path)?;
    fs::remove_dir_all(path)
}

/// Makes renames in a folder survive a loss of power.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(windows) {
        // A directory cannot be opened as a file there, and its entries are journalled.
        return Ok(());
    }
    pass(Operation::Sync, path)?;
    fs::File::open(path)?.sync_all()
}

/// The folder that a path is in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn pass(operation: Operation, path: &Path) -> io::Result<()> {
    strike(operation, path).map_or(Ok(()), |strike| Err(strike.error()))
}

#[cfg(unix)]
fn read_at(file: &fs::File, buffer: &mut [u8], start: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, start)
}

#[cfg(windows)]
fn read_at(file: &fs::File, buffer: &mut [u8], start: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, start)
}
