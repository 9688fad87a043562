//! One model's share of a weight cache: the charges for its resident parts, its buffers and its pages, and how they are
//! released.

use std::collections::VecDeque;
use std::error::Error;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use firebox_model::StreamedWeights;

use super::config::CONFIG;
use super::entitlement::Entitlement;
use super::exchange::better_missing;
use crate::governor::{Event, Governor, Residency};
use crate::planner::{FEWEST_BUFFERS, spread};
use crate::telemetry::{Kind, Meters};
use crate::thermal::{self, Heat, Thermometer};
use crate::{Account, Budget, Charge, MajorPageFaults, MemoryError, RuntimeError};

/// The state of one model in a weight cache, under the cache's lock.
pub(super) struct ModelShare {
    /// The budget that the model is charged to: a slice of the shared budget, or all of it if the model does not share.
    pub budget: Budget,
    /// The model's parts. They own the hook that refers to the cache, so this reference is weak.
    pub weights: Weak<StreamedWeights>,
    /// The rank of each part: parts are loaded in this order, and evicted in the reverse order.
    ranks: Vec<usize>,
    /// Buffers that were planned for a model that does not share its budget.
    planned_buffers: usize,
    /// Present if the model shares its budget with others.
    pub entitlement: Option<Entitlement>,
    /// Bytes that are charged for pages of keys and values and not filled yet. Pages change it without the cache's lock.
    pub unfilled: Arc<AtomicU64>,
    /// The charge for each resident part.
    pub charges: Vec<Option<Charge>>,
    /// The charge for buffers.
    pub ring: Charge,
    /// The charge for pages of keys and values.
    pub pages: Charge,
    /// Whether a pass has ended.
    pub has_run: bool,
    pub governor: Option<Governor>,
    pub thermometer: Option<Thermometer>,
    faults: Option<MajorPageFaults>,
    steps: usize,
    pub events: VecDeque<Event>,
    pub meters: Arc<Meters>,
}

/// The result of reclaiming memory from a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShareReclaimed {
    /// Some was released.
    Some,
    /// A buffer in use will be released: the share pays for this many, one of which is surplus.
    Pending { buffers: usize },
    /// The share has nothing to release.
    Nothing,
}

impl ModelShare {
    /// A share without resident parts, in the order in which the parts are numbered.
    pub fn new(
        budget: &Budget,
        weights: &Arc<StreamedWeights>,
        planned_buffers: usize,
    ) -> Result<Self, MemoryError> {
        let parts = weights.parts();
        Ok(Self {
            budget: budget.clone(),
            weights: Arc::downgrade(weights),
            ranks: (0..parts).collect(),
            planned_buffers: planned_buffers.max(FEWEST_BUFFERS),
            entitlement: None,
            unfilled: Arc::default(),
            charges: (0..parts).map(|_| None).collect(),
            ring: budget.charge(Account::Scratch, 0)?,
            pages: budget.charge(Account::Streams, 0)?,
            has_run: false,
            governor: None,
            thermometer: thermal::system().map(Thermometer::new),
            faults: MajorPageFaults::counter(),
            steps: 0,
            events: VecDeque::new(),
            meters: Arc::default(),
        })
    }

    /// A share of a model that shares its budget.
    pub fn entitled(
        budget: &Budget,
        weights: &Arc<StreamedWeights>,
        entitlement: Entitlement,
    ) -> Result<Self, MemoryError> {
        Ok(Self {
            ranks: spread_ranks(weights.parts(), weights.blocks()),
            entitlement: Some(entitlement),
            ..Self::new(budget, weights, FEWEST_BUFFERS)?
        })
    }

    pub fn is_shared(&self) -> bool {
        self.entitlement.is_some()
    }

    /// Returns whether the model shares its budget and no request uses it.
    fn is_idle(&self) -> bool {
        self.entitlement.as_ref().is_some_and(Entitlement::is_idle)
    }

    /// Returns the parts in the order in which they are loaded.
    pub fn load_order(&self) -> Vec<usize> {
        let mut parts: Vec<usize> = (0..self.ranks.len()).collect();
        parts.sort_by_key(|&part| self.ranks[part]);
        parts
    }

