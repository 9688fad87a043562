//! The heads of a model that are in memory: acquired by sequences, loaded in the background, and evicted to make room.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use firebox_model::Head;

use super::event::{HeadEvent, HeadState};
use super::loader::load_all;
use super::retry::Retry;
use super::source::{HeadSource, ReadyHead};
use crate::telemetry::{Counter, Gauge, Kind, Meters, Telemetry};
use crate::{Budget, Charge, RuntimeError};
use firebox_schedule::Succession as HeadHistory;

/// The name of the head that replaces heads that cannot be used. It is loaded when the pool is created and stays in memory.
pub const FALLBACK: &str = "universal";

/// The most events that a pool holds until they are read.
const MAX_EVENTS: usize = 256;

/// How many likely successors of a head are prefetched.
const PREFETCHED_SUCCESSORS: usize = 2;

/// Configures a pool of heads.
#[derive(Debug, Clone)]
pub struct HeadPoolConfig {
    /// How long a sequence waits for a head that is not in memory before it takes the fallback.
    pub max_wait: Duration,
    /// The most bytes of heads in memory.
    pub max_bytes: u64,
    /// The budget that heads in memory are charged to. The default is the budget that their model was
    /// [fitted](crate::Model::open_within) into.
    pub budget: Option<Budget>,
    /// Which head usually follows which, for prefetching.
    pub history: HeadHistory,
}

impl HeadPoolConfig {
    /// Waits up to a minute for a head, rather than taking the fallback.
    pub fn patient() -> Self {
        Self { max_wait: Duration::from_secs(60), ..Self::default() }
    }
}

impl Default for HeadPoolConfig {
    fn default() -> Self {
        Self {
            max_wait: Duration::from_millis(500),
            max_bytes: u64::MAX,
            budget: None,
            history: HeadHistory::default(),
        }
    }
}

/// The result of a request for a head.
#[derive(Debug, Clone)]
pub struct HeadSwitch {
    /// The head to use; `None` for the model's own last layers.
    pub head: Option<Arc<Head>>,
    /// Why it is not the requested one.
    pub fallback_reason: Option<Arc<RuntimeError>>,
    /// Whether it was not in memory and had to be waited for.
    pub waited: bool,
    /// How long the request took.
    pub took: Duration,
}

impl HeadSwitch {
    /// A switch that took no time.
    pub(crate) fn immediate(head: Option<Arc<Head>>, fallback_reason: Option<Arc<RuntimeError>>) -> Self {
        Self { head, fallback_reason, waited: false, took: Duration::ZERO }
    }
}

/// The heads of a model, as many of them in memory as fit. Clones share one pool.
#[derive(Debug, Clone)]
pub struct HeadPool(Arc<Shared>);

#[derive(Debug)]
pub(super) struct Shared {
    pub source: Arc<dyn HeadSource>,
    pub config: HeadPoolConfig,
    state: Mutex<State>,
    /// Notified after every load.
    pub changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub resident: BTreeMap<String, ResidentHead>,
    pub retries: BTreeMap<String, Retry>,
    /// The generation of a head that could not be used, and why.
    pub failures: BTreeMap<String, (Option<u64>, Arc<RuntimeError>)>,
    /// Heads to load. Those that a sequence waits for come first.
    pub requests: VecDeque<LoadRequest>,
    pub loading: Option<String>,
    pub has_loader: bool,
    history: HeadHistory,
    events: VecDeque<HeadEvent>,
    /// Counts uses, to find the least recently used head.
    pub time: u64,
    /// The charge for the memory of a removed head, until another head takes that memory.
    pub reusable: Option<Charge>,
    pub meters: Arc<Meters>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LoadRequest {
    pub name: String,
    /// Whether no sequence waits for it.
    pub prefetch: bool,
}

#[derive(Debug)]
pub(super) struct ResidentHead {
    pub ready: ReadyHead,
    pub used: u64,
    pub charge: Option<Charge>,
}

impl HeadPool {
    /// Creates a pool. The [fallback](FALLBACK) is loaded at once, if there is one, and stays.
    pub fn new(source: Arc<dyn HeadSource>, config: HeadPoolConfig) -> Result<Self, RuntimeError> {
        let state = Mutex::new(State { history: config.history.clone(), ..State::default() });
        let pool = Self(Arc::new(Shared { source, config, state, changed: Condvar::new() }));
        // A table that cannot be read is reported when a head is acquired.
        if let Ok(Some(_)) = pool.0.source.generation(FALLBACK) {
            pool.0.load(&LoadRequest { name: FALLBACK.into(), prefetch: true });
        }
        Ok(pool)
    }

