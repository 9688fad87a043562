use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

use firebox_cache::Ledger;
use firebox_model::{Decoder, Streamed, Watcher};

use crate::RuntimeError;
use crate::budget::{Account, Budget, Charge};
use crate::faults::MajorFaults;
use crate::governor::{Event, Governor, Residency};
use crate::pressure::{Level, Pressure};
use crate::telemetry::{Kind, Meters};
use crate::thermal::{self, Heat, Thermometer};

use super::FEWEST_BUFFERS;
use super::tenant::{Tenant, Tenants, Urgency};

/// Steps from one look at the thermometer to the next.
const STEPS_PER_READING: usize = 64;

/// Events that are remembered until somebody asks.
const MOST_EVENTS: usize = 256;

/// Where no more than one part in so many is not kept, others compute while each of them is read, and one buffer does for all:
/// a second one is worth less than another part that is kept.
const FEW_MISSING: usize = 3;

/// How often somebody is asked again for memory who is just about to change what it keeps.
const ASKED_AGAIN: usize = 10_000;

/// Holds what is charged for a model, and changes what is kept of it when its governor says so.
pub(super) struct Keeper {
    budget: Budget,
    /// Buffers that the plan has where something is streamed.
    buffers: usize,
    /// The order in which parts are kept, by part.
    order: Vec<usize>,
    /// With whom it shares the budget, if with anybody.
    tenancy: OnceLock<Tenancy>,
    state: Mutex<State>,
}

/// One of several models that share a budget.
#[derive(Debug)]
pub(super) struct Tenancy {
    pub tenants: Arc<Tenants>,
    pub tenant: Arc<Tenant>,
}

/// What came of asking for memory.
enum Gave {
    /// Some was given up.
    Some,
    /// Nobody has any to give.
    Nothing,
    /// It has some, and is about to change that.
    Busy,
}

struct State {
    governor: Option<Governor>,
    faults: Option<MajorFaults>,
    weights: Vec<Option<Charge>>,
    ring: Charge,
    pages: Charge,
    thermometer: Option<Thermometer>,
    /// Steps since it was looked at.
    steps: usize,
    events: VecDeque<Event>,
    meters: Arc<Meters>,
}

impl Keeper {
    pub fn new(budget: &Budget, parts: usize, buffers: usize) -> Result<Arc<Self>, RuntimeError> {
        let state = State {
            governor: None,
            faults: MajorFaults::counter(),
            weights: (0..parts).map(|_| None).collect(),
            ring: budget.charge(Account::Scratch, 0)?,
            pages: budget.charge(Account::Streams, 0)?,
            thermometer: thermal::system().map(Thermometer::new),
            steps: 0,
            events: VecDeque::new(),
            meters: Arc::default(),
        };
        let buffers = buffers.max(FEWEST_BUFFERS);
        let order = (0..parts).collect();
        let (budget, tenancy) = (budget.clone(), OnceLock::new());
        Ok(Arc::new(Self { budget, buffers, order, tenancy, state: Mutex::new(state) }))
    }

