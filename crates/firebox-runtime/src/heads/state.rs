//! The state of a pool of heads: which are in memory, requested or failed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use firebox_model::Head;
use firebox_schedule::Succession as HeadHistory;

use super::config::{FALLBACK, HeadPoolConfig};
use super::event::HeadEvent;
use super::retry::Retry;
use super::source::{HeadSource, ReadyHead};
use crate::telemetry::{Counter, Kind, Meters};
use crate::{Charge, RuntimeError};

/// The most events that a pool holds until they are read.
const MAX_EVENTS: usize = 256;

/// A pool of heads, shared by its handles and its loader.
#[derive(Debug)]
pub(super) struct Shared {
    pub source: Arc<dyn HeadSource>,
    pub config: HeadPoolConfig,
    state: Mutex<State>,
    /// Notified after every load.
    pub changed: Condvar,
}

/// The heads in memory, and those that are requested.
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
    pub history: HeadHistory,
    pub events: VecDeque<HeadEvent>,
    /// Counts uses, to find the least recently used head.
    pub time: u64,
    /// The charge for the memory of a removed head, until another head takes that memory.
    pub reusable: Option<Charge>,
    pub meters: Arc<Meters>,
}

/// A request to load a head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LoadRequest {
    pub name: String,
    /// Whether no sequence waits for it.
    pub prefetch: bool,
}

/// A head in memory.
#[derive(Debug)]
pub(super) struct ResidentHead {
    pub ready: ReadyHead,
    pub used: u64,
    pub charge: Option<Charge>,
}

impl Shared {
    pub fn new(source: Arc<dyn HeadSource>, config: HeadPoolConfig) -> Self {
        let state = Mutex::new(State { history: config.history.clone(), ..State::default() });
        Self { source, config, state, changed: Condvar::new() }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held has left the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current generation of a head, or `None` if there is none or it cannot be read. It is read from disk, so
    /// call this without the lock.
    pub fn current_generation(&self, name: &str) -> Option<u64> {
        self.source.generation(name).ok().flatten()
    }
}

impl ResidentHead {
    /// Returns whether a sequence uses the head.
    pub fn is_in_use(&self) -> bool {
        // The pool's own reference is one.
        Arc::strong_count(&self.ready.head) > 1
    }
}

impl State {
    /// Returns a resident head, and notes its use.
    pub fn touch(&mut self, name: &str) -> Option<Arc<Head>> {
        self.time += 1;
        let resident = self.resident.get_mut(name)?;
        resident.used = self.time;
        Some(resident.ready.head.clone())
    }

    pub fn generation(&self, name: &str) -> Option<u64> {
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

    pub fn may_retry(&self, name: &str) -> bool {
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
