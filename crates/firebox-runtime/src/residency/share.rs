use std::cmp::{Ordering, Reverse};
use std::sync::atomic::{self, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use firebox_cache::Reclaimable;
use firebox_model::Decoder;
use firebox_store::Scrap;

use super::disk_queue::{DiskQueue, QueuePosition};
use super::weights::WeightCache;
use crate::governor::GovernorConfig;
use crate::memory::{release_to_os, resident_bytes};
use crate::pressure::{Level, Pressure};
use crate::schedule::Priority;
use crate::{Account, Budget, Charge, MemoryError};

/// After memory was short, nothing more is kept for so long.
const CALM: Duration = Duration::from_secs(10);

/// Of two models that are as urgent, one has to be smaller by a quarter to get the memory: they should not take it from
/// each other for nothing.
const SMALLER: (u64, u64) = (4, 3);

/// From one look to the next how much the program takes: reading that from the system takes a twentieth of a millisecond.
const LOOKS: Duration = Duration::from_millis(20);

/// What the program may come to take more until it is looked at again.
const AHEAD: u64 = 8 << 20;

/// The same where what it takes has changed by no more than half as much for a while.
const AHEAD_IF_STEADY: u64 = 6 << 20;

/// Looks in a row after which what was seen in none of them is not expected any more.
const LOOKS_TO_SETTLE: u32 = 12;

/// How much a model is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Urgency {
    /// The most urgent of its requests.
    pub priority: Priority,
    /// Whether one of those still waits for its first token.
    pub awaited: bool,
}

/// The models that share some memory.
#[derive(Debug)]
pub(super) struct ModelShares {
    budget: Budget,
    /// What the process has that no model has charged, where that is part of the budget.
    program: Option<Mutex<Program>>,
    all: Mutex<Vec<Arc<ModelShare>>>,
    /// Grows whenever a model begins or ends to be wanted.
    clock: AtomicU64,
    pub disk: Arc<DiskQueue>,
    /// What one lets go of so that another one keeps something. It is charged to nobody: who takes memory for anything else, or counts
    /// it, gives it back to the system.
    pub scrap: Scrap,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Program {
    charge: Charge,
    /// What it is charged in any case.
    least: u64,
    looked: Instant,
    /// The most that it may have taken since so many looks, and the least.
    most: u64,
    fewest: u64,
    looks: u32,
    /// What it may come to take more until the next look.
    ahead: u64,
}

/// What a program should be charged, and how much of that it takes already.
pub(super) struct Takes {
    pub charged: u64,
    pub seen: u64,
}

impl Program {
    fn new(charge: Charge, least: u64) -> Self {
        Self { charge, least, looked: Instant::now(), most: 0, fewest: u64::MAX, looks: 0, ahead: AHEAD }
    }

    /// Takes in what it takes by now, and what it may take at most. Says what it should be charged where that is more than it is;
    /// less it is charged at once, when it has not come near what it is charged for a while.
    fn settle(&mut self, seen: u64, at_most: u64) -> Option<Takes> {
        let charged = self.charge.bytes();
        self.most = self.most.max(at_most);
        self.fewest = self.fewest.min(at_most);
        self.looks += 1;
        if self.outgrows(seen) {
            self.look_anew();
            self.ahead = AHEAD;
            return Some(Takes { charged: seen + AHEAD, seen });
        }
        if self.looks >= LOOKS_TO_SETTLE {
            let is_steady = self.most - self.fewest <= AHEAD_IF_STEADY / 2;
            self.ahead = if is_steady { AHEAD_IF_STEADY } else { AHEAD };
            let should = (self.most + self.ahead).max(self.least);
            self.look_anew();
            // Less can always be held.
            drop(self.charge.resize(should.min(charged)));
        }
        None
    }

    /// Whether taking so much it should be charged more than it is.
    fn outgrows(&self, seen: u64) -> bool {
        seen + self.ahead > self.charge.bytes()
    }

