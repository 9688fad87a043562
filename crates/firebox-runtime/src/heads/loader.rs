//! Loads heads into memory, on a thread of its own, and makes room for them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use firebox_model::ModelError;

use super::event::HeadEvent;
use super::state::{LoadRequest, ResidentHead, Shared, State};
use crate::memory::release_with_code;
use crate::telemetry::Kind;
use crate::{Account, Charge, MemoryError, RuntimeError};

/// The delay between the last load and the return of memory to the system. By then the waiting sequence continues, and has
/// not yet allocated all that a token takes.
const RELEASE_DELAY: Duration = Duration::from_millis(20);

/// Loads requested heads one after the other until there are no more requests.
pub(super) fn load_all(pool: &Weak<Shared>) {
    while let Some(shared) = pool.upgrade() {
        let request = {
            let mut state = shared.state();
            let Some(request) = state.requests.pop_front() else {
                state.has_loader = false;
                drop(state);
                drop(shared);
                thread::sleep(RELEASE_DELAY);
                // Another loader needs the memory, and releases it when it ends.
                if !pool.upgrade().is_some_and(|shared| shared.state().has_loader) {
                    release_with_code();
                }
                return;
            };
            state.loading = Some(request.name.clone());
            request
        };
        let generation = shared.current_generation(&request.name);
        let is_resident = shared.state().has(&request.name, generation);
        if !is_resident {
            shared.load(&request);
        }
        shared.state().loading = None;
        shared.changed.notify_all();
    }
}

impl Shared {
    /// Loads a head.
    pub fn load(&self, request: &LoadRequest) {
        let began = Instant::now();
        let generation = self.source.generation(&request.name).unwrap_or_default();
        let load = || {
            let charge = self.make_room_for(&request.name)?;
            Ok((self.source.load(&request.name)?, charge))
        };
        // A file that makes a kernel panic must not end the loader.
        let loaded = catch_unwind(AssertUnwindSafe(load)).unwrap_or_else(|_| {
            let reason = format!("head {:?} is of shapes that cannot be computed with", request.name);
            Err(ModelError::Device { reason }.into())
        });
        let mut state = self.state();
        let name = request.name.clone();
        // What a failed load has read is in a pooled buffer, and the charge for that is gone.
        if loaded.is_err()
            && let Some(buffers) = self.source.buffers()
        {
            buffers.clear();
            state.reusable = None;
        }
        match loaded {
            // A prefetch that does not fit is dropped; the head is loaded when a sequence requests it.
            Err(RuntimeError::Memory(MemoryError::OverBudget { .. })) if request.prefetch => {}
            Ok((ready, charge)) => {
                state.time += 1;
                let used = state.time;
                state.retries.remove(&name);
                state.failures.remove(&name);
                if let Some(schemes) = ready.requantized {
                    state.log(HeadEvent::Requantizing { name: name.clone(), schemes });
                }
                // The previous generation was in use until now.
                state.remove(&name);
                state.resident.insert(name.clone(), ResidentHead { ready, used, charge });
                let (took, prefetched) = (began.elapsed(), request.prefetch);
                let meters = &state.meters;
                meters.drawn(Kind::HeadLoad, [prefetched.into(), 0], meters.began().and(Some(began)));
                state.log(HeadEvent::Loaded { name, took, prefetched });
            }
            Err(error) => {
                let (now, reason) = (Instant::now(), Arc::new(error));
                let retry = state.retries.entry(name.clone()).or_default();
                retry.failed(now);
                let retry_in = retry.wait(now);
                state.failures.insert(name.clone(), (generation, reason.clone()));
                state.log(HeadEvent::Failed { name, reason, retry_in });
            }
        }
    }

    /// Charges for a head, and evicts heads that no sequence uses until it fits, the least recently used first.
    fn make_room_for(&self, name: &str) -> Result<Option<Charge>, RuntimeError> {
        let bytes = self.source.bytes(name)?;
        loop {
            let mut state = self.state();
            if let Some(charge) = self.reused_charge(&mut state, bytes) {
                return Ok(charge);
            }
            let fits = state.bytes().saturating_add(bytes) <= self.config.max_bytes;
            let charged = match &self.config.budget {
                _ if !fits => {
                    let total = self.config.max_bytes;
                    let left = total.saturating_sub(state.bytes());
                    Err(MemoryError::OverBudget { account: Account::Weights, wanted: bytes, left, total })
                }
                Some(budget) => budget.charge(Account::Weights, bytes).map(Some),
                None => Ok(None),
            };
            let error = match charged {
                Ok(charge) => return Ok(charge),
                Err(error) => error,
            };
            let Some(idle) = state.idle() else {
                drop(state);
                // Weights can be read again while a model runs, and a head cannot: weights make room.
                return match &self.config.budget {
                    Some(budget) if fits => Ok(Some(budget.insist(Account::Weights, bytes)?)),
                    _ => Err(error.into()),
                };
            };
            drop(state.remove(&idle));
            state.log(HeadEvent::Evicted { name: idle });
        }
    }

    /// Returns the charge for the memory of a removed head, if a head of `bytes` fits into that memory and fills at least half
    /// of it. Other memory is released.
    fn reused_charge(&self, state: &mut State, bytes: u64) -> Option<Option<Charge>> {
        let buffers = self.source.buffers()?;
        let reusable = state.reusable.take();
        let is_charged = reusable.is_some() || self.config.budget.is_none();
        // Reads begin and end on blocks, so memory is larger than the head it was read for.
        if is_charged && buffers.bytes() as u64 >= bytes && buffers.bytes() as u64 / 2 <= bytes {
            return Some(reusable);
        }
        buffers.clear();
        None
    }
}
