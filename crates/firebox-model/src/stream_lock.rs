//! The lock that a pass holds while it streams weights.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Held by what streams weights: a whole pass, which would only take buffers from another one, or a single step of an interleaved pass.
///
/// A thread of the pool that waits within a pass may begin another pass on top of it, which would wait for a buffer that only the pass
/// below can release. So the lock is taken before the pool is entered.
#[derive(Debug, Default)]
pub(crate) struct StreamLock {
    lock: Mutex<()>,
    waiting: AtomicUsize,
}

impl StreamLock {
    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, ()> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Takes the lock if it is free and no thread waits for it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, ()>> {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            return None;
        }
        match self.lock.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
