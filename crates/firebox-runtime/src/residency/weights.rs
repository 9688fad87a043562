//! The weight cache: decides which parts of the models of one budget are resident, and charges them.
//!
//! A [`WeightCache`] owns the [shares](ModelShare) of all models of a budget, whether that is one model or several. A
//! [`CachedModel`] is the handle of one of them: hooks, pages and the monitor refer to the cache through it, and dropping it removes the
//! share. Shares refer to weights weakly, because weights own the hook that owns the handle.
//!
//! # Lock order
//!
//! Locks are taken in this order, and none is taken while a later one is held:
//!
//! 1. the lock of [`SharedBudget`](super::SharedBudget) that one opener at a time holds
//! 2. locks of those who ask for memory: a page pool's free list, a head pool's state
//! 3. the cache's state, **one lock for all models of a budget**
//! 4. what shares change: the ring of a stream, the slots of parts, the buffer pool
//! 5. the budget
//!
//! The disk queue has a lock of its own that is held across no other. Under the state's lock nothing is dropped that could own a
//! [`CachedModel`], a pool or a prefix cache: [`Locked`] drops such references after the lock. Nothing waits for a disk under it, except
//! for parts that the only model of a budget loads.
//!
//! Where memory has to come from a buffer that another thread reads into, [`Locked::charge_or_evict`] releases the lock, waits until the
//! stream has released that buffer or a time limit is over, and tries again.

mod handle;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use firebox_model::StreamedWeights;
use firebox_store::BufferPool;

use super::config::CONFIG;
use super::disk_queue::DiskQueue;
use super::entitlement::Entitlement;
use super::program::{Growth, Measured, ProgramUsage};
use super::share::{ModelShare, ShareReclaimed};
use crate::governor::GovernorConfig;
use crate::memory::{release_to_os, resident_bytes};
use crate::pressure::{Level, Pressure};
use crate::{Account, Budget, Charge, MemoryError};
pub(super) use handle::CachedModel;

/// The resident parts of all models of a budget.
pub(super) struct WeightCache {
    pub budget: Budget,
    pub disk: Arc<DiskQueue>,
    /// Memory of evicted parts, which the next reads reuse. It is not charged, so whenever memory is charged for anything else, or
    /// measured, the pool is cleared.
    pub buffers: BufferPool,
    state: Mutex<State>,
}

/// The state that the cache's lock protects.
pub(super) struct State {
    shares: BTreeMap<u64, ModelShare>,
    next_id: u64,
    /// How often demand for a model has begun or ended.
    demand_changes: u64,
    /// The charge for the program, if that is part of the budget.
    program: Option<ProgramUsage>,
    /// Intermediate results of the model with the largest ones: only one model runs at a time.
    activations: Charge,
    pressure: LastPressure,
}

/// The last reading of the system's memory.
#[derive(Debug, Default)]
struct LastPressure {
    available: Option<u64>,
    short_at: Option<Instant>,
}

/// The result of reclaiming memory from the shares.
enum Reclaimed {
    Some,
    /// A model's buffer will be released once it was read into: it has this many.
    Pending(Arc<StreamedWeights>, usize),
    Nothing,
}

impl WeightCache {
    /// A cache without models. A program that is part of the budget is charged what it is expected to take, and later what it takes,
    /// but never less than `least`.
    pub fn new(budget: &Budget, program: Option<Charge>, least: u64) -> Result<Arc<Self>, MemoryError> {
        let state = State {
            shares: BTreeMap::new(),
            next_id: 0,
            demand_changes: 0,
            program: program.map(|charge| ProgramUsage::new(charge, least)),
            activations: budget.charge(Account::Activations, 0)?,
            pressure: LastPressure::default(),
        };
        Ok(Arc::new(Self {
            budget: budget.clone(),
            disk: Arc::default(),
            buffers: BufferPool::of_huge_pages(),
            state: Mutex::new(state),
        }))
    }

    /// Adds a model.
    pub fn add(self: &Arc<Self>, share: ModelShare) -> Arc<CachedModel> {
        let mut locked = self.lock();
        let id = locked.state.next_id;
        locked.state.next_id += 1;
        let (budget, unfilled) = (share.budget.clone(), share.unfilled.clone());
        let is_shared = share.is_shared();
        locked.state.shares.insert(id, share);
        Arc::new(CachedModel { cache: self.clone(), id, is_shared, budget, unfilled })
    }