    /// Charges a part and loads it.
    pub fn load(&mut self, weights: &StreamedWeights, part: usize) -> Result<(), RuntimeError> {
        if weights.is_resident(part) {
            return Ok(());
        }
        let charge = self.budget.charge(Account::Weights, weights.part_bytes(part))?;
        weights.load(part)?;
        self.charges[part] = Some(charge);
        Ok(())
    }

    fn evict(&mut self, weights: &StreamedWeights, part: usize) {
        weights.evict(part);
        self.charges[part] = None;
    }

    /// Evicts the resident part that is last in load order. Returns whether there was one.
    fn evict_last(&mut self, weights: &StreamedWeights) -> bool {
        let resident = (0..weights.parts()).filter(|&part| weights.is_resident(part));
        let Some(part) = resident.max_by_key(|&part| self.ranks[part]) else { return false };
        self.evict(weights, part);
        if !self.is_shared() {
            self.resize_ring(weights);
        }
        self.log(Event::Shed { layers: vec![part] }, weights);
        true
    }

    /// Releases something for another charge: buffers that the model does not need now, or else a part.
    pub fn reclaim(&mut self, weights: &StreamedWeights) -> ShareReclaimed {
        let Some(entitlement) = &self.entitlement else {
            return if self.evict_last(weights) { ShareReclaimed::Some } else { ShareReclaimed::Nothing };
        };
        let (is_idle, is_pinned, ring) = (entitlement.is_idle(), entitlement.is_pinned, self.ring.bytes());
        if is_idle && ring > 0 {
            self.resize_ring(weights);
        } else if self.pays_for_released_buffers(weights) {
            self.set_ring(weights, weights.buffers());
        }
        if self.ring.bytes() < ring {
            return ShareReclaimed::Some;
        }
        if is_pinned || !self.evict_last(weights) {
            let buffers = self.paid_buffers(weights);
            let is_pending = buffers > weights.buffers();
            return if is_pending { ShareReclaimed::Pending { buffers } } else { ShareReclaimed::Nothing };
        }
        // If (nearly) all parts were resident, the model now needs more buffers, which take part of what it has just
        // released.
        while !is_idle && self.ring.bytes() < self.least_ring(weights) {
            if !self.set_ring(weights, self.shared_buffers(weights)) && !self.evict_last(weights) {
                break;
            }
        }
        ShareReclaimed::Some
    }

    /// Returns whether a part is one of the next to be loaded, with room for it and for all of a lower rank. `takeable`
    /// are the bytes that less urgent models hold.
    pub fn is_next(&self, weights: &StreamedWeights, part: usize, takeable: u64) -> bool {
        let resident = (0..weights.parts()).filter(|&part| weights.is_resident(part)).count();
        let room = self.budget.left() + takeable;
        self.ranks[part] < resident + (room / weights.part_bytes(part).max(1)) as usize
    }

    /// Returns whether there may be room for all parts.
    pub fn could_hold_all(&self, takeable: u64) -> bool {
        let bytes = self.entitlement.as_ref().map_or(u64::MAX, |entitlement| entitlement.bytes);
        self.budget.held(Account::Weights) + self.budget.left() + takeable >= bytes
    }

    /// Charges a part to what is left.
    pub fn charge_part(&mut self, part: usize, bytes: u64) -> Result<(), MemoryError> {
        self.charges[part] = Some(self.budget.charge(Account::Weights, bytes)?);
        Ok(())
    }

    /// If few parts are missing, evicts one that is better missing than `part`, and charges `part` instead: it swaps a
    /// part of the unembedding for one of a block, or spreads missing parts. That means one more read into new memory,
    /// so no request may wait for its first token.
    pub fn exchange(&mut self, weights: &StreamedWeights, part: usize) -> bool {
        let awaits_first_token = self.entitlement.as_ref().is_some_and(Entitlement::awaits_first_token);
        if awaits_first_token || !self.few_are_missing(weights) {
            return false;
        }
        let bytes = weights.part_bytes(part);
        let block_parts = weights.block_parts();
        let missing: Vec<usize> = (0..block_parts).filter(|&part| !weights.is_resident(part)).collect();
        let Some(other) = better_missing(part, &missing, block_parts) else { return false };
        if self.budget.left() + weights.part_bytes(other) < bytes {
            return false;
        }
        // The charge is passed on, so that no other charge comes in between.
        let charge = self.charges[other].take();
        self.evict(weights, other);
        self.log(Event::Shed { layers: vec![other] }, weights);
        self.charges[part] = charge.and_then(|mut charge| charge.resize(bytes).is_ok().then_some(charge));
        self.charges[part].is_some()
    }