    /// Acquires a head. Waits for it if it is not in memory. If that takes too long or fails, the fallback is taken, or the
    /// model's own last layers if there is no fallback.
    pub fn acquire(&self, name: &str) -> HeadSwitch {
        let began = Instant::now();
        let acquired = self.0.acquire(name, began).and_then(|(head, waited)| {
            self.0.source.build(&head)?;
            Ok((head, waited))
        });
        let (head, fallback_reason, waited) = match acquired {
            Ok((head, waited)) => (Some(head), None, waited),
            Err(reason) => {
                if matches!(self.0.source.generation(FALLBACK), Ok(Some(_))) {
                    self.prefetch(FALLBACK);
                }
                (self.0.state().touch(FALLBACK), Some(reason), false)
            }
        };
        HeadSwitch { head, fallback_reason, waited, took: began.elapsed() }
    }

    /// Records that a sequence went from one head to another, and prefetches likely successors.
    pub fn note(&self, before: &str, after: &str) {
        let likely: Vec<String> = {
            let mut state = self.0.state();
            state.history.note(before, after);
            state
                .history
                .likeliest(after)
                .into_iter()
                .take(PREFETCHED_SUCCESSORS)
                .map(str::to_owned)
                .collect()
        };
        likely.iter().for_each(|name| self.prefetch(name));
    }

    /// Loads a head in the background, because it may be needed soon.
    pub fn prefetch(&self, name: &str) {
        let generation = self.0.current_generation(name);
        let mut state = self.0.state();
        if !state.has(name, generation) && state.may_retry(name) {
            self.0.request(&mut state, LoadRequest { name: name.to_owned(), prefetch: true });
        }
    }

    /// Returns whether a head can be acquired without waiting.
    pub fn is_resident(&self, name: &str) -> bool {
        let generation = self.0.current_generation(name);
        self.0.state().has(name, generation)
    }