    fn lock(&self) -> Locked<'_> {
        // Nothing panics between two changes that belong together.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Locked { cache: self, state, upgraded: Vec::new() }
    }

    /// Charges memory to the budget. Parts are evicted for it.
    pub fn charge(&self, account: Account, bytes: u64) -> Result<Charge, MemoryError> {
        self.charge_or_evict(|_| self.budget.charge(account, bytes))
    }

    /// Charges the intermediate results of a model, if they are the largest so far.
    pub fn charge_activations(&self, bytes: u64) -> Result<(), MemoryError> {
        self.charge_or_evict(|state| match bytes > state.activations.bytes() {
            true => state.activations.resize(bytes),
            false => Ok(()),
        })
    }

    /// Returns the charge for activations with those of one more model.
    pub fn activations_with(&self, bytes: u64) -> u64 {
        self.lock().state.activations.bytes().max(bytes)
    }

    fn charge_or_evict<R>(
        &self,
        charge: impl FnMut(&mut State) -> Result<R, MemoryError>,
    ) -> Result<R, MemoryError> {
        self.lock().charge_or_evict(CONFIG.open_wait, charge).1
    }

    /// Evicts a part, or releases a buffer, and returns the memory to the system. Waits for a buffer that is being read into. Returns
    /// whether any memory was released.
    pub fn release_some(&self) -> bool {
        let until = Instant::now() + CONFIG.open_wait;
        let mut locked = self.lock();
        loop {
            let reclaimed = locked.reclaim();
            self.buffers.clear();
            match reclaimed {
                Reclaimed::Some => return true,
                Reclaimed::Nothing => return false,
                Reclaimed::Pending(weights, buffers) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    locked = locked.wait_for_buffer(&weights, buffers, left);
                }
            }
        }
    }

    /// Bytes that all open models and the program take at least.
    pub fn required_bytes(&self) -> u64 {
        let locked = self.lock();
        let models: u64 = locked.state.open_models().map(|(_, model)| model.least).sum();
        locked.state.program_bytes() + models
    }

    /// Stores a reading of the system's memory.
    pub fn note_pressure(&self, pressure: Pressure) {
        let last = &mut self.lock().state.pressure;
        last.available = pressure.available;
        if pressure.level > Level::None {
            last.short_at = Some(Instant::now());
        }
    }

    /// Measures the program's memory if that is due, and charges its growth. Parts are evicted for what it takes already, but not for
    /// what it is expected to take. Where nothing can be evicted, the next charge is refused.
    fn charge_program_growth(&self) {
        let is_due = |program: &mut ProgramUsage| program.begin_measurement();
        if !self.lock().state.program.as_mut().is_some_and(is_due) {
            return;
        }
        self.buffers.clear();
        let Some(mut measured) = self.measure_program() else { return };
        let is_outgrown = |program: &ProgramUsage| program.is_outgrown_by(measured.at_least);
        if self.lock().state.program.as_ref().is_some_and(is_outgrown) {
            // Memory that an allocator holds back should not cost a resident part.
            release_to_os();
            let Some(again) = self.measure_program() else { return };
            measured = again;
        }
        let mut locked = self.lock();
        let Some(Growth { charged, used }) =
            locked.state.program.as_mut().and_then(|program| program.settle(measured))
        else {
            return;
        };
        if locked.state.charge_program(charged).is_err() && locked.state.program_bytes() < used {
            let _ = locked.charge_or_evict(CONFIG.pass_wait, |state| state.charge_program(used));
        }
    }

    /// Measures the program's memory and charges its growth, with headroom. Parts are evicted for it.
    pub fn charge_program_now(&self) -> Result<(), MemoryError> {
        if self.lock().state.program.is_none() {
            return Ok(());
        }
        self.buffers.clear();
        let Some(measured) = self.measure_program() else { return Ok(()) };
        self.charge_or_evict(|state| state.charge_program(measured.at_least + CONFIG.program_headroom))
    }

    /// The process's resident memory without that of the models.
    fn measure_program(&self) -> Option<Measured> {
        // The process is read between two readings of the accounts: what is charged in only one of them counts as resident for the
        // lower bound, and as absent for the upper one.
        let before = self.lock().model_bytes();
        let resident = resident_bytes()?;
        let after = self.lock().model_bytes();
        Some(Measured {
            at_least: resident.saturating_sub(before.most.max(after.most)),
            at_most: resident.saturating_sub(before.least.min(after.least)),
        })
    }
}

impl fmt::Debug for WeightCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightCache").field("budget", &self.budget).finish_non_exhaustive()
    }
}

/// Resident bytes of the models: between `least` and `most`.
struct ModelBytes {
    most: u64,
    least: u64,
}

