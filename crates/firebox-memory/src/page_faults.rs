//! Page faults of a process or a thread.

/// Page faults so far: pages that were missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Faults {
    /// Those that were in memory after all, or came to be without reading.
    pub minor: u64,
    /// Those that had to come from the disk.
    pub major: u64,
}

impl Faults {
    /// Of this process, all threads together; absent where the system does not say.
    pub fn of_process() -> Option<Self> {
        #[cfg(target_os = "linux")]
        return Self::of(libc::RUSAGE_SELF);
        #[cfg(not(target_os = "linux"))]
        None
    }

    /// Of the thread that asks.
    pub fn of_thread() -> Option<Self> {
        #[cfg(target_os = "linux")]
        return Self::of(libc::RUSAGE_THREAD);
        #[cfg(not(target_os = "linux"))]
        None
    }

    /// What came since an earlier time.
    pub fn since(self, before: Self) -> Self {
        Self {
            minor: self.minor.saturating_sub(before.minor),
            major: self.major.saturating_sub(before.major),
        }
    }

    #[cfg(target_os = "linux")]
    fn of(whom: libc::c_int) -> Option<Self> {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the pointer is to a writable value of the type that the call fills in.
        let failed = unsafe { libc::getrusage(whom, usage.as_mut_ptr()) } != 0;
        if failed {
            return None;
        }
        // SAFETY: every bit pattern is such a value, zeros before the call and whatever it has written after it.
        let usage = unsafe { usage.assume_init() };
        Some(Self {
            minor: u64::try_from(usage.ru_minflt).ok()?,
            major: u64::try_from(usage.ru_majflt).ok()?,
        })
    }
}

/// Major page faults of this process: pages that were missing and had to come from the disk.
#[derive(Debug)]
pub struct MajorFaults {
    seen: Faults,
}

impl MajorFaults {
    /// Counts from now on; absent where the system does not say.
    pub fn counter() -> Option<Self> {
        Some(Self { seen: Faults::of_process()? })
    }

    /// How many there were since this was last asked, or since the beginning.
    pub fn since_last(&mut self) -> u64 {
        let Some(now) = Faults::of_process() else { return 0 };
        let before = std::mem::replace(&mut self.seen, now);
        now.since(before).major
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// More than an allocator keeps of what was used before.
    const FRESH: usize = 64 << 20;

    #[test]
    fn pages_that_are_touched_first_are_faults() {
        let before = (Faults::of_thread().unwrap(), Faults::of_process().unwrap());
        let mut fresh = vec![0u8; FRESH];
        // Where pages are large there are fewer of them, but some.
        fresh.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        std::hint::black_box(&fresh);
        let thread = Faults::of_thread().unwrap().since(before.0);
        let process = Faults::of_process().unwrap().since(before.1);
        assert!(thread.minor >= 1 && process.minor >= thread.minor, "{thread:?} of {process:?}");
    }

    #[test]
    fn faults_of_another_thread_are_the_process_s_only() {
        let before = Faults::of_thread().unwrap();
        let other = std::thread::spawn(|| {
            let fresh = std::hint::black_box(vec![1u8; FRESH]);
            drop(fresh);
            Faults::of_thread().unwrap()
        });
        let other = other.join().unwrap();
        let own = Faults::of_thread().unwrap().since(before);
        assert!(other.minor > own.minor, "{other:?} and {own:?}");
    }

    #[test]
    fn what_was_asked_for_is_not_told_again() {
        let mut faults = MajorFaults { seen: Faults::default() };
        let before = Faults::of_process().unwrap();
        assert!(faults.since_last() >= before.major);
        assert!(faults.seen.minor >= before.minor && faults.seen.major >= before.major);
        assert!(faults.seen.minor > 0, "a process has had some");
    }
}