    fn look_anew(&mut self) {
        (self.most, self.fewest, self.looks) = (0, u64::MAX, 0);
    }
}

/// What was last seen of the system's memory.
#[derive(Debug, Default)]
struct Seen {
    available: Option<u64>,
    short: Option<Instant>,
}

/// One of them.
#[derive(Debug)]
pub(super) struct ModelShare {
    pub tenants: Weak<ModelShares>,
    /// Whether it is never asked to give anything up.
    pub is_pinned: bool,
    /// What keeping all of it takes.
    pub bytes: u64,
    /// What it cannot do without.
    pub least: u64,
    pub keeper: Weak<WeightCache>,
    pub decoder: Weak<Decoder>,
    pub turn: Arc<QueuePosition>,
    pub state: Mutex<Wanted>,
    /// Who has pages of it that nobody is using now.
    pub spares: Mutex<Vec<Weak<dyn Reclaimable>>>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Wanted {
    pub urgency: Option<Urgency>,
    /// When that was said last, in the order of such events.
    pub since: u64,
}

impl Wanted {
    /// What decides first; more is more urgent.
    fn key(&self) -> Option<Priority> {
        self.urgency.map(|urgency| urgency.priority)
    }

    /// Whether somebody waits for its first token.
    pub fn is_awaited(&self) -> bool {
        self.urgency.is_some_and(|urgency| urgency.awaited)
    }
}

impl ModelShare {
    pub fn wanted(&self) -> Wanted {
        *lock(&self.state)
    }

    /// Says how urgent it is from now on. Returns whether it begins or ends to be wanted with that.
    pub fn set_wanted(&self, urgency: Option<Urgency>) -> bool {
        let mut state = lock(&self.state);
        let changes = state.urgency.is_some() != urgency.is_some();
        if changes && let Some(tenants) = self.tenants.upgrade() {
            state.since = tenants.clock.fetch_add(1, atomic::Ordering::Relaxed) + 1;
        }
        state.urgency = urgency;
        changes
    }

    /// Asks also `spare` for pages that nobody is using now.
    pub fn add_spare(&self, spare: &Weak<dyn Reclaimable>) {
        let mut spares = lock(&self.spares);
        spares.retain(|spare| spare.strong_count() > 0);
        spares.push(spare.clone());
    }

    /// Gives up a page that nobody is using now, where that is of use to others.
    fn gives_page(&self) -> bool {
        let Some(keeper) = self.keeper.upgrade() else { return false };
        let spares: Vec<_> = lock(&self.spares).iter().filter_map(Weak::upgrade).collect();
        let held = || keeper.budget.held(Account::Streams);
        let before = held();
        // A pool keeps the pages that it has reserved.
        keeper.budget.exceeds_reserve() && spares.iter().any(|spare| spare.reclaim_page() && held() < before)
    }

    /// What it keeps is worth the least where this is the smallest.
    fn worth(&self) -> impl Ord + use<> {
        let wanted = self.wanted();
        let since = if wanted.urgency.is_none() { wanted.since } else { 0 };
        (self.is_pinned, wanted.key(), since, Reverse(self.bytes))
    }

    /// Whether it may take from another what that keeps: its requests matter more, or as much, and a byte saves it more reading,
    /// because all of its parts are needed more often. Who waits for a first token needs every part once, so that what it
    /// takes would be worth nothing to it, and what it has it is about to use.
    pub fn comes_before(&self, other: &Self) -> bool {
        let (own, its) = (self.wanted(), other.wanted());
        let is_smaller = self.bytes * SMALLER.0 < other.bytes * SMALLER.1;
        !other.is_pinned
            && match own.key().cmp(&its.key()) {
                Ordering::Greater => true,
                Ordering::Equal => own.urgency.is_some() && is_smaller && !its.is_awaited(),
                Ordering::Less => false,
            }
    }
}

impl ModelShares {
    /// A program is charged what it is expected to take, and later what it does, but never less than `least`.
    pub fn new(budget: &Budget, program: Option<Charge>, least: u64) -> Self {
        let program = program.map(|charge| Mutex::new(Program::new(charge, least)));
        Self {
            budget: budget.clone(),
            program,
            all: Mutex::default(),
            clock: AtomicU64::default(),
            disk: Arc::default(),
            scrap: Scrap::default(),
            seen: Mutex::default(),
        }
    }

