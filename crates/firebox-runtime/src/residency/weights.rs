use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::Duration;

use firebox_cache::{PageLedger, Reclaimable};
use firebox_model::{Decoder, StepHook, StreamedWeights};

use crate::governor::{Event, Governor, Residency as _};
use crate::planner::{FEWEST_BUFFERS, spread};
use crate::pressure::{Level, Pressure};
use crate::telemetry::{Kind, Meters};
use crate::thermal::{self, Thermometer};
use crate::{Account, Budget, Charge, MajorPageFaults, MemoryError, RuntimeError};

use super::eviction::{Kept, Reclaimed};
use super::share::{ModelShare, ModelShares, Takes, Urgency};

/// Steps from one look at the thermometer to the next.
const STEPS_PER_READING: usize = 64;

/// Events that are remembered until somebody asks.
const MOST_EVENTS: usize = 256;

/// Holds what is charged for a model, and changes what is kept of it when its governor says so.
pub(super) struct WeightCache {
    pub budget: Budget,
    /// Buffers that the plan has where something is streamed.
    pub buffers: usize,
    /// The order in which parts are kept, by part.
    pub order: Vec<usize>,
    /// With whom it shares the budget, if with anybody.
    tenancy: OnceLock<Tenancy>,
    /// Bytes that are charged for pages of keys and values and that those have not come to take yet.
    unfilled: AtomicU64,
    state: Mutex<State>,
}

/// One of several models that share a budget.
#[derive(Debug)]
pub(super) struct Tenancy {
    pub tenants: Arc<ModelShares>,
    pub tenant: Arc<ModelShare>,
}

/// What may change from one step to the next.
pub(super) struct State {
    governor: Option<Governor>,
    faults: Option<MajorPageFaults>,
    pub weights: Vec<Option<Charge>>,
    pub ring: Charge,
    pages: Charge,
    /// Whether all parts have been through a pass.
    has_run: bool,
    pub thermometer: Option<Thermometer>,
    /// Steps since it was looked at.
    steps: usize,
    events: VecDeque<Event>,
    meters: Arc<Meters>,
}

impl WeightCache {
    pub fn new(budget: &Budget, parts: usize, buffers: usize) -> Result<Arc<Self>, RuntimeError> {
        let state = State {
            governor: None,
            faults: MajorPageFaults::counter(),
            weights: (0..parts).map(|_| None).collect(),
            ring: budget.charge(Account::Scratch, 0)?,
            pages: budget.charge(Account::Streams, 0)?,
            has_run: false,
            thermometer: thermal::system().map(Thermometer::new),
            steps: 0,
            events: VecDeque::new(),
            meters: Arc::default(),
        };
        let buffers = buffers.max(FEWEST_BUFFERS);
        let order = (0..parts).collect();
        let (budget, tenancy, unfilled) = (budget.clone(), OnceLock::new(), AtomicU64::new(0));
        Ok(Arc::new(Self { budget, buffers, order, tenancy, unfilled, state: Mutex::new(state) }))
    }

    /// The same for one of several models that share a budget, whose `blocks` are read in those parts. Any few parts that are not
    /// kept are of blocks that lie far from each other, so that there is something to compute while they are read. What comes
    /// after the blocks is kept before them: nobody else runs while one part of an unembedding after the other is waited for.
    pub fn among(budget: &Budget, parts: usize, blocks: &[Range<usize>]) -> Result<Arc<Self>, RuntimeError> {
        let mut keeper = Self::new(budget, parts, FEWEST_BUFFERS)?;
        if let Some(keeper) = Arc::get_mut(&mut keeper) {
            let most = blocks.iter().map(Range::len).max().unwrap_or(0);
            let nth = |block: usize, piece: usize| {
                Some(blocks[block].start + piece).filter(|part| blocks[block].contains(part))
            };
            let blocks_apart = || spread(blocks.len()).map(|block| blocks.len() - 1 - block);
            let last_first =
                (0..most).flat_map(|piece| blocks_apart().filter_map(move |block| nth(block, piece)));
            for (at, part) in last_first.enumerate() {
                keeper.order[part] = parts - 1 - at;
            }
            let of_blocks = blocks.last().map_or(0, |pieces| pieces.end);
            for part in of_blocks..parts {
                keeper.order[part] = part - of_blocks;
            }
        }
        Ok(keeper)
    }

