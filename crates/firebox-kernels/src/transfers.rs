//! Counts what passes between host and device.

use std::sync::atomic::{AtomicUsize, Ordering};

static UPLOADS: AtomicUsize = AtomicUsize::new(0);
static READ: AtomicUsize = AtomicUsize::new(0);

/// Transfers that Firebox asked for: inputs of passes, and results that are read back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transfers {
    /// Uploads of any size.
    pub uploads: usize,
    /// Bytes that were read back.
    pub bytes_read: usize,
}

/// Runs `work` and counts the transfers of all threads meanwhile.
pub fn transfers<R>(work: impl FnOnce() -> R) -> (R, Transfers) {
    let now = || [&UPLOADS, &READ].map(|counter| counter.load(Ordering::Relaxed));
    let before = now();
    let result = work();
    let [uploads, bytes_read] = now();
    (result, Transfers { uploads: uploads - before[0], bytes_read: bytes_read - before[1] })
}

/// Counts an upload that goes past [`StepInput`](crate::step::StepInput).
pub fn count_upload() {
    UPLOADS.fetch_add(1, Ordering::Relaxed);
}

/// Counts bytes that are read back.
pub fn count_read(bytes: usize) {
    READ.fetch_add(bytes, Ordering::Relaxed);
}