    /// What is charged for the program.
    pub fn program_bytes(&self) -> u64 {
        let charged = |program: &Mutex<Program>| lock(program).charge.bytes();
        self.program.as_ref().map_or(0, charged)
    }

    /// What the program should be charged where that is more than it is, looked at now and then: code that had not run before, and
    /// whatever an allocator keeps for itself. Where it is less, it is charged that.
    pub fn program_takes(&self) -> Option<Takes> {
        let program = self.program.as_ref()?;
        {
            let mut program = lock(program);
            if program.looked.elapsed() < LOOKS {
                return None;
            }
            program.looked = Instant::now();
        }
        self.scrap.clear();
        let (mut seen, mut at_most) = self.program_seen()?;
        if lock(program).outgrows(seen) {
            // What an allocator keeps is nothing that a part of a model should go for.
            release_to_os();
            (seen, at_most) = self.program_seen()?;
        }
        lock(program).settle(seen, at_most)
    }

    /// What the program should be charged where that is more than it is, whenever that was looked at last.
    pub fn program_takes_now(&self) -> Option<u64> {
        self.scrap.clear();
        let (seen, _) = self.program_seen()?;
        Some(seen + AHEAD).filter(|takes| *takes > self.program_bytes())
    }

    /// What the program takes, and what it may take at most: all that is charged need not be there.
    fn program_seen(&self) -> Option<(u64, u64)> {
        let charged = self.program_bytes();
        // What is there only before or only after is taken to be there.
        let before = (self.accounted(charged), self.there());
        let resident = resident_bytes()?;
        let (accounted, there) = (before.0.max(self.accounted(charged)), before.1.min(self.there()));
        Some((resident.saturating_sub(accounted), resident.saturating_sub(there)))
    }

    /// Charges the program more than before, if that is more.
    pub fn charge_program(&self, bytes: u64) -> Result<(), MemoryError> {
        let Some(mut program) = self.program.as_ref().map(lock) else { return Ok(()) };
        if bytes > program.charge.bytes() { program.charge.resize(bytes) } else { Ok(()) }
    }

    /// Bytes of models that may be there: of buffers those that were made, of pages what they have come to take. An allocator keeps for
    /// a while what a pass has given back.
    fn accounted(&self, program: u64) -> u64 {
        let accounts = [Account::Weights, Account::Streams, Account::Activations, Account::Program];
        let held: u64 = accounts.iter().map(|account| self.budget.held(*account)).sum();
        let unfilled: u64 = self.keepers().iter().map(|keeper| keeper.unfilled()).sum();
        (self.made_buffers() + held).saturating_sub(program + unfilled)
    }

    /// Bytes of models that are there for certain: no pages of files, which come and go, nothing that a pass takes only while it
    /// computes, and nothing of models that are being opened.
    fn there(&self) -> u64 {
        let accounts = [Account::Weights, Account::Streams, Account::Program];
        let held = |keeper: &Arc<WeightCache>| {
            let held: u64 = accounts.iter().map(|account| keeper.budget.held(*account)).sum();
            held.saturating_sub(keeper.unfilled())
        };
        self.made_buffers() + self.keepers().iter().map(held).sum::<u64>()
    }

    fn keepers(&self) -> Vec<Arc<WeightCache>> {
        lock(&self.all).iter().filter_map(|tenant| tenant.keeper.upgrade()).collect()
    }