impl State {
    fn share(&mut self, id: u64) -> &mut ModelShare {
        let share = self.shares.get_mut(&id);
        share.unwrap_or_else(|| unreachable!("a share lives as long as its handle"))
    }

    /// Models that share the budget and are open.
    fn open_models(&self) -> impl Iterator<Item = (&ModelShare, &Entitlement)> {
        let entitled = self.shares.values().filter_map(|share| Some((share, share.entitlement.as_ref()?)));
        entitled.filter(|(share, model)| model.is_open && share.weights.strong_count() > 0)
    }

    /// Models in the order in which they are asked for memory.
    fn eviction_order(&self) -> Vec<u64> {
        let is_asked = |share: &ModelShare| share.entitlement.as_ref().is_none_or(|model| model.is_open);
        let mut ids: Vec<u64> =
            self.shares.iter().filter(|(_, share)| is_asked(share)).map(|(id, _)| *id).collect();
        ids.sort_by_cached_key(|id| self.shares[id].entitlement.as_ref().map(Entitlement::eviction_key));
        ids
    }

    /// Bytes of resident parts that a model may take from less urgent ones.
    fn takeable_by(&self, id: u64) -> u64 {
        let Some(own) = self.shares.get(&id).and_then(|share| share.entitlement.as_ref()) else { return 0 };
        let weaker = self.open_models().filter(|(_, other)| own.comes_before(other));
        weaker.map(|(share, _)| share.budget.held(Account::Weights)).sum()
    }

    /// Returns whether the system has this many bytes to spare and was not short of memory recently.
    fn has_room(&self, bytes: u64) -> bool {
        let LastPressure { available, short_at } = &self.pressure;
        let margin = GovernorConfig::default().margin;
        short_at.is_none_or(|short| short.elapsed() > CONFIG.calm_after_shortage)
            && available.is_none_or(|available| available >= bytes.saturating_add(margin))
    }

    fn program_bytes(&self) -> u64 {
        self.program.as_ref().map_or(0, ProgramUsage::charged)
    }

    fn charge_program(&mut self, bytes: u64) -> Result<(), MemoryError> {
        self.program.as_mut().map_or(Ok(()), |program| program.grow_to(bytes))
    }
}

/// The locked state of a cache.
struct Locked<'a> {
    cache: &'a WeightCache,
    state: MutexGuard<'a, State>,
    /// Weights that were referred to under the lock. Dropped after it is released: the last reference to a model removes its share, which
    /// takes the lock.
    upgraded: Vec<Arc<StreamedWeights>>,
}

impl<'a> Locked<'a> {
    fn share(&mut self, id: u64) -> &mut ModelShare {
        self.state.share(id)
    }

    /// Weights of a model, if it still exists.
    fn upgrade(&mut self, weights: &Weak<StreamedWeights>) -> Option<Arc<StreamedWeights>> {
        let weights = weights.upgrade()?;
        self.upgraded.push(weights.clone());
        Some(weights)
    }

    /// Charges memory that the caller requires. While the budget refuses it, releases memory of the least urgent
    /// models, the charged one included, and returns it to the system. Waits for a buffer that is being read into, up
    /// to a limit.
    fn charge_or_evict<R>(
        mut self,
        wait: Duration,
        mut charge: impl FnMut(&mut State) -> Result<R, MemoryError>,
    ) -> (Self, Result<R, MemoryError>) {
        let mut until = None;
        let charged = loop {
            match charge(&mut self.state) {
                Err(error @ MemoryError::OverBudget { .. }) => match self.reclaim() {
                    Reclaimed::Some => until = None,
                    Reclaimed::Nothing => break Err(error),
                    Reclaimed::Pending(weights, buffers) => {
                        let until = *until.get_or_insert_with(|| Instant::now() + wait);
                        let left = until.saturating_duration_since(Instant::now());
                        if left.is_zero() {
                            break Err(error);
                        }
                        self = self.wait_for_buffer(&weights, buffers, left);
                    }
                },
                charged => break charged,
            }
        };
        self.cache.buffers.clear();
        (self, charged)
    }

    /// Releases the lock until a model has fewer than `buffers` buffers, or until the recheck interval is over.
    fn wait_for_buffer(self, weights: &StreamedWeights, buffers: usize, left: Duration) -> Self {
        let cache = self.cache;
        drop(self);
        weights.wait_for_fewer_buffers(buffers, left.min(CONFIG.recheck));
        cache.lock()
    }