    /// Releases a buffer and charges a part instead, if the remaining buffers hold all missing parts. Returns `None` if
    /// it released the buffer and could not charge the part.
    pub fn trade_buffer(&mut self, weights: &StreamedWeights, part: usize) -> Option<bool> {
        let each = weights.buffer_bytes() as u64;
        let missing = self.missing(weights) as u64;
        let Some(smaller) = self.ring.bytes().checked_sub(each) else { return Some(false) };
        if missing * each > self.ring.bytes() {
            return Some(false);
        }
        weights.set_buffers((smaller / each) as usize);
        if self.ring.resize(smaller).is_err() {
            return Some(false);
        }
        self.charge_part(part, weights.part_bytes(part)).is_ok().then_some(true)
    }

    pub fn holds_all(&self, weights: &StreamedWeights) -> bool {
        (0..weights.parts()).all(|part| weights.is_resident(part))
    }

    /// Returns the number of buffers that the ring should have: fewer on a hot machine, which should not read ahead,
    /// and none if all parts are resident or the model is idle.
    fn wanted_buffers(&self, weights: &StreamedWeights) -> usize {
        if self.is_idle() || self.holds_all(weights) {
            return 0;
        }
        let heat = self.thermometer.as_ref().map_or(Heat::Nominal, Thermometer::heat);
        let most = if self.is_shared() { self.shared_buffers(weights) } else { self.planned_buffers };
        heat.prefetch_depth(most).max(weights.most_missing().max(1))
    }

    /// Returns the bytes of buffers that other models have to make room for.
    pub fn required_ring(&self, weights: &StreamedWeights) -> u64 {
        if !self.is_shared() {
            return 0;
        }
        let at_once = weights.most_missing().max(1);
        let buffers = self.wanted_buffers(weights).min(FEWEST_BUFFERS * at_once);
        (buffers * weights.buffer_bytes()) as u64
    }

    /// Resizes the ring to the buffers that it should have, or to as many as can be charged.
    pub fn resize_ring(&mut self, weights: &StreamedWeights) {
        let wanted = self.wanted_buffers(weights);
        let _ = (0..=wanted).rev().find(|&buffers| self.set_ring(weights, buffers));
    }

    /// Resizes the ring to `buffers`, if they can be charged. Surplus buffers in use stay charged until they are
    /// released and [noticed](Self::pays_for_released_buffers).
    fn set_ring(&mut self, weights: &StreamedWeights, buffers: usize) -> bool {
        let each = weights.buffer_bytes() as u64;
        let wanted = buffers as u64 * each;
        if wanted > self.ring.bytes() && self.ring.resize(wanted).is_err() {
            return false;
        }
        weights.set_buffers(buffers);
        let made = weights.made_buffers().max(buffers) as u64 * each;
        // A charge can always shrink.
        made >= self.ring.bytes() || self.ring.resize(made).is_ok()
    }

    fn missing(&self, weights: &StreamedWeights) -> usize {
        (0..weights.parts()).filter(|&part| !weights.is_resident(part)).count()
    }

    fn few_are_missing(&self, weights: &StreamedWeights) -> bool {
        self.missing(weights) * CONFIG.few_missing <= weights.parts()
    }

    /// The number of buffers of a model that shares its budget.
    fn shared_buffers(&self, weights: &StreamedWeights) -> usize {
        let at_once = weights.most_missing().max(1);
        if self.few_are_missing(weights) { at_once } else { FEWEST_BUFFERS * at_once }
    }

    /// Bytes of the buffers that a pass needs at once.
    fn least_ring(&self, weights: &StreamedWeights) -> u64 {
        (weights.most_missing() * weights.buffer_bytes()) as u64
    }

    /// Returns whether the ring of a shared model has the wrong size.
    fn ring_is_misfit(&self, weights: &StreamedWeights) -> bool {
        let each = weights.buffer_bytes() as u64;
        let buffers = if self.holds_all(weights) { 0 } else { self.shared_buffers(weights) as u64 };
        self.is_shared() && self.ring.bytes() != buffers * each
    }

