use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firebox_cache::Ledger;
use firebox_model::{Decoder, Streamed, Watcher};

use crate::RuntimeError;
use crate::budget::{Account, Budget, Charge};
use crate::faults::MajorFaults;
use crate::governor::{Event, Governor, Residency};
use crate::pressure::Pressure;
use crate::telemetry::{Kind, Meters};
use crate::thermal::{self, Heat, Thermometer};

use super::FEWEST_BUFFERS;

/// Steps from one look at the thermometer to the next.
const STEPS_PER_READING: usize = 64;

/// Events that are remembered until somebody asks.
const MOST_EVENTS: usize = 256;

/// Holds what is charged for a model, and changes what is kept of it when its governor says so.
pub(super) struct Keeper {
    budget: Budget,
    /// Buffers that the plan has where something is streamed.
    buffers: usize,
    state: Mutex<State>,
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
        Ok(Arc::new(Self { budget: budget.clone(), buffers, state: Mutex::new(state) }))
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
        let events = if rows == 1 {
            governor.after_step(rows, time, faults, &mut kept)
        } else {
            governor.after_pass(rows, time, &mut kept)
        };
        if cooled || !events.is_empty() {
            kept.fit_ring();
        }
        state.governor = Some(governor);
        for event in events {
            state.log(event, streamed);
        }
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
        loop {
            let wanted = state.pages.bytes() + bytes as u64;
            if state.pages.resize(wanted).is_ok() {
                return true;
            }
            let Some(part) = (0..streamed.parts()).rev().find(|&part| streamed.is_kept(part)) else {
                return false;
            };
            let mut kept = Kept { keeper: &self.keeper, streamed, state: &mut state };
            kept.let_go(part);
            kept.fit_ring();
            state.log(Event::Shed { layers: vec![part] }, streamed);
        }
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
    fn keeps_all(&self) -> bool {
        (0..self.streamed.parts()).all(|part| self.streamed.is_kept(part))
    }

    /// Gives the ring what it needs, or as much of that as there is: less on a hot machine, which is not to work ahead.
    /// Where everything is kept it needs nothing.
    fn fit_ring(&mut self) {
        let heat = self.state.thermometer.as_ref().map_or(Heat::Nominal, Thermometer::heat);
        let wanted = if self.keeps_all() { 0 } else { heat.prefetch_depth(self.keeper.buffers).max(1) };
        let each = self.streamed.buffer_bytes() as u64;
        let granted = (0..=wanted).rev().find(|&count| self.state.ring.resize(count as u64 * each).is_ok());
        self.streamed.set_buffers(granted.unwrap_or(0));
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
