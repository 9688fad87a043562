//! Page faults of a process or a thread.

/// Page faults up to some moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageFaults {
    /// Faults that were resolved without reading from disk.
    pub minor: u64,
    /// Faults that were read from disk.
    pub major: u64,
}

impl PageFaults {
    /// Returns the faults of all threads of this process; `None` if the system does not report them.
    pub fn of_process() -> Option<Self> {
        #[cfg(target_os = "linux")]
        return Self::of(libc::RUSAGE_SELF);
        #[cfg(not(target_os = "linux"))]
        None
    }

    /// Returns the faults of the calling thread; `None` if the system does not report them.
    pub fn of_thread() -> Option<Self> {
        #[cfg(target_os = "linux")]
        return Self::of(libc::RUSAGE_THREAD);
        #[cfg(not(target_os = "linux"))]
        None
    }

    /// Returns the faults since an earlier moment.
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
        // SAFETY: every bit pattern is a valid value of this type, both the zeros from before the call and what the call
        // writes.
        let usage = unsafe { usage.assume_init() };
        Some(Self {
            minor: u64::try_from(usage.ru_minflt).ok()?,
            major: u64::try_from(usage.ru_majflt).ok()?,
        })
    }
}

/// Counts the major page faults of this process: pages that had to be read from disk.
#[derive(Debug)]
pub struct MajorPageFaults {
    seen: PageFaults,
}

impl MajorPageFaults {
    /// Starts to count; `None` if the system does not report faults.
    pub fn counter() -> Option<Self> {
        Some(Self { seen: PageFaults::of_process()? })
    }

    /// Returns the faults since the last call, or since the start.
    pub fn since_last(&mut self) -> u64 {
        let Some(now) = PageFaults::of_process() else { return 0 };
        let before = std::mem::replace(&mut self.seen, now);
        now.since(before).major
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// More than an allocator keeps of freed memory.
    const FRESH: usize = 64 << 20;

    #[test]
    fn first_touches_are_faults() {
        let before = (PageFaults::of_thread().unwrap(), PageFaults::of_process().unwrap());
        let mut fresh = vec![0u8; FRESH];
        // There are fewer faults on large pages, but at least one.
        fresh.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        std::hint::black_box(&fresh);
        let thread = PageFaults::of_thread().unwrap().since(before.0);
        let process = PageFaults::of_process().unwrap().since(before.1);
        assert!(thread.minor >= 1 && process.minor >= thread.minor, "{thread:?} of {process:?}");
    }

    #[test]
    fn faults_of_another_thread_count_for_the_process_only() {
        let before = PageFaults::of_thread().unwrap();
        let other = std::thread::spawn(|| {
            let fresh = std::hint::black_box(vec![1u8; FRESH]);
            drop(fresh);
            PageFaults::of_thread().unwrap()
        });
        let other = other.join().unwrap();
        let own = PageFaults::of_thread().unwrap().since(before);
        assert!(other.minor > own.minor, "{other:?} and {own:?}");
    }

    #[test]
    fn each_fault_is_reported_once() {
        let mut faults = MajorPageFaults { seen: PageFaults::default() };
        let before = PageFaults::of_process().unwrap();
        assert!(faults.since_last() >= before.major);
        assert!(faults.seen.minor >= before.minor && faults.seen.major >= before.major);
        assert!(faults.seen.minor > 0, "a process has had some");
    }
}
