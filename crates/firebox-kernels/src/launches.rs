//! Counts kernel launches on accelerators.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_cubecl::cubecl::logging::{LaunchObservation, LaunchObserver};

#[derive(Default)]
struct Counter(AtomicUsize);

impl LaunchObserver for Counter {
    fn launched(&self, _kernel: &'static str) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs `work` and counts the kernels that all threads launch meanwhile.
pub fn launches<R>(work: impl FnOnce() -> R) -> (R, usize) {
    let counter = Arc::new(Counter::default());
    let observation = LaunchObservation::new(counter.clone());
    let result = work();
    drop(observation);
    (result, counter.0.load(Ordering::Relaxed))
}