    /// Returns the number of buffers that are charged.
    fn paid_buffers(&self, weights: &StreamedWeights) -> usize {
        (self.ring.bytes() / (weights.buffer_bytes() as u64).max(1)) as usize
    }

    /// Returns whether buffers are charged that were released meanwhile.
    fn pays_for_released_buffers(&self, weights: &StreamedWeights) -> bool {
        self.paid_buffers(weights) > weights.made_buffers().max(weights.buffers())
    }

    /// Returns whether the ring should be resized after a pass.
    pub fn ring_needs_resizing(&self, weights: &StreamedWeights) -> bool {
        self.pays_for_released_buffers(weights) || self.ring_is_misfit(weights)
    }

    /// Returns the page faults since the last call.
    pub fn new_faults(&mut self) -> u64 {
        self.faults.as_mut().map_or(0, MajorPageFaults::since_last)
    }

    /// Reads the thermometer, once every few steps. Returns whether the heat has changed.
    pub fn heat_changed(&mut self) -> bool {
        let Some(thermometer) = &mut self.thermometer else { return false };
        self.steps += 1;
        if !self.steps.is_multiple_of(CONFIG.steps_per_reading) {
            return false;
        }
        thermometer.heat() != thermometer.read()
    }

    pub fn log(&mut self, event: Event, weights: &StreamedWeights) {
        self.meters.governed(&event);
        if matches!(event, Event::Shed { .. } | Event::Grew { .. }) {
            let resident = (0..weights.parts()).filter(|&part| weights.is_resident(part)).count();
            self.meters.mark(Kind::KeptParts, [resident as u64, 0]);
        }
        self.events.push_back(event);
        if self.events.len() > CONFIG.max_events {
            self.events.pop_front();
        }
    }
}

/// A share and its weights, as a governor changes them.
pub(super) struct GovernedShare<'a> {
    pub share: &'a mut ModelShare,
    pub weights: &'a StreamedWeights,
}

impl Residency for GovernedShare<'_> {
    fn layers(&self) -> usize {
        self.weights.parts()
    }

    fn is_resident(&self, part: usize) -> bool {
        self.weights.is_resident(part)
    }

    fn bytes(&self, part: usize) -> u64 {
        self.weights.part_bytes(part)
    }

    fn rank(&self, part: usize) -> usize {
        self.share.ranks[part]
    }

    fn load(&mut self, part: usize) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(self.share.load(self.weights, part)?)
    }

    fn evict(&mut self, part: usize) {
        self.share.evict(self.weights, part);
    }
}

/// Ranks for a model that shares its budget. Any few missing parts are of blocks that are far apart, so that something computes while
/// each is read. The unembedding is loaded before the blocks: no other model runs between its parts.
fn spread_ranks(parts: usize, blocks: &[Range<usize>]) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..parts).collect();
    let most = blocks.iter().map(Range::len).max().unwrap_or(0);
    let nth = |block: usize, piece: usize| {
        Some(blocks[block].start + piece).filter(|part| blocks[block].contains(part))
    };
    let blocks_apart = || spread(blocks.len()).map(|block| blocks.len() - 1 - block);
    let last_first = (0..most).flat_map(|piece| blocks_apart().filter_map(move |block| nth(block, piece)));
    for (at, part) in last_first.enumerate() {
        ranks[part] = parts - 1 - at;
    }
    let block_parts = blocks.last().map_or(0, |pieces| pieces.end);
    for (rank, of_part) in ranks[block_parts..parts].iter_mut().enumerate() {
        *of_part = rank;
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unembedding_is_loaded_before_the_layers() {
        for (layers, pieces, rest) in [(1, 1, 1), (4, 1, 0), (32, 1, 3), (33, 4, 7)] {
            let blocks: Vec<_> = (0..layers).map(|block| block * pieces..(block + 1) * pieces).collect();
            let parts = layers * pieces + rest;
            let mut ranks = spread_ranks(parts, &blocks);
            assert!(ranks[layers * pieces..].iter().all(|rank| *rank < rest), "{ranks:?}");
            for block in blocks {
                let last = ranks[block].iter().filter(|rank| **rank >= parts - layers);
                assert_eq!(last.count(), 1, "any few missing parts are of different blocks");
            }
            ranks.sort_unstable();
            assert!(ranks.into_iter().eq(0..parts));
        }
    }
}
