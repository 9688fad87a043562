//! Injected file system faults for tests.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// A fault of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The disk is full: writes store half of their bytes, and nothing can be created. Reading and removing work.
    Full,
    /// Reads and changes fail; a write stores half of its bytes. Applied from one operation on, this also models a loss of
    /// power.
    Broken,
    /// Writes store half of their bytes and report success.
    Torn,
    /// Reads return half of the requested bytes, which is legal but rarely handled.
    Few,
    /// Files end early.
    Short,
    /// Files have vanished when they are opened.
    Vanished,
}

/// A kind of file operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Open,
    Read,
    Write,
    Sync,
    /// Creates a folder, renames, or changes a length.
    Change,
    Remove,
}

/// The injected outcome of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    NoRoom,
    NotReadable,
    NotThere,
    /// Reports success after half of the work.
    Few,
    End,
}

impl Outcome {
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

/// The error number of a failing disk on Unix systems; the standard library has no kind for it.
pub(crate) const EIO: i32 = 5;

impl Fault {
    /// The outcome of an operation under this fault, if the fault affects it.
    fn outcome(self, operation: Operation) -> Option<Outcome> {
        use Operation::{Change, Open, Read, Sync, Write};
        match (self, operation) {
            (Self::Full, Write | Sync | Change) => Some(Outcome::NoRoom),
            (Self::Broken, _) => Some(Outcome::NotReadable),
            (Self::Torn, Write) | (Self::Few, Read) => Some(Outcome::Few),
            (Self::Short, Read) => Some(Outcome::End),
            (Self::Vanished, Open) => Some(Outcome::NotThere),
            _ => None,
        }
    }
}

/// Makes operations on files below a folder fail while it lives. Other folders are unaffected, so tests can run in
/// parallel; if two plans cover a folder, both apply.
///
/// ```
/// use firebox_store::files::{self, Fault, Faults};
///
/// let folder = tempfile::tempdir().unwrap();
/// let faults = Faults::below(folder.path());
/// faults.from(1, Fault::Full);
/// // The first operation succeeds, and later ones fail.
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
    /// Operations that succeed before the first failure.
    successes: usize,
    /// The number of failures.
    limit: usize,
    /// Affected operations so far.
    affected: usize,
    /// Failed operations so far.
    failed: usize,
}

/// The number of active plans; while it is zero, the lock is not taken.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static PLANS: RwLock<Vec<Arc<Plan>>> = RwLock::new(Vec::new());

impl Faults {
    /// Creates a plan without failures.
    pub fn below(folder: &Path) -> Self {
        let plan = Arc::new(Plan { folder: folder.to_owned(), state: Mutex::default() });
        PLANS.write().unwrap_or_else(PoisonError::into_inner).push(plan.clone());
        COUNT.fetch_add(1, Ordering::Release);
        Self(plan)
    }

    /// Lets all affected operations fail from the `nth` on.
    pub fn from(&self, nth: usize, fault: Fault) {
        *self.state() = State { fault: Some(fault), successes: nth, limit: usize::MAX, ..State::default() };
    }

    /// Lets only the `nth` affected operation fail.
    pub fn once(&self, nth: usize, fault: Fault) {
        *self.state() = State { fault: Some(fault), successes: nth, limit: 1, ..State::default() };
    }

    /// Ends all failures. Returns the number of operations that failed.
    pub fn lift(&self) -> usize {
        std::mem::take(&mut *self.state()).failed
    }

    /// The number of operations that failed since the fault was last set.
    pub fn failed(&self) -> usize {
        self.state().failed
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

/// The injected outcome of an operation, if a test has planned one.
pub(super) fn outcome(operation: Operation, path: &Path) -> Option<Outcome> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let plans = PLANS.read().unwrap_or_else(PoisonError::into_inner);
    plans.iter().filter(|plan| path.starts_with(&plan.folder)).find_map(|plan| {
        let mut state = plan.state.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = state.fault?.outcome(operation)?;
        state.affected += 1;
        let strikes = state.affected > state.successes && state.failed < state.limit;
        state.failed += usize::from(strikes);
        strikes.then_some(outcome)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::{self as files, File};
    use super::*;

    #[test]
    fn faults_behave_as_described_and_only_below_their_folder() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = folder.path().join("file");
        let beside = other.path().join("file");
        let faults = Faults::below(folder.path());
        let kind = |result: io::Result<()>| result.unwrap_err().kind();
        let eio = Outcome::NotReadable.error().kind();
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
