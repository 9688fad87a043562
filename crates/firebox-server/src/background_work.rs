//! Work that takes a core for long: little at once and one of every key, by threads that give way to the engine's.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use firebox_runtime::lower_thread_priority;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::blocking::failed;
use crate::error::ApiError;

/// Bounds how much costly work of one kind runs at once. Work of one key delays other work of that key, and that of other keys
/// by one piece.
#[derive(Debug)]
pub(crate) struct BackgroundWork {
    all: Arc<Semaphore>,
    of_keys: Mutex<HashMap<String, Arc<Semaphore>>>,
}

/// The permission to run work of a key.
#[derive(Debug)]
struct Permit {
    _all: OwnedSemaphorePermit,
    _of_key: OwnedSemaphorePermit,
}

impl BackgroundWork {
    /// Lets so many pieces of work run at once, but at least one.
    pub fn new(most: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(most.max(1))), of_keys: Mutex::default() }
    }

    /// Runs work of a key once it may. A request whose client leaves before gives its turn up; work that has begun goes on
    /// without its client, so that a client cannot run several by asking and leaving.
    pub async fn run<R: Send + 'static>(
        &self,
        scope: &str,
        work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
    ) -> Result<R, ApiError> {
        let permit = self.acquire(scope).await?;
        let (done, result) = oneshot::channel();
        let run = move || {
            let _permit = permit;
            lower_thread_priority();
            // The request is answered that it failed; the panic is in the log.
            if let Ok(value) = catch_unwind(AssertUnwindSafe(work)) {
                let _ = done.send(value);
            }
        };
        let name = "firebox-background".to_owned();
        thread::Builder::new()
            .name(name)
            .spawn(run)
            .map_err(|_| ApiError::too_many("no thread is left; ask again later"))?;
        result.await.map_err(|_| failed())?
    }

    async fn acquire(&self, scope: &str) -> Result<Permit, ApiError> {
        let of_key = self.of_key(scope).acquire_owned().await.map_err(|_| ApiError::stopping())?;
        let all = self.all.clone().acquire_owned().await.map_err(|_| ApiError::stopping())?;
        Ok(Permit { _all: all, _of_key: of_key })
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
    use std::sync::mpsc;
    use std::task::Poll;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    fn block_on<R>(future: impl Future<Output = R>) -> R {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn work_of_one_key_runs_one_piece_at_a_time() {
        block_on(async {
            let work = BackgroundWork::new(2);
            let first = work.acquire("one").await.unwrap();
            let mut second = pin!(work.run("one", || Ok(1)));
            let is_pending = poll_fn(|context| Poll::Ready(second.as_mut().poll(context).is_pending()));
            assert!(is_pending.await);
            assert_eq!(work.run("other", || Ok(2)).await.unwrap(), 2);
            drop(first);
            assert_eq!(second.await.unwrap(), 1);
        });
    }

    #[test]
    fn work_without_its_client_keeps_its_turn_until_it_ends() {
        block_on(async {
            let work = Arc::new(BackgroundWork::new(1));
            let (begin, begun) = oneshot::channel();
            let (end, ended) = mpsc::channel::<()>();
            let shared = work.clone();
            let asking = tokio::spawn(async move {
                let piece = move || {
                    let _ = begin.send(());
                    let _ = ended.recv();
                    Ok(())
                };
                shared.run("one", piece).await
            });
            begun.await.unwrap();
            asking.abort();
            assert!(asking.await.unwrap_err().is_cancelled());
            assert_eq!(work.all.available_permits(), 0);
            end.send(()).unwrap();
            timeout(Duration::from_secs(20), work.run("other", || Ok(()))).await.unwrap().unwrap();
        });
    }

    #[test]
    fn a_panic_fails_its_request_alone() {
        block_on(async {
            let work = BackgroundWork::new(1);
            let failed = work.run("one", || -> Result<(), ApiError> { panic!("on purpose") }).await;
            assert_eq!(failed.unwrap_err().status, axum::http::StatusCode::INTERNAL_SERVER_ERROR);
            assert_eq!(work.run("one", || Ok(3)).await.unwrap(), 3);
        });
    }

    /// The nice value of the calling thread, which is the 19th field of its state.
    #[cfg(target_os = "linux")]
    fn nice() -> i32 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        after_name.split_whitespace().nth(16).unwrap().parse().unwrap()
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn its_threads_give_way_to_those_of_the_engine() {
        block_on(async {
            let before = nice();
            let during = BackgroundWork::new(1).run("one", || Ok(nice())).await.unwrap();
            assert!(during > before, "{during} is no more than {before}");
            assert_eq!(nice(), before, "other threads keep their own");
        });
    }
}
