//! The handle of one model in a weight cache, for its hook, its pages, its monitor and its residency.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use firebox_cache::Reclaimable;
use firebox_model::StreamedWeights;

use super::{Locked, State, WeightCache};
use crate::governor::{Event, Governor};
use crate::pressure::{Level, Pressure};
use crate::residency::config::CONFIG;
use crate::residency::entitlement::Urgency;
use crate::residency::share::{GovernedShare, ModelShare};
use crate::telemetry::Meters;
use crate::thermal::Thermometer;
use crate::{Account, Budget, Charge, MemoryError, RuntimeError};

/// The handle of one model in a cache.
#[derive(Debug)]
pub(in crate::residency) struct CachedModel {
    pub cache: Arc<WeightCache>,
    pub(super) id: u64,
    pub(super) is_shared: bool,
    /// The budget that the model is charged to.
    pub budget: Budget,
    /// See [`ModelShare::unfilled`].
    pub(super) unfilled: Arc<AtomicU64>,
}

impl CachedModel {
    /// Whether it shares the budget with other models.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Charges memory that the model requires. Parts are evicted for it.
    pub fn charge(&self, account: Account, bytes: u64, wait: Duration) -> Result<Charge, MemoryError> {
        let charge = |_: &mut State| self.budget.charge(account, bytes);
        self.cache.lock().charge_or_evict(wait, charge).1
    }

    /// Reserves this many bytes for the model, including those that it holds. Parts are evicted for it.
    pub fn reserve(&self, bytes: u64) -> Result<(), MemoryError> {
        self.cache.charge_or_evict(|_| self.budget.reserve(bytes))
    }

    /// Lets other models count on this one and take memory from it.
    pub fn set_open(&self) {
        if let Some(entitlement) = &mut self.cache.lock().share(self.id).entitlement {
            entitlement.is_open = true;
        }
    }

    /// Loads parts in their order: all of them, for which parts of other models are evicted, or as many as there is room for.
    pub fn preload(&self, weights: &StreamedWeights, all: bool) -> Result<(), RuntimeError> {
        let order = self.cache.lock().share(self.id).load_order();
        for part in order {
            let bytes = weights.part_bytes(part);
            if !all && self.is_shared && !self.cache.lock().state.has_room(bytes) {
                break;
            }
            let paid = match self.charge_absent(weights, part, all) {
                Err(MemoryError::OverBudget { .. }) if !all => break,
                paid => paid?,
            };
            // Read without the lock, because other threads need the resident parts meanwhile. The charge stays here until then: a pass
            // may charge and retain the same part, and the part may be evicted as soon as it is resident.
            let read = weights.load(part);
            let mut locked = self.cache.lock();
            let charge = &mut locked.share(self.id).charges[part];
            if weights.is_resident(part) && charge.is_none() {
                *charge = paid;
            }
            drop(locked);
            read?;
        }
        Ok(())
    }

    /// Charges a part that is about to be loaded. Returns `None` if it is resident.
    fn charge_absent(
        &self,
        weights: &StreamedWeights,
        part: usize,
        evicts: bool,
    ) -> Result<Option<Charge>, MemoryError> {
        let locked = self.cache.lock();
        if weights.is_resident(part) {
            return Ok(None);
        }
        let charge = || self.budget.charge(Account::Weights, weights.part_bytes(part));
        let charged =
            if evicts { locked.charge_or_evict(CONFIG.open_wait, |_| charge()).1 } else { charge() };
        charged.map(Some)
    }

