use std::collections::{BTreeMap, VecDeque};
use std::fmt::{self, Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use firebox_model::{Head, ModelError};

use super::HeadHistory;
use super::retry::Retry;
use super::source::{HeadSource, ReadyHead, Requantized};
use crate::memory::release_with_code;
use crate::telemetry::{Counter, Gauge, Kind, Meters, Telemetry};
use crate::{Account, Budget, Charge, MemoryError, RuntimeError};

/// The head that stands in for those that cannot be used: small, made from all of them, in memory from the start.
pub const FALLBACK: &str = "universal";

/// How many events are kept for whoever asks.
const EVENTS: usize = 256;

/// How many heads are made ready because they are likely next.
const LIKELY: usize = 2;

/// How long after the last head was loaded what that took goes back: whoever waited for it has gone on by then, and has not yet
/// taken all that a token takes.
const AFTERWARDS: Duration = Duration::from_millis(20);

/// How a rack works.
#[derive(Debug, Clone)]
pub struct RackConfig {
    /// How long a sequence waits for a head that is not in memory before it takes another one.
    pub patience: Duration,
    /// Bytes of heads that may be in memory, where no budget says.
    pub room: u64,
    /// What heads in memory are charged to, if not to what their model was [fitted](crate::Model::open_within) into.
    pub budget: Option<Budget>,
    /// What is known of habits.
    pub history: HeadHistory,
}

impl RackConfig {
    /// One that rather waits for a head than lets another stand in for it.
    pub fn patient() -> Self {
        Self { patience: Duration::from_secs(60), ..Self::default() }
    }
}

impl Default for RackConfig {
    fn default() -> Self {
        Self {
            patience: Duration::from_millis(500),
            room: u64::MAX,
            budget: None,
            history: HeadHistory::default(),
        }
    }
}

/// What was put on in answer to a wish.
#[derive(Debug, Clone)]
pub struct Worn {
    /// The head; none means the model's own last layers.
    pub head: Option<Arc<Head>>,
    /// Why it is not the one that was wished for.
    pub instead: Option<Arc<RuntimeError>>,
    /// Whether it was not in memory and had to be waited for.
    pub waited: bool,
    /// How long it took.
    pub took: Duration,
}

impl Worn {
    /// What took no time.
    pub(crate) fn at_once(head: Option<Arc<Head>>, instead: Option<Arc<RuntimeError>>) -> Self {
        Self { head, instead, waited: false, took: Duration::ZERO }
    }
}

/// Where a head is.
#[derive(Debug, Clone)]
pub enum HeadState {
    /// In memory, and worn by somebody.
    Active,
    /// In memory.
    Warm,
    /// On its way into memory.
    Loading,
    /// On disk.
    OnDisk,
    /// On disk, and could not be used.
    Failed {
        /// Why.
        reason: Arc<RuntimeError>,
    },
}

/// Something that happened to a head.
#[derive(Debug, Clone)]
pub enum HeadEvent {
    /// It is in memory.
    Loaded {
        /// Its name.
        name: String,
        /// How long that took.
        took: Duration,
        /// Whether it was not asked for yet.
        ahead: bool,
    },
    /// A newer generation of it is in use from now on.
    Updated {
        /// Its name.
        name: String,
    },
    /// Its numbers are not those of the trunk, and what passes is quantized anew.
    Requantizing {
        /// Its name.
        name: String,
        /// From what to what.
        schemes: Requantized,
    },
    /// It went from memory to make room.
    Evicted {
        /// Its name.
        name: String,
    },
    /// It could not be used.
    Failed {
        /// Its name.
        name: String,
        /// Why.
        reason: Arc<RuntimeError>,
        /// When it is tried again.
        retry_in: Duration,
    },
    /// It was not there in time.
    Late {
        /// Its name.
        name: String,
    },
}

impl Display for HeadEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loaded { name, took, ahead } => {
                let why = if *ahead { " ahead of need" } else { "" };
                write!(f, "head {name} loaded{why} in {:.1} ms", took.as_secs_f64() * 1e3)
            }
            Self::Updated { name } => write!(f, "head {name} is used in its newer generation"),
            Self::Requantizing { name, schemes: Requantized { trunk, head } } => {
                let named = |scheme: &Option<firebox_store::Quantization>| match scheme {
                    Some(scheme) => scheme.to_string(),
                    None => "floats".into(),
                };
                write!(f, "head {name} is in {}, its trunk in {}", named(head), named(trunk))
            }
            Self::Evicted { name } => write!(f, "head {name} left memory"),
            Self::Failed { name, reason, retry_in } => {
                write!(f, "head {name}: {reason}; tried again in {:.0} s", retry_in.as_secs_f64())
            }
            Self::Late { name } => write!(f, "head {name} is not there in time"),
        }
    }
}

