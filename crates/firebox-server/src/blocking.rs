//! Runs blocking work outside the async runtime, optionally while holding a permit.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Semaphore;

use crate::error::ApiError;

/// Runs blocking work on a thread of its own.
pub(crate) async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    let result = Arc::new(Mutex::new(None));
    let slot = result.clone();
    run(Box::new(move || {
        let done = work();
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
    }))
    .await?;
    let done = result.lock().unwrap_or_else(PoisonError::into_inner).take();
    done.unwrap_or_else(|| Err(failed()))
}

/// The part of [`blocking`] that does not depend on the types of the work, so that tokio's tasks are compiled once.
async fn run(work: Box<dyn FnOnce() + Send>) -> Result<(), ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| failed())
}

/// Returns the error of work that panicked.
pub(crate) fn failed() -> ApiError {
    ApiError::internal("the request failed; see the server's log")
}

/// Runs blocking work while holding a permit. Work that has started keeps its permit until it ends, even if the
/// client disconnects, so that a client cannot run several at once by asking and leaving.
pub(crate) async fn with_permit<R: Send + 'static>(
    semaphore: &Arc<Semaphore>,
    work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    let permit = semaphore.clone().acquire_owned().await.map_err(|_| ApiError::stopping())?;
    blocking(move || {
        let _permit = permit;
        work()
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;

    #[test]
    fn abandoned_work_keeps_its_permit_until_it_ends() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let semaphore = Arc::new(Semaphore::new(1));
            let (begin, begun) = oneshot::channel();
            let (end, ended) = mpsc::channel::<()>();
            let taken = semaphore.clone();
            let asking = tokio::spawn(async move {
                let work = move || {
                    let _ = begin.send(());
                    let _ = ended.recv();
                    Ok(())
                };
                with_permit(&taken, work).await
            });
            begun.await.unwrap();
            asking.abort();
            assert!(asking.await.unwrap_err().is_cancelled());
            assert_eq!(semaphore.available_permits(), 0, "what was begun goes on");
            end.send(()).unwrap();
            drop(timeout(Duration::from_secs(20), semaphore.acquire()).await.unwrap().unwrap());
        });
    }
}