    /// With whom it shares the budget from now on.
    pub fn share(&self, tenancy: Tenancy) {
        // Said once, before anybody else knows of it.
        let _ = self.tenancy.set(tenancy);
    }

    pub fn tenancy(&self) -> Option<&Tenancy> {
        self.tenancy.get()
    }

    /// Bytes that are charged for pages of keys and values and that those have not come to take yet.
    pub fn unfilled(&self) -> u64 {
        self.unfilled.load(Ordering::Relaxed)
    }

    /// Charges what the model cannot do without. Others let go of what they keep for it.
    pub fn claim(
        &self,
        streamed: &StreamedWeights,
        account: Account,
        bytes: u64,
    ) -> Result<Charge, RuntimeError> {
        let mut state = self.state();
        let mut kept = Kept { keeper: self, streamed, state: &mut state };
        Ok(kept.insist(|kept| kept.keeper.budget.charge(account, bytes))?)
    }

    /// Has so many bytes be the model's own, with what it holds already. Others let go of what they keep for it.
    pub fn reserve(&self, streamed: &StreamedWeights, bytes: u64) -> Result<(), RuntimeError> {
        let mut state = self.state();
        let mut kept = Kept { keeper: self, streamed, state: &mut state };
        Ok(kept.insist(|kept| kept.keeper.budget.reserve(bytes))?)
    }

    /// Keeps parts in their order: all of them, or as many as there is room for without anybody giving up anything.
    pub fn fill(&self, streamed: &StreamedWeights, all: bool) -> Result<(), RuntimeError> {
        let mut parts: Vec<usize> = (0..streamed.parts()).collect();
        parts.sort_by_key(|&part| self.order[part]);
        for part in parts {
            let bytes = streamed.part_bytes(part);
            let has_room = |tenancy: &Tenancy| tenancy.tenants.has_room(bytes);
            if !all && !self.tenancy().is_none_or(has_room) {
                break;
            }
            let paid = match self.pay_for(streamed, part, all) {
                Err(RuntimeError::Memory(MemoryError::OverBudget { .. })) if !all => break,
                paid => paid?,
            };
            // Not under the lock: others may need what is kept already while the disk is waited for. What is paid stays here until
            // then, because a pass may pay for the same part, or somebody let it go as soon as it is there.
            let read = streamed.load(part);
            let mut state = self.state();
            if streamed.is_resident(part) && state.weights[part].is_none() {
                state.weights[part] = paid;
            }
            drop(state);
            read?;
        }
        Ok(())
    }

    /// Pays for a part that is about to be kept, by what others keep if it has to be.
    fn pay_for(
        &self,
        streamed: &StreamedWeights,
        part: usize,
        insists: bool,
    ) -> Result<Option<Charge>, RuntimeError> {
        let mut state = self.state();
        if streamed.is_resident(part) {
            return Ok(None);
        }
        let charge = || self.budget.charge(Account::Weights, streamed.part_bytes(part));
        let mut kept = Kept { keeper: self, streamed, state: &mut state };
        let charge = if insists { kept.insist(|_| charge()) } else { charge() };
        Ok(Some(charge?))
    }

    /// Charges what the program has come to take, now and then. Others let go of what they keep for it; where nobody can, the
    /// next one who wants something is refused it.
    pub fn look_at_program(&self, streamed: &StreamedWeights) {
        let Some(Tenancy { tenants, .. }) = self.tenancy() else { return };
        let Some(Takes { charged, seen }) = tenants.program_takes() else { return };
        // What it may come to take is nothing that others let go of something for.
        if tenants.charge_program(charged).is_ok() || tenants.program_bytes() >= seen {
            return;
        }
        let mut state = self.state();
        let mut kept = Kept { keeper: self, streamed, state: &mut state };
        let _ = kept.insist(|_| tenants.charge_program(seen));
    }