    /// Loads planned parts in this order, all of them or as many as fit into the budget and into the memory that is `available` when it
    /// is their turn: a governor loads the others once there is room. Buffers are charged first.
    pub fn load_planned(
        &self,
        weights: &StreamedWeights,
        parts: &[usize],
        all: bool,
        available: impl Fn() -> Option<u64>,
    ) -> Result<(), RuntimeError> {
        let mut locked = self.cache.lock();
        if parts.len() < weights.parts() {
            locked = locked.resize_ring(self.id, weights);
        }
        let share = locked.share(self.id);
        let ring = share.ring.bytes();
        for &part in parts {
            // Other programs may take memory meanwhile.
            if !all && available().is_some_and(|left| left < ring + weights.part_bytes(part)) {
                break;
            }
            match share.load(weights, part) {
                Err(RuntimeError::Memory(MemoryError::OverBudget { .. })) if !all => break,
                loaded => loaded?,
            }
        }
        let mut locked = locked.resize_ring(self.id, weights);
        let share = locked.share(self.id);
        if share.ring.bytes() == 0 && !share.holds_all(weights) {
            // Not even one buffer fits. The error says how much is missing.
            share.ring.resize(weights.buffer_bytes() as u64)?;
        }
        Ok(())
    }

    pub fn set_governor(&self, governor: Governor) {
        self.cache.lock().share(self.id).governor = Some(governor);
    }

    pub fn set_thermometer(&self, thermometer: Thermometer) {
        self.cache.lock().share(self.id).thermometer = Some(thermometer);
    }

    /// Events since the last call.
    pub fn events(&self) -> Vec<Event> {
        self.cache.lock().share(self.id).events.drain(..).collect()
    }

    /// Counts events in these meters from now on.
    pub fn set_meters(&self, meters: Arc<Meters>) {
        self.cache.lock().share(self.id).meters = meters;
    }

    /// Evicts parts at once because memory is short, whatever is being computed.
    pub fn relieve(&self, weights: &StreamedWeights, pressure: Pressure) {
        let mut locked = self.cache.lock();
        let share = locked.share(self.id);
        let is_pinned = share.entitlement.as_ref().is_some_and(|entitlement| entitlement.is_pinned);
        if is_pinned && pressure.level < Level::Critical {
            return;
        }
        let Some(mut governor) = share.governor.take() else { return };
        let events = governor.alarmed(pressure, &mut GovernedShare { share: &mut *share, weights });
        share.governor = Some(governor);
        self.apply(locked, weights, events, false);
    }

    /// Takes note of a pass: its governor may load or evict parts.
    pub fn pass_ended(&self, weights: &StreamedWeights, rows: usize, time: Duration) {
        let mut locked = self.cache.lock();
        let share = locked.share(self.id);
        share.has_run = true;
        let (faults, heat_changed) = (share.new_faults(), share.heat_changed());
        let Some(mut governor) = share.governor.take() else { return };
        let governed = &mut GovernedShare { share: &mut *share, weights };
        // Other models run between the layers of a shared one, and its times include waiting for them.
        let events = if rows == 1 && !self.is_shared {
            governor.after_step(rows, time, faults, governed)
        } else {
            governor.after_pass(rows, time, governed)
        };
        share.governor = Some(governor);
        let needs_resizing = heat_changed || share.ring_needs_resizing(weights);
        self.apply(locked, weights, events, needs_resizing);
        self.charge_program_growth();
    }

    /// Resizes the ring after a governor's changes, and logs them.
    fn apply(
        &self,
        mut locked: Locked<'_>,
        weights: &StreamedWeights,
        events: Vec<Event>,
        needs_resizing: bool,
    ) {
        if needs_resizing || !events.is_empty() {
            locked = locked.resize_ring(self.id, weights);
        }
        if !events.is_empty() {
            self.cache.buffers.clear();
        }
        let share = locked.share(self.id);
        for event in events {
            share.log(event, weights);
        }
    }

    /// Charges the program's growth, where models share a budget: passes of several models may begin before any of them ends.
    pub fn charge_program_growth(&self) {
        if self.is_shared {
            self.cache.charge_program_growth();
        }
    }