    fn made_buffers(&self) -> u64 {
        let buffers = |tenant: &Arc<ModelShare>| {
            let decoder = tenant.decoder.upgrade()?;
            let streamed = decoder.streamed()?;
            Some((streamed.made_buffers() * streamed.buffer_bytes()) as u64)
        };
        lock(&self.all).iter().filter_map(buffers).sum()
    }

    pub fn add(&self, tenant: Arc<ModelShare>) {
        let mut all = lock(&self.all);
        all.retain(|tenant| tenant.decoder.strong_count() > 0);
        all.push(tenant);
    }

    /// All of them, those first that should give something up first: who is not wanted, and has not been for longest; then
    /// the least urgent, and of them the largest.
    pub fn least_urgent_first(&self) -> Vec<Arc<ModelShare>> {
        let mut all = lock(&self.all).clone();
        all.retain(|tenant| tenant.decoder.strong_count() > 0);
        all.sort_by_cached_key(|tenant| tenant.worth());
        all
    }

    /// Has one of the others that nobody wants give up a page that nobody is using now, the one first that has not been wanted for
    /// longest. Whoever asks holds no lock: giving up takes those of the other's pages and keeper.
    pub fn idle_gives_page(&self, asks: &ModelShare) -> bool {
        let others = self.least_urgent_first().into_iter();
        let mut idle = others.filter(|other| {
            !std::ptr::eq(&**other, asks) && !other.is_pinned && other.wanted().urgency.is_none()
        });
        idle.any(|other| other.gives_page())
    }

    /// Notes how short memory is.
    pub fn see(&self, pressure: Pressure) {
        let mut seen = lock(&self.seen);
        seen.available = pressure.available;
        if pressure.level > Level::None {
            seen.short = Some(Instant::now());
        }
    }

    /// Whether the system has so many bytes to spare, and has not been short of memory lately.
    pub fn has_room(&self, bytes: u64) -> bool {
        let seen = lock(&self.seen);
        let margin = GovernorConfig::default().margin;
        seen.short.is_none_or(|short| short.elapsed() > CALM)
            && seen.available.is_none_or(|available| available >= bytes.saturating_add(margin))
    }
}

/// Nothing panics between two numbers that belong together, so that a poisoned lock is as good as any.
pub(super) fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(tenants: &Arc<ModelShares>, bytes: u64, is_pinned: bool) -> Arc<ModelShare> {
        let (keeper, decoder) = (Weak::new(), Weak::new());
        let (turn, state, spares) = (Arc::default(), Mutex::default(), Mutex::default());
        let tenants = Arc::downgrade(tenants);
        Arc::new(ModelShare { tenants, is_pinned, bytes, least: 0, keeper, decoder, turn, state, spares })
    }

    fn urgency(priority: Priority, awaited: bool) -> Option<Urgency> {
        Some(Urgency { priority, awaited })
    }

    fn tenants() -> Arc<ModelShares> {
        Arc::new(ModelShares::new(&Budget::unlimited(), None, 0))
    }

    #[test]
    fn memory_goes_to_who_is_urgent_then_to_the_smaller() {
        let tenants = tenants();
        let (small, large) = (tenant(&tenants, 100, false), tenant(&tenants, 1000, false));
        let pinned = tenant(&tenants, 10, true);
        assert!(!small.comes_before(&large) && !large.comes_before(&small), "nobody wants either");
        large.set_wanted(urgency(Priority::Normal, true));
        assert!(large.comes_before(&small) && !large.comes_before(&pinned));
        small.set_wanted(urgency(Priority::Normal, false));
        assert!(!small.comes_before(&large), "what the large one has it is about to use");
        assert!(!large.comes_before(&small), "it would use once what the small one uses all the time");
        small.set_wanted(urgency(Priority::Normal, true));
        large.set_wanted(urgency(Priority::Normal, false));
        assert!(
            small.comes_before(&large) && !large.comes_before(&small),
            "it reads its parts now, and can keep them"
        );
        small.set_wanted(urgency(Priority::Normal, false));
        assert!(small.comes_before(&large) && !large.comes_before(&small), "it is read more often");
        large.set_wanted(urgency(Priority::Interactive, false));
        assert!(large.comes_before(&small) && !small.comes_before(&large));
    }

