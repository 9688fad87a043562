use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::timeout;

use super::archive::Archive;
use super::dialogue::Dialogue;
use crate::app::in_turn;
use crate::error::ApiError;
use crate::served::Served;

/// How sessions are kept.
#[derive(Debug, Clone)]
pub struct SessionsConfig {
    /// Where they are saved; nowhere, where none is said.
    pub folder: Option<PathBuf>,
    /// How many of them a key may have there.
    pub most_saved: usize,
    /// Bytes that those of a key may take there.
    pub saved_bytes: u64,
    /// How many there may be at once.
    pub most: usize,
    /// How long nobody may ask for one before it goes.
    pub idle: Duration,
}

impl Default for SessionsConfig {
    fn default() -> Self {
        Self {
            folder: None,
            most_saved: 256,
            saved_bytes: 16 << 30,
            most: 64,
            idle: Duration::from_secs(60 * 60),
        }
    }
}

type All = Mutex<BTreeMap<String, Arc<Held>>>;

/// The sessions of a server, each of the key that has begun it.
#[derive(Debug)]
pub(crate) struct Sessions {
    most: usize,
    idle: Duration,
    held: Arc<All>,
    /// Those that were saved.
    pub(super) archive: Archive,
}

/// A session, and how it was when it was changed last: whoever looks does not wait for an answer to end.
#[derive(Debug)]
pub(super) struct Held {
    pub id: String,
    scope: String,
    created: u64,
    dialogue: Arc<tokio::sync::Mutex<Dialogue>>,
    seen: Mutex<Seen>,
    /// Goes with it, which ends the wait for it to be idle.
    _here: oneshot::Sender<Infallible>,
}

#[derive(Debug)]
struct Seen {
    value: Value,
    used: Instant,
}

/// A session that nobody else changes meanwhile.
#[derive(Debug)]
pub(super) struct Taken {
    pub held: Arc<Held>,
    pub dialogue: OwnedMutexGuard<Dialogue>,
}

impl Sessions {
    pub fn new(config: SessionsConfig) -> Self {
        let SessionsConfig { folder, most_saved, saved_bytes, most, idle } = config;
        Self { most, idle, held: Arc::default(), archive: Archive::new(folder, most_saved, saved_bytes) }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.held().len()
    }

    /// Takes one in that is made on a thread of its own.
    pub(super) async fn begin(
        &self,
        scope: &str,
        served: Arc<Served>,
        make: impl FnOnce(Arc<Served>) -> Result<Dialogue, ApiError> + Send + 'static,
    ) -> Result<Arc<Held>, ApiError> {
        // Making one for nothing would keep others waiting.
        if self.count() >= self.most {
            return Err(self.full());
        }
        let computing = served.computing.clone();
        let made = in_turn(&computing, move || {
            let mut dialogue = make(served)?;
            let value = dialogue.value()?;
            Ok((dialogue, value))
        });
        let (dialogue, value) = made.await?;
        let (here, gone) = oneshot::channel();
        let held = Arc::new(Held {
            id: format!("sess-{}", crate::unique()),
            scope: scope.to_owned(),
            created: crate::now(),
            dialogue: Arc::new(tokio::sync::Mutex::new(dialogue)),
            seen: Mutex::new(Seen { value, used: Instant::now() }),
            _here: here,
        });
        let mut all = self.held();
        // Others may have come meanwhile.
        if all.len() >= self.most {
            return Err(self.full());
        }
        all.insert(held.id.clone(), held.clone());
        drop(all);
        tokio::spawn(go_when_idle(Arc::downgrade(&self.held), held.id.clone(), self.idle, gone));
        Ok(held)
    }

    fn full(&self) -> ApiError {
        let most = self.most;
        ApiError::too_many(format!(
            "there are {most} sessions, and no more may be; delete one, or save it first"
        ))
    }

    /// Those of a key.
    pub(super) fn of(&self, scope: &str) -> Vec<Arc<Held>> {
        self.held().values().filter(|held| held.scope == scope).cloned().collect()
    }

    /// One of a key. Those of others are as good as none.
    pub(super) fn find(&self, scope: &str, id: &str) -> Result<Arc<Held>, ApiError> {
        let found = self.held().get(id).filter(|held| held.scope == scope).cloned();
        let held = found.ok_or_else(|| ApiError::nowhere(format!("there is no session {id:?}")))?;
        held.seen().used = Instant::now();
        Ok(held)
    }

    /// The same, to change it.
    pub(super) fn take(&self, scope: &str, id: &str) -> Result<Taken, ApiError> {
        let held = self.find(scope, id)?;
        let dialogue = held.dialogue.clone().try_lock_owned().map_err(|_| {
            ApiError::conflict(
                "the session is busy with another request; wait until that has ended, or fork before",
            )
        })?;
        Ok(Taken { held, dialogue })
    }

    pub(super) fn end(&self, scope: &str, id: &str) -> Result<(), ApiError> {
        let held = self.find(scope, id)?;
        self.held().remove(&held.id);
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Held>>> {
        lock(&self.held)
    }
}

fn lock(all: &All) -> MutexGuard<'_, BTreeMap<String, Arc<Held>>> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets a session go once nobody has asked for it for so long: it has memory that others could have.
async fn go_when_idle(all: Weak<All>, id: String, idle: Duration, mut gone: oneshot::Receiver<Infallible>) {
    let mut wait = idle;
    while timeout(wait, &mut gone).await.is_err() {
        let Some(all) = all.upgrade() else { return };
        let mut all = lock(&all);
        let Some(held) = all.get(&id) else { return };
        // Only the registry has those that nobody uses.
        let is_used = Arc::strong_count(held) > 1;
        wait = if is_used { idle } else { idle.saturating_sub(held.seen().used.elapsed()) };
        if wait.is_zero() {
            let held = all.remove(&id);
            drop(all);
            drop(held);
            return;
        }
    }
}

impl Held {
    /// As it was when it was changed last.
    pub fn value(&self) -> Value {
        let mut value = json!({
            "id": self.id,
            "object": "session",
            "created": self.created,
            // Whoever changes it holds it too.
            "busy": Arc::strong_count(&self.dialogue) > 1,
        });
        if let (Value::Object(all), Value::Object(seen)) = (&mut value, self.seen().value.clone()) {
            all.extend(seen);
        }
        value
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    /// Changes it on a thread of its own, and notes how it is then.
    pub async fn change<R: Send + 'static>(
        self,
        act: impl FnOnce(&mut Dialogue) -> Result<R, ApiError> + Send + 'static,
    ) -> Result<(Self, R), ApiError> {
        let Self { held, mut dialogue } = self;
        let (noted, computing) = (held.clone(), dialogue.served.computing.clone());
        let changed = in_turn(&computing, move || {
            let done = act(&mut dialogue);
            // What failed may have changed something on its way.
            let value = dialogue.value()?;
            let mut seen = noted.seen();
            seen.value = value;
            seen.used = Instant::now();
            drop(seen);
            Ok((dialogue, done?))
        });
        let (dialogue, done) = changed.await?;
        Ok((Self { held, dialogue }, done))
    }

    /// The session once nobody changes it any more.
    pub fn let_go(self) -> Arc<Held> {
        self.held
    }
}