    /// Says how much the model is wanted from now on. Only who is wanted has buffers.
    pub fn set_urgency(&self, streamed: &StreamedWeights, urgency: Option<Urgency>) {
        let Some(Tenancy { tenant, .. }) = self.tenancy() else { return };
        if !tenant.set_wanted(urgency) {
            return;
        }
        if urgency.is_none() {
            streamed.rest();
        }
        let mut state = self.state();
        let mut kept = Kept { keeper: self, streamed, state: &mut state };
        kept.fit_ring();
        if urgency.is_none() {
            kept.clear_scrap();
        }
    }

    /// Lets go of something for somebody else: buffers that nobody needs now, or the part that would be kept last.
    pub fn give_up(&self, streamed: &StreamedWeights, tenant: &ModelShare) -> Reclaimed {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return Reclaimed::Busy,
        };
        Kept { keeper: self, streamed, state: &mut state }.give_up(tenant)
    }

    /// Keeps parts, the first ones first, all of them or as many as fit: into the budget, and into what is `available`
    /// when it is their turn, since a governor keeps the others as soon as there is room. What others are read into is
    /// paid for before that.
    pub fn keep_all(
        &self,
        streamed: &StreamedWeights,
        parts: &[usize],
        all: bool,
        available: impl Fn() -> Option<u64>,
    ) -> Result<(), RuntimeError> {
        let mut state = self.state();
        let mut kept = Kept { keeper: self, streamed, state: &mut state };
        if parts.len() < streamed.parts() {
            kept.fit_ring();
        }
        let ring = kept.state.ring.bytes();
        for &layer in parts {
            // Others may take memory meanwhile.
            if !all && available().is_some_and(|left| left < ring + kept.bytes(layer)) {
                break;
            }
            match kept.load(layer) {
                Err(RuntimeError::Memory(MemoryError::OverBudget { .. })) if !all => break,
                kept => kept?,
            }
        }
        kept.fit_ring();
        if kept.state.ring.bytes() == 0 && !kept.keeps_all() {
            // There is not even room for one buffer, and the budget says by how much.
            kept.state.ring.resize(streamed.buffer_bytes() as u64)?;
        }
        Ok(())
    }

    pub fn set_governor(&self, governor: Governor) {
        self.state().governor = Some(governor);
    }

    /// What tells how hot it is from now on.
    pub fn set_thermometer(&self, thermometer: Thermometer) {
        self.state().thermometer = Some(thermometer);
    }

    /// What has happened since this was last asked.
    pub fn events(&self) -> Vec<Event> {
        self.state().events.drain(..).collect()
    }

    /// Lets parts go at once, whatever is being computed: memory is short.
    pub fn alarmed(&self, streamed: &StreamedWeights, pressure: Pressure) {
        let is_pinned = |tenancy: &Tenancy| tenancy.tenant.is_pinned;
        if self.tenancy().is_some_and(is_pinned) && pressure.level < Level::Critical {
            return;
        }
        let mut state = self.state();
        let Some(mut governor) = state.governor.take() else { return };
        let mut kept = Kept { keeper: self, streamed, state: &mut state };
        let events = governor.alarmed(pressure, &mut kept);
        if !events.is_empty() {
            kept.fit_ring();
            kept.clear_scrap();
        }
        state.governor = Some(governor);
        for event in events {
            state.log(event, streamed);
        }
    }

    /// Where events are counted from now on.
    pub fn report(&self, meters: Arc<Meters>) {
        self.state().meters = meters;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for WeightCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightCache").field("budget", &self.budget).finish_non_exhaustive()
    }
}

impl State {
    /// Looks at the thermometer now and then. Returns whether it says something else than before.
    fn takes_temperature(&mut self) -> bool {
        let Some(thermometer) = &mut self.thermometer else { return false };
        self.steps += 1;
        if !self.steps.is_multiple_of(STEPS_PER_READING) {
            return false;
        }
        thermometer.heat() != thermometer.read()
    }