    #[test]
    fn who_was_not_wanted_for_longest_gives_up_first() {
        let tenants = tenants();
        let mut made = [100, 200, 300].map(|bytes| tenant(&tenants, bytes, false)).to_vec();
        for at in [2, 0, 1] {
            made[at].set_wanted(urgency(Priority::Normal, true));
            assert!(made[at].set_wanted(None));
        }
        made.push(tenant(&tenants, 400, true));
        made.push(tenant(&tenants, 500, false));
        made[4].set_wanted(urgency(Priority::Background, false));
        made.sort_by_cached_key(|tenant| tenant.worth());
        let order: Vec<u64> = made.iter().map(|tenant| tenant.bytes).collect();
        assert_eq!(order, [300, 100, 200, 500, 400], "who is wanted comes behind, and last who is pinned");
    }

    #[test]
    fn of_two_that_are_as_urgent_the_larger_one_gives_up_first() {
        let tenants = tenants();
        let mut made = [100, 1000].map(|bytes| tenant(&tenants, bytes, false));
        made[0].set_wanted(urgency(Priority::Normal, false));
        made[1].set_wanted(urgency(Priority::Normal, true));
        made.sort_by_cached_key(|tenant| tenant.worth());
        assert_eq!(
            made[0].bytes, 1000,
            "it needs a part of its own once while the other one needs all of its parts"
        );
    }

    #[test]
    fn a_program_is_charged_what_it_is_seen_to_take() {
        const MB: u64 = 1 << 20;
        let budget = Budget::new(1000 * MB);
        let charge = budget.charge(Account::Program, 500 * MB).unwrap();
        let mut program = Program::new(charge, 100 * MB);
        let mut charged_after = |looks: &[(u64, u64)]| {
            for &(seen, at_most) in looks {
                if let Some(takes) = program.settle(seen * MB, at_most * MB) {
                    assert_eq!(takes.seen, seen * MB);
                    program.charge.resize(takes.charged).unwrap();
                }
            }
            program.charge.bytes() / MB
        };
        let looks = LOOKS_TO_SETTLE as usize;
        let seen = |takes| (takes, takes);
        assert_eq!(charged_after(&vec![seen(200); looks - 1]), 500, "it may have been chance");
        assert_eq!(charged_after(&[seen(300)]), 308, "the most of what was seen, and some");
        assert_eq!(charged_after(&[seen(600)]), 608, "more is charged at once");
        assert_eq!(charged_after(&vec![(50, 700); looks]), 608, "what is charged need not be there");
        assert_eq!(charged_after(&vec![seen(50); looks]), 100, "what it is charged in any case");
        assert_eq!(charged_after(&vec![seen(200); looks]), 208, "it has just come to take that");
        assert_eq!(charged_after(&vec![seen(200); looks]), 206, "it takes the same all the time");
        assert_eq!(charged_after(&[seen(201)]), 209, "no more");
        let restless: Vec<_> = (0..looks as u64).map(|at| seen(190 + at % 6)).collect();
        assert_eq!(charged_after(&restless), 203);
    }

    #[test]
    fn nothing_more_is_kept_while_memory_is_short() {
        let tenants = tenants();
        assert!(tenants.has_room(1 << 30), "nothing is known");
        tenants.see(Pressure { level: Level::None, available: Some(100 << 20) });
        assert!(tenants.has_room(30 << 20) && !tenants.has_room(90 << 20));
        tenants.see(Pressure { level: Level::Critical, available: Some(100 << 30) });
        assert!(!tenants.has_room(1));
    }
}
