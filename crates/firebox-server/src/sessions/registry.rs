//! The sessions of a server: creation, lookup, locking and expiry.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::timeout;

use super::archive::Archive;
use super::session_tree::SessionTree;
use crate::blocking::with_permit;
use crate::error::ApiError;
use crate::served_model::ServedModel;

/// Limits and storage of sessions.
#[derive(Debug, Clone)]
pub struct SessionsConfig {
    /// Folder of saved sessions. Without one, sessions cannot be saved.
    pub folder: Option<PathBuf>,
    /// Saved sessions that a key may have.
    pub max_saved: usize,
    /// Bytes that a key's saved sessions may take.
    pub max_saved_bytes: u64,
    /// Sessions that may exist at once.
    pub max_sessions: usize,
    /// How long a session may be unused before it is deleted.
    pub idle_timeout: Duration,
}

impl Default for SessionsConfig {
    fn default() -> Self {
        Self {
            folder: None,
            max_saved: 256,
            max_saved_bytes: 16 << 30,
            max_sessions: 64,
            idle_timeout: Duration::from_secs(60 * 60),
        }
    }
}

type SessionMap = Mutex<BTreeMap<String, Arc<SessionHandle>>>;

/// The sessions of a server, each owned by a key.
#[derive(Debug)]
pub(crate) struct SessionRegistry {
    max_sessions: usize,
    idle_timeout: Duration,
    held: Arc<SessionMap>,
    /// Saved sessions.
    pub(crate) archive: Archive,
}

/// A session and its last state, which can be read while an answer is generated.
#[derive(Debug)]
pub(crate) struct SessionHandle {
    pub id: String,
    scope: String,
    created: u64,
    tree: Arc<tokio::sync::Mutex<SessionTree>>,
    view: Mutex<CachedView>,
    /// Dropped with the handle, which ends the idle timer.
    _here: oneshot::Sender<Infallible>,
}

#[derive(Debug)]
struct CachedView {
    value: Value,
    used: Instant,
}

/// Exclusive access to a session.
#[derive(Debug)]
pub(crate) struct SessionGuard {
    pub held: Arc<SessionHandle>,
    pub tree: OwnedMutexGuard<SessionTree>,
}

impl SessionRegistry {
    pub fn new(config: SessionsConfig) -> Self {
        let SessionsConfig { folder, max_saved, max_saved_bytes, max_sessions, idle_timeout } = config;
        Self {
            max_sessions,
            idle_timeout,
            held: Arc::default(),
            archive: Archive::new(folder, max_saved, max_saved_bytes),
        }
    }

    /// Returns the number of sessions.
    pub fn count(&self) -> usize {
        self.held().len()
    }

    /// Adds a session that `make` creates on a blocking thread.
    pub(crate) async fn begin(
        &self,
        scope: &str,
        served: Arc<ServedModel>,
        make: impl FnOnce(Arc<ServedModel>) -> Result<SessionTree, ApiError> + Send + 'static,
    ) -> Result<Arc<SessionHandle>, ApiError> {
        // Fail early rather than delay others.
        if self.count() >= self.max_sessions {
            return Err(self.full());
        }
        let computing = served.computing.clone();
        let made = with_permit(&computing, move || {
            let mut tree = make(served)?;
            let value = tree.value()?;
            Ok((tree, value))
        });
        let (tree, value) = made.await?;
        let (here, gone) = oneshot::channel();
        let held = Arc::new(SessionHandle {
            id: format!("sess-{}", crate::ids::random_id()),
            scope: scope.to_owned(),
            created: crate::ids::unix_time(),
            tree: Arc::new(tokio::sync::Mutex::new(tree)),
            view: Mutex::new(CachedView { value, used: Instant::now() }),
            _here: here,
        });
        let mut all = self.held();
        // Others may have been added meanwhile.
        if all.len() >= self.max_sessions {
            return Err(self.full());
        }
        all.insert(held.id.clone(), held.clone());
        drop(all);
        tokio::spawn(remove_when_idle(Arc::downgrade(&self.held), held.id.clone(), self.idle_timeout, gone));
        Ok(held)
    }

