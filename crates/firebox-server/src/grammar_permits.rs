//! Permits to compile grammars: a few at once, and one of every key.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// Bounds how many grammars are compiled at once. Costly grammars of one key delay other grammars of that key, and those of
/// other keys by one.
#[derive(Debug)]
pub(crate) struct GrammarPermits {
    all: Arc<Semaphore>,
    of_keys: Mutex<HashMap<String, Arc<Semaphore>>>,
}

/// The permission to compile a grammar of a key.
#[derive(Debug)]
pub(crate) struct GrammarPermit {
    _all: OwnedSemaphorePermit,
    _of_key: OwnedSemaphorePermit,
}

impl GrammarPermits {
    pub fn new(most: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(most.max(1))), of_keys: Mutex::default() }
    }

    /// Waits for a permit. A request whose client leaves meanwhile takes none.
    pub async fn acquire(&self, scope: &str) -> Result<GrammarPermit, ApiError> {
        let of_key = self.of_key(scope).acquire_owned().await.map_err(|_| ApiError::stopping())?;
        let all = self.all.clone().acquire_owned().await.map_err(|_| ApiError::stopping())?;
        Ok(GrammarPermit { _all: all, _of_key: of_key })
    }

    fn of_key(&self, scope: &str) -> Arc<Semaphore> {
        let mut of_keys = self.of_keys.lock().unwrap_or_else(PoisonError::into_inner);
        // Permits and those who wait for one hold a reference.
        of_keys.retain(|_, semaphore| Arc::strong_count(semaphore) > 1);
        of_keys.entry(scope.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use super::*;

    #[test]
    fn grammars_of_one_key_are_compiled_one_at_a_time() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let permits = GrammarPermits::new(2);
            let first = permits.acquire("one").await.unwrap();
            let mut second = pin!(permits.acquire("one"));
            let is_pending = poll_fn(|context| Poll::Ready(second.as_mut().poll(context).is_pending()));
            assert!(is_pending.await);
            let other = permits.acquire("other").await.unwrap();
            drop((first, other));
            second.await.unwrap();
        });
    }
}
