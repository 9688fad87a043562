//! The heads of a model that are in memory: acquired by sequences, loaded in the background, and evicted to make room.

use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use firebox_model::Head;
use firebox_schedule::Succession as HeadHistory;

use super::config::{FALLBACK, HeadPoolConfig};
use super::event::{HeadEvent, HeadState};
use super::loader::load_all;
use super::source::HeadSource;
use super::state::{LoadRequest, Shared, State};
use crate::RuntimeError;
use crate::telemetry::{Gauge, Meters, Telemetry};

/// How many likely successors of a head are prefetched.
const PREFETCHED_SUCCESSORS: usize = 2;

/// The result of a request for a head.
#[derive(Debug, Clone)]
#[non_exhaustive]
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

impl HeadPool {
    /// Creates a pool. The [fallback](FALLBACK) is loaded at once, if there is one, and stays.
    pub fn new(source: Arc<dyn HeadSource>, config: HeadPoolConfig) -> Result<Self, RuntimeError> {
        let pool = Self(Arc::new(Shared::new(source, config)));
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
}