    /// Sets the demand for the model. Only a model in demand has buffers.
    pub fn set_urgency(&self, weights: &StreamedWeights, urgency: Option<Urgency>) {
        let mut locked = self.cache.lock();
        let State { shares, demand_changes, .. } = &mut *locked.state;
        let Some(entitlement) = shares.get_mut(&self.id).and_then(|share| share.entitlement.as_mut()) else {
            return;
        };
        if !entitlement.set_urgency(urgency, demand_changes) {
            return;
        }
        if urgency.is_none() {
            weights.clear_priority();
        }
        drop(locked.resize_ring(self.id, weights));
        if urgency.is_none() {
            self.cache.buffers.clear();
        }
    }

    /// Decides whether a part that was read for a pass stays resident, and charges it.
    pub fn retain(&self, weights: &StreamedWeights, part: usize) -> bool {
        if !self.is_shared {
            return false;
        }
        let (mut locked, retains) = self.cache.lock().retain(self.id, weights, part);
        if retains {
            locked.share(self.id).log(Event::Grew { layer: part }, weights);
        }
        retains
    }

    /// Releases the charge of a part that could not stay after all.
    pub fn retain_failed(&self, weights: &StreamedWeights, part: usize) {
        let mut locked = self.cache.lock();
        // Another thread may have loaded and charged it meanwhile.
        if !weights.is_resident(part) {
            locked.share(self.id).charges[part] = None;
        }
    }

    /// Charges another page of keys and values. Parts are evicted for it.
    pub fn charge_page(&self, bytes: u64) -> bool {
        let charge = |state: &mut State| {
            let pages = &mut state.share(self.id).pages;
            let wanted = pages.bytes() + bytes;
            pages.resize(wanted)
        };
        let is_charged = self.cache.lock().charge_or_evict(CONFIG.pass_wait, charge).1.is_ok();
        if is_charged {
            self.page_emptied(bytes);
        }
        is_charged
    }

    /// Releases the charge of pages.
    pub fn release_pages(&self, bytes: u64) {
        let mut locked = self.cache.lock();
        let pages = &mut locked.share(self.id).pages;
        let left = pages.bytes().saturating_sub(bytes);
        // A charge can always shrink.
        drop(pages.resize(left));
        self.page_filled(bytes);
    }

    /// Records that charged bytes of pages now take memory.
    pub fn page_filled(&self, bytes: u64) {
        self.unfilled.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Records that charged bytes of pages no longer take memory.
    pub fn page_emptied(&self, bytes: u64) {
        self.unfilled.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Registers a holder of pages that no sequence uses now.
    pub fn register_idle_pages(&self, holder: &Weak<dyn Reclaimable>) {
        if let Some(entitlement) = &mut self.cache.lock().share(self.id).entitlement {
            entitlement.idle_pages.retain(|holder| holder.strong_count() > 0);
            entitlement.idle_pages.push(holder.clone());
        }
    }

    /// Releases a page that no sequence uses, from the model that has been idle for longest. Returns whether one was
    /// released. The caller holds no lock: releasing takes those of the other model's pages and of the cache.
    pub fn release_idle_page(&self) -> bool {
        let idle: Vec<(Budget, Vec<Weak<dyn Reclaimable>>)> = {
            let locked = self.cache.lock();
            let order = locked.state.eviction_order().into_iter().filter(|id| *id != self.id);
            let shares = order.map(|id| &locked.state.shares[&id]);
            let of = |share: &ModelShare| {
                Some((share.budget.clone(), share.entitlement.as_ref()?.holders_of_idle_pages()?))
            };
            shares.filter_map(of).collect()
        };
        idle.iter().any(|(budget, holders)| {
            let held = || budget.held(Account::Streams);
            let before = held();
            // A page within a model's reserve is of no use to others, and a pool keeps the pages that it has reserved.
            budget.exceeds_reserve()
                && holders
                    .iter()
                    .filter_map(Weak::upgrade)
                    .any(|holder| holder.reclaim_page() && held() < before)
        })
    }
}

impl Drop for CachedModel {
    fn drop(&mut self) {
        let mut locked = self.cache.lock();
        let share = locked.state.shares.remove(&self.id);
        drop(locked);
        drop(share);
    }
}
