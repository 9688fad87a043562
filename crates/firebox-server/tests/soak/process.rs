//! What this process takes, as the system counts it.

use std::fmt;
use std::time::{Duration, Instant};

use firebox_allocator::give_back;

/// How long threads and connections that were told to end may take for it.
const ENDING: Duration = Duration::from_secs(10);

/// Servers until pools of threads, allocators and caches of code are as large as they become.
const WARM: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes that no file backs.
    pub anonymous: u64,
    pub threads: usize,
    pub files: usize,
}

impl Footprint {
    pub fn now() -> Self {
        let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
        Self {
            anonymous: firebox_runtime::anonymous_bytes().unwrap(),
            threads: count("/proc/self/task"),
            // One of them is the folder that is read.
            files: count("/proc/self/fd") - 1,
        }
    }

    /// Once nothing runs any more. What was there the last time is waited for; if it stays more, that is what is returned.
    pub fn quiet(last: Option<&Self>) -> Self {
        let began = Instant::now();
        loop {
            give_back();
            // Every thread keeps memory of its own for what comes next, and those of the pool stay.
            rayon::broadcast(|_| give_back());
            let now = Self::now();
            let calm = last.is_some_and(|last| now.threads <= last.threads && now.files <= last.files);
            let waited = if last.is_some() { ENDING } else { ENDING / 5 };
            if calm || began.elapsed() > waited {
                return now;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { anonymous, threads, files } = self;
        write!(f, "{:.1} MiB, {threads} threads, {files} files", *anonymous as f64 / f64::from(1 << 20))
    }
}

/// What is there after each server has ended.
#[derive(Debug, Default)]
pub struct Growth {
    pub quiet: Vec<Footprint>,
}

impl Growth {
    /// A thread or a file more after any server is one that somebody has forgotten.
    pub fn expect_no_handles(&self) {
        let (first, rest) = self.quiet.split_first().unwrap();
        for quiet in rest {
            assert!(quiet.threads <= first.threads && quiet.files <= first.files, "{first}, later {quiet}");
        }
    }

    /// The medians of the first and the last third of what is measured once all is warm.
    fn medians(&self) -> (u64, u64) {
        let warm = &self.quiet[WARM.min(self.quiet.len() - 1)..];
        let third = warm.len().div_ceil(3);
        let median = |part: &[Footprint]| {
            let mut bytes: Vec<u64> = part.iter().map(|quiet| quiet.anonymous).collect();
            bytes.sort_unstable();
            bytes[bytes.len() / 2]
        };
        (median(&warm[..third]), median(&warm[warm.len() - third..]))
    }

    /// Allocators return whole pages only, so that what is left after a server differs by what happened to share pages: by a
    /// few MiB. What is leaked with every answer, session or server adds up over thousands of them.
    pub fn expect_no_memory(&self) {
        let (before, after) = self.medians();
        assert!(
            after < before + before / 20 + (4 << 20),
            "{before} bytes after the first servers, {after} in the end"
        );
    }
}

impl fmt::Display for Growth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let (before, after) = self.medians();
        write!(f, "after each server, MiB:")?;
        for quiet in &self.quiet {
            write!(f, " {:.1}", mebibytes(quiet.anonymous))?;
        }
        write!(f, "\nmedian of the first third {:.1}, of the last {:.1}", mebibytes(before), mebibytes(after))
    }
}