    /// The same for one of several models that share a budget. Any few of its parts that are not kept lie far from each other,
    /// so that there is something to compute while they are read.
    pub fn among(budget: &Budget, parts: usize) -> Result<Arc<Self>, RuntimeError> {
        let mut keeper = Self::new(budget, parts, FEWEST_BUFFERS)?;
        if let Some(keeper) = Arc::get_mut(&mut keeper) {
            for (at, part) in spread(parts).enumerate() {
                keeper.order[parts - 1 - part] = parts - 1 - at;
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

    /// Charges what the model cannot do without. Others let go of what they keep for it.
    pub fn claim(&self, streamed: &Streamed, account: Account, bytes: u64) -> Result<Charge, RuntimeError> {
        let mut state = self.state();
        let mut kept = Kept { keeper: self, streamed, state: &mut state };
        kept.insist(|kept| kept.keeper.budget.charge(account, bytes))
    }

    /// Has so many bytes be the model's own, with what it holds already. Others let go of what they keep for it.
    pub fn reserve(&self, streamed: &Streamed, bytes: u64) -> Result<(), RuntimeError> {
        let mut state = self.state();
        let mut kept = Kept { keeper: self, streamed, state: &mut state };
        kept.insist(|kept| kept.keeper.budget.reserve(bytes))
    }

    /// Keeps parts in their order: all of them, or as many as there is room for without anybody giving up anything.
    pub fn fill(&self, streamed: &Streamed, all: bool) -> Result<(), RuntimeError> {
        let mut parts: Vec<usize> = (0..streamed.parts()).collect();
        parts.sort_by_key(|&part| self.order[part]);
        for part in parts {
            let bytes = streamed.kept_bytes(part);
            let has_room = |tenancy: &Tenancy| tenancy.tenants.has_room(bytes);
            if !all && !self.tenancy().is_none_or(has_room) {
                break;
            }
            let mut state = self.state();
            let mut kept = Kept { keeper: self, streamed, state: &mut state };
            match if all { kept.insist(|kept| kept.keep(part)) } else { kept.keep(part) } {
                Err(RuntimeError::OverBudget { .. }) if !all => break,
                kept => kept?,
            }
        }
        Ok(())
    }

    /// Says how much the model is wanted from now on. Only who is wanted has buffers.
    pub fn set_urgency(&self, streamed: &Streamed, urgency: Option<Urgency>) {
        let Some(Tenancy { tenant, .. }) = self.tenancy() else { return };
        if !tenant.set_wanted(urgency) {
            return;
        }
        if urgency.is_none() {
            streamed.rest();
        }
        let mut state = self.state();
        Kept { keeper: self, streamed, state: &mut state }.fit_ring();
    }

    /// Lets go of something for somebody else: buffers that nobody needs now, or the part that would be kept last.
    fn give_up(&self, streamed: &Streamed, tenant: &Tenant) -> Gave {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return Gave::Busy,
        };
        Kept { keeper: self, streamed, state: &mut state }.give_up(tenant)
    }

    /// Keeps parts, the first ones first, all of them or as many as fit: into the budget, and into what is `available`
    /// when it is their turn, since a governor keeps the others as soon as there is room. What others are read into is
    /// paid for before that.
    pub fn keep_all(
        &self,
        streamed: &Streamed,
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
            match kept.keep(layer) {
                Err(RuntimeError::OverBudget { .. }) if !all => break,
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

    /// What has happened since this was last asked.
    pub fn events(&self) -> Vec<Event> {
        self.state().events.drain(..).collect()
    }

    /// Lets parts go at once, whatever is being computed: memory is short.
    pub fn alarmed(&self, streamed: &Streamed, pressure: Pressure) {
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

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("budget", &self.budget).finish_non_exhaustive()
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

    fn log(&mut self, event: Event, streamed: &Streamed) {
        self.meters.governed(&event);
        if matches!(event, Event::Shed { .. } | Event::Grew { .. }) {
            let kept = (0..streamed.parts()).filter(|&part| streamed.is_kept(part)).count();
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
pub(super) struct Looker(pub Arc<Keeper>);

impl Watcher for Looker {
    fn after_pass(&self, streamed: &Streamed, rows: usize, time: Duration) {
        let mut state = self.0.state();
        let faults = state.faults.as_mut().map_or(0, MajorFaults::since_last);
        let cooled = state.takes_temperature();
        let Some(mut governor) = state.governor.take() else { return };
        let mut kept = Kept { keeper: &self.0, streamed, state: &mut state };
        // Between the layers of a model that shares the machine others run, and what it waits for is no part of its steps.
        let events = if rows == 1 && self.0.tenancy().is_none() {
            governor.after_step(rows, time, faults, &mut kept)
        } else {
            governor.after_pass(rows, time, &mut kept)
        };
        if cooled || !events.is_empty() || kept.pays_for_nothing() || kept.ring_is_misfit() {
            kept.fit_ring();
        }
        if let Some(Tenancy { tenants, .. }) = self.0.tenancy()
            && let Some(program) = tenants.program_takes()
        {
            // Where nobody can give up more, the next one who wants something is refused it.
            let _ = kept.insist(|_| tenants.charge_program(program));
        }
        state.governor = Some(governor);
        for event in events {
            state.log(event, streamed);
        }
    }

    fn keeps(&self, streamed: &Streamed, part: usize, bytes: u64) -> bool {
        let Some(Tenancy { tenants, .. }) = self.0.tenancy() else { return false };
        if !tenants.has_room(bytes) {
            return false;
        }
        let mut state = self.0.state();
        let mut kept = Kept { keeper: &self.0, streamed, state: &mut state };
        let keeps = (kept.is_among_the_next(part, bytes) && kept.wins(part, bytes))
            || kept.takes_ring(part, bytes)
            || kept.takes_place(part, bytes);
        if keeps {
            state.log(Event::Grew { layer: part }, streamed);
        }
        keeps
    }
}

/// Pays for pages of keys and values, with kept parts if there is nothing else left.
#[derive(Debug)]
pub(super) struct Pages {
    pub keeper: Arc<Keeper>,
    pub decoder: Arc<Decoder>,
}

impl Ledger for Pages {
    fn may_make(&self, bytes: usize) -> bool {
        let Some(streamed) = self.decoder.streamed() else { return true };
        let mut state = self.keeper.state();
        let wanted = state.pages.bytes() + bytes as u64;
        let mut kept = Kept { keeper: &self.keeper, streamed, state: &mut state };
        kept.insist(|kept| kept.state.pages.resize(wanted)).is_ok()
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.decoder.streamed().is_none() || self.keeper.budget.left() >= bytes as u64
    }

    fn unmade(&self, bytes: usize) {
        let mut state = self.keeper.state();
        let left = state.pages.bytes().saturating_sub(bytes as u64);
        // Less can always be held.
        drop(state.pages.resize(left));
    }
}

/// The parts of a model as something to be governed.
struct Kept<'a> {
    keeper: &'a Keeper,
    streamed: &'a Streamed,
    state: &'a mut State,
}

impl Kept<'_> {
    /// Takes what cannot be done without: as long as that does not fit, parts go, those first whose model is the least
    /// urgent, this one included.
    fn insist<R>(&mut self, take: impl Fn(&mut Self) -> Result<R, RuntimeError>) -> Result<R, RuntimeError> {
        let mut asked = 0;
        loop {
            match take(self) {
                Err(error @ RuntimeError::OverBudget { .. }) => match self.ask_anybody() {
                    Gave::Some => {}
                    Gave::Busy if asked < ASKED_AGAIN => {
                        asked += 1;
                        thread::yield_now();
                    }
                    Gave::Busy | Gave::Nothing => return Err(error),
                },
                taken => return taken,
            }
        }
    }

    fn ask_anybody(&mut self) -> Gave {
        let Some(Tenancy { tenants, tenant }) = self.keeper.tenancy() else { return self.let_last_go() };
        self.ask(&tenants.least_urgent_first(), tenant)
    }

    /// Asks one after the other, of whom this may be one.
    fn ask(&mut self, others: &[Arc<Tenant>], own: &Arc<Tenant>) -> Gave {
        let mut busy = false;
        for other in others {
            let (Some(keeper), Some(decoder)) = (other.keeper.upgrade(), other.decoder.upgrade()) else {
                continue;
            };
            let Some(streamed) = decoder.streamed() else { continue };
            let gave =
                if Arc::ptr_eq(other, own) { self.give_up(own) } else { keeper.give_up(streamed, other) };
            match gave {
                Gave::Some => return Gave::Some,
                Gave::Busy => busy = true,
                Gave::Nothing => {}
            }
        }
        if busy { Gave::Busy } else { Gave::Nothing }
    }

    fn give_up(&mut self, tenant: &Tenant) -> Gave {
        let ring = self.state.ring.bytes();
        if tenant.wanted().urgency.is_none() && ring > 0 {
            self.fit_ring();
            if self.state.ring.bytes() < ring {
                return Gave::Some;
            }
        }
        let gave = if tenant.is_pinned { Gave::Nothing } else { self.let_last_go() };
        if matches!(gave, Gave::Nothing) {
            // Somebody is reading into a buffer, and gives it back then.
            return if self.pays_for_more_than_needed() { Gave::Busy } else { Gave::Nothing };
        }
        // Who kept everything had no buffers, and needs some now: of what it has given up itself.
        while tenant.wanted().urgency.is_some() && self.state.ring.bytes() == 0 {
            if !self.set_ring(self.few_buffers()) && !matches!(self.let_last_go(), Gave::Some) {
                break;
            }
        }
        gave
    }

    /// Lets the part go that would be kept last.
    fn let_last_go(&mut self) -> Gave {
        let kept = (0..self.streamed.parts()).filter(|&part| self.streamed.is_kept(part));
        let Some(part) = kept.max_by_key(|&part| self.keeper.order[part]) else { return Gave::Nothing };
        self.let_go(part);
        if self.keeper.tenancy().is_none() {
            self.fit_ring();
        }
        self.state.log(Event::Shed { layers: vec![part] }, self.streamed);
        Gave::Some
    }

    /// Whether a part is one of those that come next: there may be room for it and for what is kept before it.
    fn is_among_the_next(&self, part: usize, bytes: u64) -> bool {
        let Some(Tenancy { tenants, tenant }) = self.keeper.tenancy() else { return false };
        let weaker = tenants.least_urgent_first().into_iter().filter(|other| tenant.comes_before(other));
        let keepers = weaker.filter_map(|other| other.keeper.upgrade());
        let takeable: u64 = keepers.map(|keeper| keeper.budget.held(Account::Weights)).sum();
        let room = self.keeper.budget.left() + takeable;
        let count = (0..self.streamed.parts()).filter(|&part| self.streamed.is_kept(part)).count();
        self.keeper.order[part] < count + (room / bytes.max(1)) as usize
    }

    /// Pays for a part with what is left, and with what those keep who are less urgent.
    fn wins(&mut self, part: usize, bytes: u64) -> bool {
        let Some(Tenancy { tenants, tenant }) = self.keeper.tenancy() else { return false };
        loop {
            if let Ok(charge) = self.keeper.budget.charge(Account::Weights, bytes) {
                self.state.weights[part] = Some(charge);
                return true;
            }
            let mut weaker = tenants.least_urgent_first();
            weaker.retain(|other| tenant.comes_before(other));
            if !matches!(self.ask(&weaker, tenant), Gave::Some) {
                return false;
            }
        }
    }

    /// Puts a part in the place of one that should be kept after it, so that those that are not kept lie far from each other.
    fn takes_place(&mut self, part: usize, bytes: u64) -> bool {
        let order = &self.keeper.order;
        let kept = (0..self.streamed.parts()).filter(|&part| self.streamed.is_kept(part));
        let Some(last) = kept.max_by_key(|&part| order[part]) else { return false };
        if order[last] < order[part] || self.keeper.budget.left() + self.bytes(last) < bytes {
            return false;
        }
        self.let_go(last);
        let charge = self.keeper.budget.charge(Account::Weights, bytes).ok();
        self.state.log(Event::Shed { layers: vec![last] }, self.streamed);
        self.state.weights[part] = charge;
        self.state.weights[part].is_some()
    }

    /// Pays for a part with the ring, where that has room for all that is not kept.
    fn takes_ring(&mut self, part: usize, bytes: u64) -> bool {
        let each = self.streamed.buffer_bytes() as u64;
        let missing = self.missing() as u64;
        let Some(smaller) = self.state.ring.bytes().checked_sub(each) else { return false };
        // A copy is there beside the buffer for a while.
        if bytes < each || missing * each > self.state.ring.bytes() {
            return false;
        }
        self.streamed.set_buffers((smaller / each) as usize);
        if self.state.ring.resize(smaller).is_err() {
            return false;
        }
        match self.keeper.budget.charge(Account::Weights, bytes) {
            Ok(charge) => {
                self.state.weights[part] = Some(charge);
                true
            }
            // Somebody else was faster.
            Err(_) => {
                self.fit_ring();
                false
            }
        }
    }

    fn keeps_all(&self) -> bool {
        (0..self.streamed.parts()).all(|part| self.streamed.is_kept(part))
    }

    /// Gives the ring what it needs, or as much of that as there is: less on a hot machine, which is not to work ahead.
    /// Where everything is kept it needs nothing.
    fn fit_ring(&mut self) {
        let heat = self.state.thermometer.as_ref().map_or(Heat::Nominal, Thermometer::heat);
        let is_idle = |tenancy: &Tenancy| tenancy.tenant.wanted().urgency.is_none();
        let needs_none = self.keeps_all() || self.keeper.tenancy().is_some_and(is_idle);
        let most = if self.keeper.tenancy().is_some() { self.few_buffers() } else { self.keeper.buffers };
        let wanted = if needs_none { 0 } else { heat.prefetch_depth(most).max(1) };
        let each = self.streamed.buffer_bytes() as u64;
        if self.keeper.tenancy().is_some() && !needs_none {
            // Nobody can do without, and somebody can always give up as much.
            let least = wanted.min(FEWEST_BUFFERS) as u64 * each;
            if self.state.ring.bytes() < least {
                let _ = self.insist(|kept| kept.state.ring.resize(least));
            }
        }
        let _ = (0..=wanted).rev().find(|&buffers| self.set_ring(buffers));
    }

    /// Gives the ring so many buffers, if they can be paid for. Those in use that are too many then are paid for until they
    /// are given back, and that is noticed.
    fn set_ring(&mut self, buffers: usize) -> bool {
        let each = self.streamed.buffer_bytes() as u64;
        let wanted = buffers as u64 * each;
        if wanted > self.state.ring.bytes() && self.state.ring.resize(wanted).is_err() {
            return false;
        }
        self.streamed.set_buffers(buffers);
        let made = self.streamed.made_buffers().max(buffers) as u64 * each;
        // Less can always be held.
        made >= self.state.ring.bytes() || self.state.ring.resize(made).is_ok()
    }

    fn missing(&self) -> usize {
        (0..self.streamed.parts()).filter(|&part| !self.streamed.is_kept(part)).count()
    }

    /// The buffers that others are asked to make room for.
    fn few_buffers(&self) -> usize {
        if self.missing() * FEW_MISSING <= self.streamed.parts() { 1 } else { FEWEST_BUFFERS }
    }

    /// Whether it has another number of buffers than it should.
    fn ring_is_misfit(&self) -> bool {
        let each = self.streamed.buffer_bytes() as u64;
        let buffers = if self.keeps_all() { 0 } else { self.few_buffers() as u64 };
        self.keeper.tenancy().is_some() && self.state.ring.bytes() != buffers * each
    }

    /// Whether it pays for buffers that it is going to give back.
    fn pays_for_more_than_needed(&self) -> bool {
        self.state.ring.bytes() > (self.streamed.buffers() * self.streamed.buffer_bytes()) as u64
    }

    /// Whether it pays for buffers that are there no longer.
    fn pays_for_nothing(&self) -> bool {
        let buffers = self.streamed.made_buffers().max(self.streamed.buffers());
        self.state.ring.bytes() > (buffers * self.streamed.buffer_bytes()) as u64
    }
}

impl Residency for Kept<'_> {
    fn layers(&self) -> usize {
        self.streamed.parts()
    }

    fn is_kept(&self, part: usize) -> bool {
        self.streamed.is_kept(part)
    }

    fn bytes(&self, part: usize) -> u64 {
        self.streamed.kept_bytes(part)
    }

    fn keep(&mut self, part: usize) -> Result<(), RuntimeError> {
        if self.is_kept(part) {
            return Ok(());
        }
        let charge = self.keeper.budget.charge(Account::Weights, self.streamed.kept_bytes(part))?;
        self.streamed.keep(part)?;
        self.state.weights[part] = Some(charge);
        Ok(())
    }

    fn let_go(&mut self, part: usize) {
        self.streamed.let_go(part);
        self.state.weights[part] = None;
    }
}

/// The numbers below `count`, any few of the first of which are far from each other: in the order of their bits read
/// backwards.
fn spread(count: usize) -> impl Iterator<Item = usize> {
    let bits = count.next_power_of_two().trailing_zeros();
    let reversed = move |at: usize| (0..bits).fold(0, |number, bit| number << 1 | (at >> bit & 1));
    (0..count.next_power_of_two()).map(reversed).filter(move |&at| at < count)
}