    pub fn log(&mut self, event: Event, streamed: &StreamedWeights) {
        self.meters.governed(&event);
        if matches!(event, Event::Shed { .. } | Event::Grew { .. }) {
            let kept = (0..streamed.parts()).filter(|&part| streamed.is_resident(part)).count();
            self.meters.mark(Kind::KeptParts, [kept as u64, 0]);
        }
        self.events.push_back(event);
        if self.events.len() > MOST_EVENTS {
            self.events.pop_front();
        }
    }
}

/// Looks after a model for as long as it lives.
#[derive(Debug)]
pub(super) struct ResidencyHook(pub Arc<WeightCache>);

impl StepHook for ResidencyHook {
    fn after_pass(&self, streamed: &StreamedWeights, rows: usize, time: Duration) {
        let mut state = self.0.state();
        state.has_run = true;
        let faults = state.faults.as_mut().map_or(0, MajorPageFaults::since_last);
        let heat_changed = state.takes_temperature();
        let Some(mut governor) = state.governor.take() else { return };
        let mut kept = Kept { keeper: &self.0, streamed, state: &mut state };
        // Between the layers of a model that shares the machine others run, and what it waits for is no part of its steps.
        let events = if rows == 1 && self.0.tenancy().is_none() {
            governor.after_step(rows, time, faults, &mut kept)
        } else {
            governor.after_pass(rows, time, &mut kept)
        };
        if heat_changed || !events.is_empty() || kept.pays_for_nothing() || kept.ring_is_misfit() {
            kept.fit_ring();
        }
        if !events.is_empty() {
            kept.clear_scrap();
        }
        state.governor = Some(governor);
        for event in events {
            state.log(event, streamed);
        }
        drop(state);
        self.0.look_at_program(streamed);
    }

    fn retains(&self, streamed: &StreamedWeights, part: usize) -> bool {
        let Some(Tenancy { tenants, .. }) = self.0.tenancy() else { return false };
        let bytes = streamed.part_bytes(part);
        if !tenants.has_room(bytes) {
            return false;
        }
        let mut state = self.0.state();
        let is_first = !state.has_run;
        let mut kept = Kept { keeper: &self.0, streamed, state: &mut state };
        // Somebody waits for what this pass comes to, and memory that is new can come more slowly than the disk reads. Most of what
        // does not fit as a whole is going to be read again in any case.
        if is_first && !kept.could_keep_all() {
            return false;
        }
        let keeps = (kept.is_among_the_next(part, bytes) && kept.wins(part, bytes))
            || kept.takes_ring(part, bytes)
            || kept.takes_place(part, bytes);
        if keeps {
            state.log(Event::Grew { layer: part }, streamed);
        }
        keeps
    }

    fn retain_failed(&self, streamed: &StreamedWeights, part: usize) {
        let mut state = self.0.state();
        // Another thread may have kept it meanwhile, and paid.
        if !streamed.is_resident(part) {
            state.weights[part] = None;
        }
    }
}

/// Pays for pages of keys and values, with kept parts if there is nothing else left.
#[derive(Debug)]
pub(super) struct Pages {
    pub keeper: Arc<WeightCache>,
    pub decoder: Arc<Decoder>,
}

