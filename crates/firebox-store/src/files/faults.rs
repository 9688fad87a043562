//! Files that fail because a test says so.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// What is wrong with a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// There is no room: half of what is written arrives, and nothing is made. What is there is read and removed.
    Full,
    /// Nothing can be read or changed; of what is being written half arrives. From one operation on that is also what a loss of
    /// power leaves.
    Broken,
    /// Half of what is written arrives, and all is said to have.
    Torn,
    /// Reads give half as much as was asked for, which is no fault, but rare enough to be forgotten.
    Few,
    /// Files end before they should.
    Short,
    /// Files are not there any more when they are to be opened.
    Vanished,
}

/// What is done with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Open,
    Read,
    Write,
    Sync,
    /// Makes a folder, renames, or changes a length.
    Change,
    Remove,
}

/// What comes of an operation instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Strike {
    NoRoom,
    NotReadable,
    NotThere,
    /// It seems to be done, by half.
    Few,
    End,
}

impl Strike {
    pub fn error(self) -> io::Error {
        match self {
            Self::NoRoom => io::ErrorKind::StorageFull.into(),
            Self::NotThere => io::ErrorKind::NotFound.into(),
            Self::Few | Self::End => io::ErrorKind::UnexpectedEof.into(),
            #[cfg(unix)]
            Self::NotReadable => io::Error::from_raw_os_error(EIO),
            #[cfg(not(unix))]
            Self::NotReadable => io::ErrorKind::Other.into(),
        }
    }
}

/// What unix systems call a disk that fails, all by the same number; the standard library has no kind for it.
pub(crate) const EIO: i32 = 5;

impl Fault {
    /// What comes of an operation, where that is touched by the fault.
    fn strikes(self, operation: Operation) -> Option<Strike> {
        use Operation::{Change, Open, Read, Sync, Write};
        match (self, operation) {
            (Self::Full, Write | Sync | Change) => Some(Strike::NoRoom),
            (Self::Broken, _) => Some(Strike::NotReadable),
            (Self::Torn, Write) | (Self::Few, Read) => Some(Strike::Few),
            (Self::Short, Read) => Some(Strike::End),
            (Self::Vanished, Open) => Some(Strike::NotThere),
            _ => None,
        }
    }
}

/// Has files below a folder fail, for as long as it lives. Folders of other tests do not notice, so that tests can run side
/// by side; two for one folder are both asked.
///
/// ```
/// use firebox_store::files::{self, Fault, Faults};
///
/// let folder = tempfile::tempdir().unwrap();
/// let faults = Faults::below(folder.path());
/// faults.from(1, Fault::Full);
/// // The first operation is done, and those after it are not.
/// let error = files::write(&folder.path().join("state"), b"new").unwrap_err();
/// assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
/// faults.lift();
/// files::write(&folder.path().join("state"), b"new").unwrap();
/// ```
#[derive(Debug)]
pub struct Faults(Arc<Plan>);

#[derive(Debug)]
struct Plan {
    folder: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    fault: Option<Fault>,
    /// Operations that are let through before the first that fails.
    before: usize,
    /// How many fail.
    most: usize,
    /// Operations that the fault touches, so far.
    met: usize,
    /// How many of them failed.
    struck: usize,
}

/// How many plans there are: where there is none, nobody asks for the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static PLANS: RwLock<Vec<Arc<Plan>>> = RwLock::new(Vec::new());

impl Faults {
    /// None yet.
    pub fn below(folder: &Path) -> Self {
        let plan = Arc::new(Plan { folder: folder.to_owned(), state: Mutex::default() });
        PLANS.write().unwrap_or_else(PoisonError::into_inner).push(plan.clone());
        COUNT.fetch_add(1, Ordering::Release);
        Self(plan)
    }

    /// From the operation `nth` on, of those that the fault touches, all fail.
    pub fn from(&self, nth: usize, fault: Fault) {
        *self.state() = State { fault: Some(fault), before: nth, most: usize::MAX, ..State::default() };
    }

    /// Only the operation `nth` fails, of those that the fault touches.
    pub fn once(&self, nth: usize, fault: Fault) {
        *self.state() = State { fault: Some(fault), before: nth, most: 1, ..State::default() };
    }

    /// Nothing fails any more. Returns how many operations have.
    pub fn lift(&self) -> usize {
        std::mem::take(&mut *self.state()).struck
    }

    /// How many operations have failed since it was last said what should.
    pub fn struck(&self) -> usize {
        self.state().struck
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::Release);
        let mut plans = PLANS.write().unwrap_or_else(PoisonError::into_inner);
        plans.retain(|plan| !Arc::ptr_eq(plan, &self.0));
    }
}

/// What comes of an operation instead of what should, if a test has said so.
pub(super) fn strike(operation: Operation, path: &Path) -> Option<Strike> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let plans = PLANS.read().unwrap_or_else(PoisonError::into_inner);
    plans.iter().filter(|plan| path.starts_with(&plan.folder)).find_map(|plan| {
        let mut state = plan.state.lock().unwrap_or_else(PoisonError::into_inner);
        let strike = state.fault?.strikes(operation)?;
        state.met += 1;
        let strikes = state.met > state.before && state.struck < state.most;
        state.struck += usize::from(strikes);
        strikes.then_some(strike)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::{self as files, File};
    use super::*;

    #[test]
    fn every_fault_is_what_it_says_and_only_below_its_folder() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = folder.path().join("file");
        let beside = other.path().join("file");
        let faults = Faults::below(folder.path());
        let kind = |result: io::Result<()>| result.unwrap_err().kind();
        let eio = Strike::NotReadable.error().kind();
        fs::write(&path, [7; 100]).unwrap();

        faults.from(0, Fault::Full);
        assert_eq!(kind(files::write(&path, &[8; 100])), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), [8; 50]);
        assert_eq!(kind(files::create_folder(&folder.path().join("new"))), io::ErrorKind::StorageFull);
        assert_eq!(files::read(&path).unwrap().len(), 50);
        files::write(&beside, &[8; 100]).unwrap();

        faults.from(0, Fault::Torn);
        files::write(&path, &[9; 100]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), [9; 50]);

        faults.from(0, Fault::Few);
        let mut buffer = [0; 50];
        assert_eq!(File::open(&path).unwrap().read_at(&mut buffer, 0).unwrap(), 25);
        File::open(&path).unwrap().read_exact_at(&mut buffer, 0).unwrap();
        assert_eq!((buffer, files::read(&path).unwrap()), ([9; 50], vec![9; 50]));

        faults.from(0, Fault::Short);
        let file = File::open(&path).unwrap();
        assert_eq!(kind(file.read_exact_at(&mut buffer, 0)), io::ErrorKind::UnexpectedEof);
        assert!(files::read(&path).unwrap().is_empty());

        faults.from(0, Fault::Vanished);
        assert_eq!(kind(files::read(&path).map(drop)), io::ErrorKind::NotFound);

        faults.from(1, Fault::Broken);
        let mut file = File::create(&path).unwrap();
        assert_eq!(kind(io::Write::write_all(&mut file, &[1; 10])), eio);
        assert_eq!(fs::read(&path).unwrap(), [1; 5]);
        assert_eq!(kind(files::remove_file(&path)), eio);
        assert_eq!(faults.lift(), 2);

        faults.once(1, Fault::Broken);
        assert_eq!(kind(files::read(&path).map(drop)), eio);
        assert_eq!(files::read(&path).unwrap(), [1; 5]);
        drop(faults);
        files::remove_file(&path).unwrap();
    }
}