    /// Waits until nothing is being loaded.
    pub fn wait_until_idle(&self) {
        let mut state = self.0.state();
        while state.loading.is_some() || !state.requests.is_empty() {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Removes a head from the pool. Sequences that use it keep it; otherwise the next head may take its memory.
    pub fn evict(&self, name: &str) {
        // The lock is held until the head is dropped: the charge for its memory is guarded by it as well.
        drop(self.0.state().remove(name));
    }

    /// Lists the heads that there are.
    pub fn names(&self) -> Vec<String> {
        // A table that cannot be read is the same to the caller as an empty one.
        self.0.source.names().unwrap_or_default()
    }

    /// Lists the heads in memory.
    pub fn in_memory(&self) -> Vec<String> {
        self.0.state().resident.keys().cloned().collect()
    }

    /// Lists the heads that there are, and where each is.
    pub fn states(&self) -> Vec<(String, HeadState)> {
        let names = self.names();
        let state = self.0.state();
        let of = |name: &String| {
            if let Some(resident) = state.resident.get(name) {
                return if resident.is_in_use() { HeadState::Active } else { HeadState::Warm };
            }
            if state.loading.as_ref() == Some(name)
                || state.requests.iter().any(|request| request.name == *name)
            {
                return HeadState::Loading;
            }
            match state.failures.get(name) {
                Some((_, reason)) => HeadState::Failed { reason: reason.clone() },
                None => HeadState::OnDisk,
            }
        };
        names.into_iter().map(|name| (name.clone(), of(&name))).collect()
    }

    /// Returns the bytes that a head takes in memory.
    pub fn bytes_of(&self, name: &str) -> Result<u64, RuntimeError> {
        self.0.source.bytes(name)
    }

    /// Returns the bytes that the heads in memory take.
    pub fn bytes(&self) -> u64 {
        self.0.state().bytes()
    }

    /// Counts in these meters from now on.
    pub(crate) fn report(&self, meters: &Arc<Meters>, telemetry: &Telemetry) {
        self.0.state().meters = meters.clone();
        let shared = Arc::downgrade(&self.0);
        telemetry.ask(meters, "heads", move |snapshot| {
            let Some(shared) = shared.upgrade() else { return false };
            let state = shared.state();
            snapshot.gauges.insert(Gauge::HeadsInMemory, state.resident.len() as u64);
            snapshot.gauges.insert(Gauge::Heads, state.bytes());
            true
        });
    }

    /// Takes the events since the last call. If there were too many, the oldest are missing.
    pub fn events(&self) -> Vec<HeadEvent> {
        self.0.state().events.drain(..).collect()
    }

    /// Returns which head usually follows which.
    pub fn history(&self) -> HeadHistory {
        self.0.state().history.clone()
    }
}

impl Shared {
    fn acquire(self: &Arc<Self>, name: &str, began: Instant) -> Result<(Arc<Head>, bool), Arc<RuntimeError>> {
        let generation = self.source.generation(name).map_err(Arc::new)?;
        let mut state = self.state();
        if generation.is_none() {
            return Err(Arc::new(RuntimeError::NoHead { name: name.to_owned() }));
        }
        self.remove_outdated(&mut state, name, generation)?;
        if let Some(head) = state.touch(name) {
            return Ok((head, false));
        }
        // A failure of one generation says nothing about another.
        if state.failures.get(name).is_some_and(|(failed, _)| *failed != generation) {
            state.retries.remove(name);
            state.failures.remove(name);
        }
        if !state.may_retry(name)
            && let Some((_, reason)) = state.failures.get(name)
        {
            return Err(reason.clone());
        }
        state.failures.remove(name);
        loop {
            // Requested again if it was loaded and evicted before this thread could take it.
            self.request(&mut state, LoadRequest { name: name.to_owned(), prefetch: false });
            let Some(left) = self.config.max_wait.checked_sub(began.elapsed()) else {
                state.log(HeadEvent::TimedOut { name: name.to_owned() });
                let waited = self.config.max_wait;
                return Err(Arc::new(RuntimeError::HeadTimeout { name: name.to_owned(), waited }));
            };
            let waited = self.changed.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            // An older generation may have been on its way when this one was requested.
            self.remove_outdated(&mut state, name, generation)?;
            if let Some(head) = state.touch(name) {
                return Ok((head, true));
            }
            if let Some((_, reason)) = state.failures.get(name) {
                return Err(reason.clone());
            }
        }
    }

    /// Returns the current generation of a head, or `None` if there is none or it cannot be read. It is read from disk, so
    /// call this without the lock.
    pub fn current_generation(&self, name: &str) -> Option<u64> {
        self.source.generation(name).ok().flatten()
    }

    /// Removes a resident head that is not the current generation. A request for an older generation takes the current one.
    fn remove_outdated(
        &self,
        state: &mut State,
        name: &str,
        requested: Option<u64>,
    ) -> Result<(), Arc<RuntimeError>> {
        let resident = state.generation(name);
        if resident.is_some()
            && resident != requested
            && resident != self.source.generation(name).map_err(Arc::new)?
        {
            state.remove(name);
            state.log(HeadEvent::Updated { name: name.to_owned() });
        }
        Ok(())
    }

    fn request(self: &Arc<Self>, state: &mut State, request: LoadRequest) {
        let covers =
            |other: &LoadRequest| other.name == request.name && (request.prefetch || !other.prefetch);
        if state.loading.as_ref() == Some(&request.name) || state.requests.iter().any(covers) {
            return;
        }
        state.requests.retain(|other| other.name != request.name);
        if request.prefetch {
            state.requests.push_back(request);
        } else {
            state.requests.push_front(request);
        }
        if !state.has_loader {
            let shared = Arc::downgrade(self);
            let loader = thread::Builder::new().name("heads".into()).spawn(move || load_all(&shared));
            state.has_loader = loader.is_ok();
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held has left the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ResidentHead {
    /// Returns whether a sequence uses the head.
    fn is_in_use(&self) -> bool {
        // The pool's own reference is one.
        Arc::strong_count(&self.ready.head) > 1
    }
}

impl State {
    /// Returns a resident head, and notes its use.
    fn touch(&mut self, name: &str) -> Option<Arc<Head>> {
        self.time += 1;
        let resident = self.resident.get_mut(name)?;
        resident.used = self.time;
        Some(resident.ready.head.clone())
    }

    fn generation(&self, name: &str) -> Option<u64> {
        self.resident.get(name).map(|resident| resident.ready.generation)
    }

    /// Returns whether this generation of a head is in memory.
    pub fn has(&self, name: &str, generation: Option<u64>) -> bool {
        generation.is_some() && self.generation(name) == generation
    }

    /// Removes a head. If no sequence uses it, the next head may take its memory along with the charge for it. Otherwise both
    /// stay until the last sequence drops it.
    pub fn remove(&mut self, name: &str) -> Option<ReadyHead> {
        let removed = self.resident.remove(name)?;
        let is_in_use = removed.is_in_use();
        let ResidentHead { ready, charge, .. } = removed;
        match &ready.detach {
            Some(_) if !is_in_use => {
                // Of two pieces of memory the larger one is reused.
                let bytes = |charge: &Option<Charge>| charge.as_ref().map_or(0, Charge::bytes);
                if bytes(&charge) > bytes(&self.reusable) {
                    self.reusable = charge;
                }
            }
            detach => {
                if let Some(flag) = detach {
                    flag.detach();
                }
                if let Some(charge) = charge {
                    ready.head.keep_with(charge);
                }
            }
        }
        Some(ready)
    }

    fn may_retry(&self, name: &str) -> bool {
        self.retries.get(name).is_none_or(|retry| retry.is_due(Instant::now()))
    }

    pub fn bytes(&self) -> u64 {
        self.resident.values().map(|resident| resident.ready.bytes).sum()
    }

    /// Returns the least recently used head that no sequence uses.
    pub fn idle(&self) -> Option<String> {
        let idle = self.resident.iter().filter(|(name, resident)| *name != FALLBACK && !resident.is_in_use());
        idle.min_by_key(|(_, resident)| resident.used).map(|(name, _)| name.clone())
    }

    pub fn log(&mut self, event: HeadEvent) {
        match event {
            HeadEvent::Loaded { .. } => self.meters.add(Counter::HeadLoads, 1),
            HeadEvent::Evicted { .. } => {
                self.meters.add(Counter::HeadEvictions, 1);
                self.meters.mark(Kind::HeadEviction, [0, 0]);
            }
            HeadEvent::Failed { .. } => {
                self.meters.add(Counter::HeadFailures, 1);
                self.meters.mark(Kind::HeadFailure, [0, 0]);
            }
            HeadEvent::TimedOut { .. } => self.meters.mark(Kind::HeadFailure, [0, 0]),
            HeadEvent::Updated { .. } | HeadEvent::Requantizing { .. } => {}
        }
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}