impl PageLedger for Pages {
    fn may_allocate(&self, bytes: usize) -> bool {
        let Some(streamed) = self.decoder.streamed() else { return true };
        let mut state = self.keeper.state();
        let wanted = state.pages.bytes() + bytes as u64;
        let mut kept = Kept { keeper: &self.keeper, streamed, state: &mut state };
        let may = kept.insist(|kept| kept.state.pages.resize(wanted)).is_ok();
        if may {
            self.keeper.unfilled.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        may
    }

    fn has_headroom(&self, bytes: usize) -> bool {
        self.decoder.streamed().is_none() || self.keeper.budget.left() >= bytes as u64
    }

    fn freed(&self, bytes: usize) {
        let mut state = self.keeper.state();
        let left = state.pages.bytes().saturating_sub(bytes as u64);
        // Less can always be held.
        drop(state.pages.resize(left));
        self.keeper.unfilled.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    fn grew(&self, bytes: usize) {
        self.keeper.unfilled.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    fn shrank(&self, bytes: usize) {
        self.keeper.unfilled.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn register_reclaimable(&self, spare: &Weak<dyn Reclaimable>) {
        if let Some(Tenancy { tenant, .. }) = self.keeper.tenancy() {
            tenant.add_spare(spare);
        }
    }

    fn reclaim_from_others(&self) -> bool {
        let Some(Tenancy { tenants, tenant }) = self.keeper.tenancy() else { return false };
        tenants.idle_gives_page(tenant)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use firebox_model::StreamedConfig;
    use firebox_store::{Checkpoint, ReadAt, ReadMethod, StoreError, StreamConfig};

    use super::*;
    use crate::device;

    /// A disk that brings nothing while it is held up.
    #[derive(Debug)]
    struct HeldUp {
        files: Arc<dyn ReadAt>,
        is_held: AtomicBool,
        /// Whether somebody waits for it.
        is_asked: AtomicBool,
    }

    impl ReadAt for HeldUp {
        fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError> {
            // Nobody waits for it for ever.
            for _ in (0..6000).take_while(|_| self.is_held.load(Ordering::Relaxed)) {
                self.is_asked.store(true, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(10));
            }
            self.files.read_at(file, buffer, start)
        }
    }

    #[test]
    fn what_is_kept_may_change_while_a_part_is_read_to_be_kept() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
        let checkpoint = Checkpoint::open(path).unwrap();
        let disk = Arc::new(HeldUp {
            files: checkpoint.disk(ReadMethod::Buffered),
            is_held: AtomicBool::new(false),
            is_asked: AtomicBool::new(false),
        });
        let config = StreamedConfig {
            stream: StreamConfig { buffers: 0, ..StreamConfig::default() },
            method: Some(ReadMethod::Buffered),
            source: Some(disk.clone()),
            rate: Some(1e9),
            ..StreamedConfig::default()
        };
        let decoder = Decoder::stream(&checkpoint, &device("cpu").unwrap(), &config).unwrap();
        let streamed = decoder.streamed().unwrap();
        let budget = Budget::new(1 << 30);
        let keeper = WeightCache::among(&budget, streamed.parts(), streamed.blocks()).unwrap();
        disk.is_held.store(true, Ordering::Relaxed);
        thread::scope(|scope| {
            let filling = scope.spawn(|| keeper.fill(streamed, true));
            for _ in (0..6000).take_while(|_| !disk.is_asked.load(Ordering::Relaxed)) {
                thread::sleep(Duration::from_millis(10));
            }
            let is_free = keeper.state.try_lock().is_ok();
            disk.is_held.store(false, Ordering::Relaxed);
            filling.join().unwrap().unwrap();
            assert!(is_free);
        });
        assert!((0..streamed.parts()).all(|part| streamed.is_resident(part)));
        let bytes: u64 = (0..streamed.parts()).map(|part| streamed.part_bytes(part)).sum();
        assert_eq!(budget.held(Account::Weights), bytes);
    }

    #[test]
    fn what_comes_after_the_layers_is_kept_before_them() {
        for (layers, pieces, rest) in [(1, 1, 1), (4, 1, 0), (32, 1, 3), (33, 4, 7)] {
            let blocks: Vec<_> = (0..layers).map(|block| block * pieces..(block + 1) * pieces).collect();
            let parts = layers * pieces + rest;
            let keeper = WeightCache::among(&Budget::unlimited(), parts, &blocks).unwrap();
            let mut order = keeper.order.clone();
            assert!(order[layers * pieces..].iter().all(|at| *at < rest), "{order:?}");
            for block in blocks {
                let last = order[block].iter().filter(|at| **at >= parts - layers);
                assert_eq!(last.count(), 1, "any few that are missing are of different blocks");
            }
            order.sort_unstable();
            assert!(order.into_iter().eq(0..parts));
        }
    }
}