/// The heads of a model, as many of them in memory as there is room for. Clones are the same rack.
#[derive(Debug, Clone)]
pub struct HeadRack(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    source: Arc<dyn HeadSource>,
    config: RackConfig,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    hanging: BTreeMap<String, Hanging>,
    retries: BTreeMap<String, Retry>,
    /// Why a generation of a head could not be used.
    failures: BTreeMap<String, (Option<u64>, Arc<RuntimeError>)>,
    /// Names to load, those that somebody waits for in front.
    wanted: VecDeque<Wanted>,
    loading: Option<String>,
    has_loader: bool,
    history: HeadHistory,
    events: VecDeque<HeadEvent>,
    /// Counts uses, to tell which head was used longest ago.
    time: u64,
    /// What is charged for the memory of a head that went, as long as the next one may have it.
    left: Option<Charge>,
    meters: Arc<Meters>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    name: String,
    ahead: bool,
}

#[derive(Debug)]
struct Hanging {
    ready: ReadyHead,
    used: u64,
    charge: Option<Charge>,
}

impl HeadRack {
    /// An empty rack. The [fallback](FALLBACK) is loaded at once, if there is one, and stays.
    pub fn new(source: Arc<dyn HeadSource>, config: RackConfig) -> Result<Self, RuntimeError> {
        let state = Mutex::new(State { history: config.history.clone(), ..State::default() });
        let rack = Self(Arc::new(Shared { source, config, state, changed: Condvar::new() }));
        // A table that cannot be read is told to whoever asks for a head.
        if let Ok(Some(_)) = rack.0.source.generation(FALLBACK) {
            rack.0.load(&Wanted { name: FALLBACK.into(), ahead: true });
        }
        Ok(rack)
    }

    /// A head to go on with. Where the one of that name is not in memory, it is waited for, and where that takes too
    /// long or fails, the fallback is taken, or the model's own last layers where there is no fallback.
    pub fn wear(&self, name: &str) -> Worn {
        let began = Instant::now();
        let found = self.0.wear(name, began).and_then(|(head, waited)| {
            self.0.source.build(&head)?;
            Ok((head, waited))
        });
        let (head, instead, waited) = match found {
            Ok((head, waited)) => (Some(head), None, waited),
            Err(reason) => {
                if matches!(self.0.source.generation(FALLBACK), Ok(Some(_))) {
                    self.hint(FALLBACK);
                }
                (self.0.state().worn(FALLBACK), Some(reason), false)
            }
        };
        Worn { head, instead, waited, took: began.elapsed() }
    }

    /// Notes that a sequence went from one head to another, and makes ready what is likely to follow.
    pub fn note(&self, before: &str, after: &str) {
        let likely: Vec<String> = {
            let mut state = self.0.state();
            state.history.note(before, after);
            state.history.likeliest(after).into_iter().take(LIKELY).map(str::to_owned).collect()
        };
        likely.iter().for_each(|name| self.hint(name));
    }

    /// Makes a head ready in the background, because it may be needed soon.
    pub fn hint(&self, name: &str) {
        let used = self.0.in_use(name);
        let mut state = self.0.state();
        if !state.has(name, used) && state.is_due(name) {
            self.0.want(&mut state, Wanted { name: name.to_owned(), ahead: true });
        }
    }