    /// Reclaims memory from the models, the least urgent first.
    fn reclaim(&mut self) -> Reclaimed {
        let order = self.state.eviction_order();
        self.reclaim_from(&order)
    }

    fn reclaim_from(&mut self, ids: &[u64]) -> Reclaimed {
        let mut reclaimed = Reclaimed::Nothing;
        for id in ids {
            let weights = self.state.share(*id).weights.clone();
            let Some(weights) = self.upgrade(&weights) else { continue };
            match self.state.share(*id).reclaim(&weights) {
                ShareReclaimed::Some => return Reclaimed::Some,
                ShareReclaimed::Pending { buffers } => reclaimed = Reclaimed::Pending(weights, buffers),
                ShareReclaimed::Nothing => {}
            }
        }
        reclaimed
    }

    /// Gives a model's ring the buffers that it should have. Other models make room for those that it cannot do without.
    fn resize_ring(mut self, id: u64, weights: &StreamedWeights) -> Self {
        let share = self.share(id);
        if share.ring.bytes() < share.required_ring(weights) {
            // If that is refused, as many buffers are made as can be charged.
            let (locked, _) = self.charge_or_evict(CONFIG.pass_wait, |state| {
                let share = state.share(id);
                let required = share.required_ring(weights);
                if share.ring.bytes() < required { share.ring.resize(required) } else { Ok(()) }
            });
            self = locked;
        }
        self.share(id).resize_ring(weights);
        self
    }

    /// Decides whether a part that was read for a pass stays resident, and charges it.
    fn retain(mut self, id: u64, weights: &StreamedWeights, part: usize) -> (Self, bool) {
        let bytes = weights.part_bytes(part);
        if !self.state.has_room(bytes) {
            return (self, false);
        }
        let takeable = self.state.takeable_by(id);
        let share = self.share(id);
        // A request waits for the first pass, and new memory can come more slowly than the disk reads. If not all parts fit, most of
        // them will be read again in any case.
        if !share.has_run && !share.could_hold_all(takeable) {
            return (self, false);
        }
        if share.is_next(weights, part, takeable) && self.charge_from_weaker(id, part, bytes) {
            return (self, true);
        }
        let traded = self.share(id).trade_buffer(weights, part);
        match traded {
            Some(true) => return (self, true),
            Some(false) => {}
            None => self = self.resize_ring(id, weights),
        }
        let is_exchanged = self.share(id).exchange(weights, part);
        (self, is_exchanged)
    }

    /// Charges a part to what is left, and to what less urgent models hold.
    fn charge_from_weaker(&mut self, id: u64, part: usize, bytes: u64) -> bool {
        loop {
            if self.share(id).charge_part(part, bytes).is_ok() {
                return true;
            }
            let mut weaker = self.state.eviction_order();
            let shares = &self.state.shares;
            let entitlement = |id: &u64| shares[id].entitlement.as_ref();
            let own = entitlement(&id);
            weaker.retain(|other| {
                own.zip(entitlement(other)).is_some_and(|(own, other)| own.comes_before(other))
            });
            if !matches!(self.reclaim_from(&weaker), Reclaimed::Some) {
                return false;
            }
        }
    }

    /// Bytes of models that are resident.
    fn model_bytes(&mut self) -> ModelBytes {
        let all: Vec<Weak<StreamedWeights>> =
            self.state.open_models().map(|(share, _)| share.weights.clone()).collect();
        let mut buffers = 0;
        for weights in all {
            if let Some(weights) = self.upgrade(&weights) {
                buffers += (weights.made_buffers() * weights.buffer_bytes()) as u64;
            }
        }
        let unfilled = |share: &ModelShare| share.unfilled.load(Ordering::Relaxed);
        // An allocator keeps for a while what a pass has released, so activations may be resident.
        let accounts = [Account::Weights, Account::Streams, Account::Activations, Account::Program];
        let held: u64 = accounts.iter().map(|account| self.cache.budget.held(*account)).sum();
        let all_unfilled: u64 = self.state.open_models().map(|(share, _)| unfilled(share)).sum();
        let most = (buffers + held).saturating_sub(self.state.program_bytes() + all_unfilled);
        // Resident for certain: no activations, and nothing of models that are being opened.
        let resident = |(share, _): (&ModelShare, &Entitlement)| {
            let accounts = [Account::Weights, Account::Streams, Account::Program];
            let held: u64 = accounts.iter().map(|account| share.budget.held(*account)).sum();
            held.saturating_sub(unfilled(share))
        };
        let least = buffers + self.state.open_models().map(resident).sum::<u64>();
        ModelBytes { most, least }
    }
}
