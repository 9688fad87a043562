//! The resources of this process, as the system reports them.

use std::fmt;
use std::time::{Duration, Instant};

use firebox_allocator::release_to_os;

/// How long threads and connections may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Servers until thread pools, allocators and code caches have their full size.
const WARM_UP_SERVERS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Anonymous memory in bytes.
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
            // One of them is the folder being read.
            files: count("/proc/self/fd") - 1,
        }
    }

    /// Measures once all work has ended: waits for the counts of `last`, and returns what remains above them.
    pub fn quiet(last: Option<&Self>) -> Self {
        let began = Instant::now();
        loop {
            release_to_os();
            // Each thread keeps free memory, and those of the pool stay.
            rayon::broadcast(|_| release_to_os());
            let now = Self::now();
            let calm = last.is_some_and(|last| now.threads <= last.threads && now.files <= last.files);
            let waited = if last.is_some() { END_TIMEOUT } else { END_TIMEOUT / 5 };
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

/// Resources after each server.
#[derive(Debug, Default)]
pub struct Growth {
    pub quiet: Vec<Footprint>,
}

impl Growth {
    /// Asserts that no server left a thread or a file.
    pub fn expect_no_handles(&self) {
        let (first, rest) = self.quiet.split_first().unwrap();
        for quiet in rest {
            assert!(quiet.threads <= first.threads && quiet.files <= first.files, "{first}, later {quiet}");
        }
    }

    /// Returns the medians of the first and the last third after warm-up.
    fn medians(&self) -> (u64, u64) {
        let warm = &self.quiet[WARM_UP_SERVERS.min(self.quiet.len() - 1)..];
        let third = warm.len().div_ceil(3);
        let median = |part: &[Footprint]| {
            let mut bytes: Vec<u64> = part.iter().map(|quiet| quiet.anonymous).collect();
            bytes.sort_unstable();
            bytes[bytes.len() / 2]
        };
        (median(&warm[..third]), median(&warm[warm.len() - third..]))
    }

    /// Asserts that memory does not grow. Allocators return whole pages, so a few MiB vary with what shares
    /// pages; leaks add up over thousands of answers.
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