    fn full(&self) -> ApiError {
        let max_sessions = self.max_sessions;
        ApiError::too_many(format!(
            "there are {max_sessions} sessions, the most allowed; save or delete one first"
        ))
    }

    /// Returns the sessions of a scope.
    pub(crate) fn of_scope(&self, scope: &str) -> Vec<Arc<SessionHandle>> {
        self.held().values().filter(|held| held.scope == scope).cloned().collect()
    }

    /// Finds a session of a scope. Those of other scopes count as missing.
    pub(crate) fn find(&self, scope: &str, id: &str) -> Result<Arc<SessionHandle>, ApiError> {
        let found = self.held().get(id).filter(|held| held.scope == scope).cloned();
        let held = found.ok_or_else(|| ApiError::not_found(format!("there is no session {id:?}")))?;
        held.view().used = Instant::now();
        Ok(held)
    }

    /// Finds a session and locks it.
    pub(crate) fn lock(&self, scope: &str, id: &str) -> Result<SessionGuard, ApiError> {
        let held = self.find(scope, id)?;
        let tree = held.tree.clone().try_lock_owned().map_err(|_| {
            ApiError::conflict("the session is busy with another request; wait until it ends")
        })?;
        Ok(SessionGuard { held, tree })
    }

    pub(crate) fn end(&self, scope: &str, id: &str) -> Result<(), ApiError> {
        let held = self.find(scope, id)?;
        self.held().remove(&held.id);
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<String, Arc<SessionHandle>>> {
        lock(&self.held)
    }
}

fn lock(all: &SessionMap) -> MutexGuard<'_, BTreeMap<String, Arc<SessionHandle>>> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Deletes a session that was unused for `idle_timeout`, to free its memory.
async fn remove_when_idle(
    all: Weak<SessionMap>,
    id: String,
    idle_timeout: Duration,
    mut gone: oneshot::Receiver<Infallible>,
) {
    let mut wait = idle_timeout;
    while timeout(wait, &mut gone).await.is_err() {
        let Some(all) = all.upgrade() else { return };
        let mut all = lock(&all);
        let Some(held) = all.get(&id) else { return };
        // The registry alone holds an unused session.
        let is_used = Arc::strong_count(held) > 1;
        wait = if is_used { idle_timeout } else { idle_timeout.saturating_sub(held.view().used.elapsed()) };
        if wait.is_zero() {
            let held = all.remove(&id);
            drop(all);
            drop(held);
            return;
        }
    }
}

impl SessionHandle {
    /// Returns the last state.
    pub fn value(&self) -> Value {
        let mut value = json!({
            "id": self.id,
            "object": "session",
            "created": self.created,
            // A request that changes the session holds the tree as well.
            "busy": Arc::strong_count(&self.tree) > 1,
        });
        if let (Value::Object(all), Value::Object(view)) = (&mut value, self.view().value.clone()) {
            all.extend(view);
        }
        value
    }

    fn view(&self) -> MutexGuard<'_, CachedView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SessionGuard {
    /// Changes the session on a blocking thread and records its new state.
    pub async fn change<R: Send + 'static>(
        self,
        act: impl FnOnce(&mut SessionTree) -> Result<R, ApiError> + Send + 'static,
    ) -> Result<(Self, R), ApiError> {
        let Self { held, mut tree } = self;
        let (noted, computing) = (held.clone(), tree.served.computing.clone());
        let changed = with_permit(&computing, move || {
            let done = act(&mut tree);
            // A failed change may have had effects.
            let value = tree.value()?;
            let mut view = noted.view();
            view.value = value;
            view.used = Instant::now();
            drop(view);
            Ok((tree, done?))
        });
        let (tree, done) = changed.await?;
        Ok((Self { held, tree }, done))
    }

    /// Releases the lock.
    pub fn release(self) -> Arc<SessionHandle> {
        self.held
    }
}