    /// Whether who wants to wear a head gets it without waiting.
    pub(crate) fn is_at_hand(&self, name: &str) -> bool {
        let used = self.0.in_use(name);
        self.0.state().has(name, used)
    }

    /// Waits until nothing is being loaded.
    pub fn settle(&self) {
        let mut state = self.0.state();
        while state.loading.is_some() || !state.wanted.is_empty() {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets a head go. Sequences that wear it keep it; where none does, the next head may have its memory.
    pub fn let_go(&self, name: &str) {
        // Under the lock, which the charge of its memory is under as well.
        drop(self.0.state().take_down(name));
    }

    /// Which heads there are.
    pub fn names(&self) -> Vec<String> {
        // Who asks can do no more about a table that cannot be read than see that nothing is in it.
        self.0.source.names().unwrap_or_default()
    }

    /// Which heads are in memory.
    pub fn in_memory(&self) -> Vec<String> {
        self.0.state().hanging.keys().cloned().collect()
    }

    /// Which heads there are, and where each is.
    pub fn states(&self) -> Vec<(String, HeadState)> {
        let names = self.names();
        let state = self.0.state();
        let of = |name: &String| {
            if let Some(hanging) = state.hanging.get(name) {
                // The rack's own is one.
                let is_worn = Arc::strong_count(&hanging.ready.head) > 1;
                return if is_worn { HeadState::Active } else { HeadState::Warm };
            }
            if state.loading.as_ref() == Some(name) || state.wanted.iter().any(|wanted| wanted.name == *name)
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

    /// Bytes that one of them takes in memory.
    pub fn bytes_of(&self, name: &str) -> Result<u64, RuntimeError> {
        self.0.source.bytes(name)
    }

    /// Bytes that those in memory take.
    pub fn bytes(&self) -> u64 {
        self.0.state().bytes()
    }

    /// Lets it say what it does in these numbers from now on.
    pub(crate) fn report(&self, meters: &Arc<Meters>, telemetry: &Telemetry) {
        self.0.state().meters = meters.clone();
        let shared = Arc::downgrade(&self.0);
        telemetry.ask(meters, "heads", move |snapshot| {
            let Some(shared) = shared.upgrade() else { return false };
            let state = shared.state();
            snapshot.gauges.insert(Gauge::HeadsInMemory, state.hanging.len() as u64);
            snapshot.gauges.insert(Gauge::Heads, state.bytes());
            true
        });
    }

    /// What happened since it was asked last, the oldest left out where it was much.
    pub fn events(&self) -> Vec<HeadEvent> {
        self.0.state().events.drain(..).collect()
    }

    /// What is known of habits.
    pub fn history(&self) -> HeadHistory {
        self.0.state().history.clone()
    }
}

impl Shared {
    fn wear(self: &Arc<Self>, name: &str, began: Instant) -> Result<(Arc<Head>, bool), Arc<RuntimeError>> {
        let generation = self.source.generation(name).map_err(Arc::new)?;
        let mut state = self.state();
        if generation.is_none() {
            return Err(Arc::new(RuntimeError::NoHead { name: name.to_owned() }));
        }
        self.renew(&mut state, name, generation)?;
        if let Some(head) = state.worn(name) {
            return Ok((head, false));
        }
        // What is wrong with one generation says nothing about another.
        if state.failures.get(name).is_some_and(|(failed, _)| *failed != generation) {
            state.retries.remove(name);
            state.failures.remove(name);
        }
        if !state.is_due(name)
            && let Some((_, reason)) = state.failures.get(name)
        {
            return Err(reason.clone());
        }
        state.failures.remove(name);
        loop {
            // Again, where it came and had to make room before anybody could take it.
            self.want(&mut state, Wanted { name: name.to_owned(), ahead: false });
            let Some(left) = self.config.patience.checked_sub(began.elapsed()) else {
                state.log(HeadEvent::Late { name: name.to_owned() });
                let waited = self.config.patience;
                return Err(Arc::new(RuntimeError::HeadLate { name: name.to_owned(), waited }));
            };
            let waited = self.changed.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            // It may have been under way before the one that is asked for was there.
            self.renew(&mut state, name, generation)?;
            if let Some(head) = state.worn(name) {
                return Ok((head, true));
            }
            if let Some((_, reason)) = state.failures.get(name) {
                return Err(reason.clone());
            }
        }
    }

    /// The generation that is in use; none where there is none or nobody can say. That is read from a disk, and so not under
    /// the lock.
    fn in_use(&self, name: &str) -> Option<u64> {
        self.source.generation(name).ok().flatten()
    }

    /// Takes a head down that is not the one in use any more. Whose wish is older than what hangs takes that.
    fn renew(&self, state: &mut State, name: &str, wished: Option<u64>) -> Result<(), Arc<RuntimeError>> {
        let held = state.generation(name);
        if held.is_some() && held != wished && held != self.source.generation(name).map_err(Arc::new)? {
            state.take_down(name);
            state.log(HeadEvent::Updated { name: name.to_owned() });
        }
        Ok(())
    }

    fn want(self: &Arc<Self>, state: &mut State, wanted: Wanted) {
        let is_known = |other: &Wanted| other.name == wanted.name && (wanted.ahead || !other.ahead);
        if state.loading.as_ref() == Some(&wanted.name) || state.wanted.iter().any(is_known) {
            return;
        }
        state.wanted.retain(|other| other.name != wanted.name);
        if wanted.ahead {
            state.wanted.push_back(wanted);
        } else {
            state.wanted.push_front(wanted);
        }
        if !state.has_loader {
            let shared = Arc::downgrade(self);
            let loader = thread::Builder::new().name("heads".into()).spawn(move || load_all(&shared));
            state.has_loader = loader.is_ok();
        }
    }

    /// Loads a head, unless it is there.
    fn load(&self, wanted: &Wanted) {
        let began = Instant::now();
        let generation = self.source.generation(&wanted.name).unwrap_or_default();
        let load = || {
            let charge = self.room_for(&wanted.name)?;
            Ok((self.source.load(&wanted.name)?, charge))
        };
        // A file that makes a kernel panic must not take the loader with it.
        let loaded = catch_unwind(AssertUnwindSafe(load)).unwrap_or_else(|_| {
            let reason = format!("head {:?} is of shapes that cannot be computed with", wanted.name);
            Err(ModelError::Device { reason }.into())
        });
        let mut state = self.state();
        let name = wanted.name.clone();
        // What was read before it failed is spare by now, and nothing is charged for it.
        if loaded.is_err()
            && let Some(spare) = self.source.spare()
        {
            spare.clear();
            state.left = None;
        }
        match loaded {
            // There will be room once somebody needs it.
            Err(RuntimeError::Memory(MemoryError::OverBudget { .. })) if wanted.ahead => {}
            Ok((ready, charge)) => {
                state.time += 1;
                let used = state.time;
                state.retries.remove(&name);
                state.failures.remove(&name);
                if let Some(schemes) = ready.requantized {
                    state.log(HeadEvent::Requantizing { name: name.clone(), schemes });
                }
                // The one before stood in until now.
                state.take_down(&name);
                state.hanging.insert(name.clone(), Hanging { ready, used, charge });
                let (took, ahead) = (began.elapsed(), wanted.ahead);
                state.meters.drawn(Kind::HeadLoad, [ahead.into(), 0], state.meters.began().and(Some(began)));
                state.log(HeadEvent::Loaded { name, took, ahead });
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

    /// Lets heads go until there is room for one more, those first that were used longest ago and are worn by nobody.
    fn room_for(&self, name: &str) -> Result<Option<Charge>, RuntimeError> {
        let bytes = self.source.bytes(name)?;
        loop {
            let mut state = self.state();
            if let Some(charge) = self.inherited(&mut state, bytes) {
                return Ok(charge);
            }
            let fits = state.bytes().saturating_add(bytes) <= self.config.room;
            let charged = match &self.config.budget {
                _ if !fits => {
                    let left = self.config.room.saturating_sub(state.bytes());
                    let total = self.config.room;
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
                // Parts of weights can be read again while a model runs, and a head cannot.
                return match &self.config.budget {
                    Some(budget) if fits => Ok(Some(budget.insist(Account::Weights, bytes)?)),
                    _ => Err(error.into()),
                };
            };
            drop(state.take_down(&idle));
            state.log(HeadEvent::Evicted { name: idle });
        }
    }

    /// The charge of the memory that another head has left, for a head that fits into it and fills at least half. Other
    /// memory goes back to the system.
    fn inherited(&self, state: &mut State, bytes: u64) -> Option<Option<Charge>> {
        let spare = self.source.spare()?;
        let left = state.left.take();
        let is_paid = left.is_some() || self.config.budget.is_none();
        // What was read has begun and ended on blocks.
        if is_paid && spare.bytes() as u64 >= bytes && spare.bytes() as u64 / 2 <= bytes {
            return Some(left);
        }
        spare.clear();
        None
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held has left whole values.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn worn(&mut self, name: &str) -> Option<Arc<Head>> {
        self.time += 1;
        let hanging = self.hanging.get_mut(name)?;
        hanging.used = self.time;
        Some(hanging.ready.head.clone())
    }

    fn generation(&self, name: &str) -> Option<u64> {
        self.hanging.get(name).map(|hanging| hanging.ready.generation)
    }

    /// Whether a head is in memory in this generation.
    fn has(&self, name: &str, generation: Option<u64>) -> bool {
        generation.is_some() && self.generation(name) == generation
    }

    /// Takes a head down. Where nobody wears it, its memory is left to the next one, and what was charged for it with it;
    /// otherwise both are gone with the last who does.
    fn take_down(&mut self, name: &str) -> Option<ReadyHead> {
        let Hanging { ready, charge, .. } = self.hanging.remove(name)?;
        let is_worn = Arc::strong_count(&ready.head) > 1;
        match &ready.loan {
            Some(_) if !is_worn => {
                // Of two pieces the larger one is kept.
                let bytes = |charge: &Option<Charge>| charge.as_ref().map_or(0, Charge::bytes);
                if bytes(&charge) > bytes(&self.left) {
                    self.left = charge;
                }
            }
            loan => {
                if let Some(loan) = loan {
                    loan.keep();
                }
                if let Some(charge) = charge {
                    ready.head.keep_with(charge);
                }
            }
        }
        Some(ready)
    }

    fn is_due(&self, name: &str) -> bool {
        self.retries.get(name).is_none_or(|retry| retry.is_due(Instant::now()))
    }

    fn bytes(&self) -> u64 {
        self.hanging.values().map(|hanging| hanging.ready.bytes).sum()
    }

    /// The head that was used longest ago of those that nobody wears.
    fn idle(&self) -> Option<String> {
        let idle = self.hanging.iter().filter(|(name, hanging)| {
            name.as_str() != FALLBACK && Arc::strong_count(&hanging.ready.head) == 1
        });
        idle.min_by_key(|(_, hanging)| hanging.used).map(|(name, _)| name.clone())
    }

    fn log(&mut self, event: HeadEvent) {
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
            HeadEvent::Late { .. } => self.meters.mark(Kind::HeadFailure, [0, 0]),
            HeadEvent::Updated { .. } | HeadEvent::Requantizing { .. } => {}
        }
        if self.events.len() == EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

/// Loads what is wanted, one after the other, until there is nothing more.
fn load_all(rack: &Weak<Shared>) {
    while let Some(shared) = rack.upgrade() {
        let wanted = {
            let mut state = shared.state();
            let Some(wanted) = state.wanted.pop_front() else {
                state.has_loader = false;
                drop(state);
                drop(shared);
                thread::sleep(AFTERWARDS);
                // Another loader needs what would go, and lets it go in the end.
                if !rack.upgrade().is_some_and(|shared| shared.state().has_loader) {
                    release_with_code();
                }
                return;
            };
            state.loading = Some(wanted.name.clone());
            wanted
        };
        let used = shared.in_use(&wanted.name);
        let is_there = shared.state().has(&wanted.name, used);
        if !is_there {
            shared.load(&wanted);
        }
        shared.state().loading = None;
        shared.changed.notify_all();
    }
}
