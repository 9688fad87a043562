use std::error::Error;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use firebox_model::StreamedWeights;

use super::share::ModelShare;
use super::weights::{State, Tenancy, WeightCache};
use crate::governor::{Event, Residency};
use crate::planner::FEWEST_BUFFERS;
use crate::thermal::{Heat, Thermometer};
use crate::{Account, MemoryError, RuntimeError};

/// Where no more than one part in so many is not kept, others compute while each of them is read, and one buffer does for all:
/// a second one is worth less than another part that is kept.
const FEW_MISSING: usize = 3;

/// How often somebody is asked again for memory who is just about to change what it keeps. That takes no longer, unless it waits
/// for who asks.
const ASKED_AGAIN: usize = 10_000;

/// The longest that a part is read, by a slow disk after others.
pub(super) const SLOWEST_READ: Duration = Duration::from_secs(2);

/// From one look to the next whether somebody has what it reads.
pub(super) const READING_CHECK: Duration = Duration::from_millis(1);

/// What came of asking for memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reclaimed {
    /// Nobody has any to give.
    Nothing,
    /// It has some, and is about to change that.
    Busy,
    /// It has some that is being read into, and gives it up then.
    Reading,
    /// Some was given up.
    Some,
}

/// Takes what cannot be done without, and asks for more as long as that does not fit.
pub(super) fn insist<S, R>(
    state: &mut S,
    take: impl Fn(&mut S) -> Result<R, MemoryError>,
    ask: impl Fn(&mut S) -> Reclaimed,
) -> Result<R, MemoryError> {
    let (mut asked, mut waits_since) = (0, None);
    loop {
        match take(state) {
            Err(error @ MemoryError::OverBudget { .. }) => match ask(state) {
                Reclaimed::Some => (asked, waits_since) = (0, None),
                Reclaimed::Reading
                    if waits_since.get_or_insert_with(Instant::now).elapsed() < SLOWEST_READ =>
                {
                    thread::sleep(READING_CHECK);
                }
                Reclaimed::Busy if asked < ASKED_AGAIN => {
                    asked += 1;
                    thread::yield_now();
                }
                Reclaimed::Reading | Reclaimed::Busy | Reclaimed::Nothing => return Err(error),
            },
            taken => return taken,
        }
    }
}

/// Asks one after the other to give something up, of whom one may be who asks.
pub(super) fn ask(others: &[Arc<ModelShare>], mut own: Option<&mut Kept<'_>>) -> Reclaimed {
    let mut most = Reclaimed::Nothing;
    for other in others {
        let (Some(keeper), Some(decoder)) = (other.keeper.upgrade(), other.decoder.upgrade()) else {
            continue;
        };
        let Some(streamed) = decoder.streamed() else { continue };
        let gave = match own.as_deref_mut().filter(|own| std::ptr::eq(own.keeper, &*keeper)) {
            Some(own) => own.give_up(other),
            None => keeper.give_up(streamed, other),
        };
        if gave == Reclaimed::Some {
            return gave;
        }
        most = most.max(gave);
    }
    most
}

/// The parts of a model as something to be governed.
pub(super) struct Kept<'a> {
    pub keeper: &'a WeightCache,
    pub streamed: &'a StreamedWeights,
    pub state: &'a mut State,
}

impl Kept<'_> {
    /// Charges a part and reads it, unless it is in memory.
    pub fn load(&mut self, part: usize) -> Result<(), RuntimeError> {
        if self.streamed.is_resident(part) {
            return Ok(());
        }
        let charge = self.keeper.budget.charge(Account::Weights, self.streamed.part_bytes(part))?;
        self.streamed.load(part)?;
        self.state.weights[part] = Some(charge);
        Ok(())
    }

    /// Takes what cannot be done without: as long as that does not fit, parts go, those first whose model is the least
    /// urgent, this one included, and their memory goes to the system.
    pub fn insist<R>(
        &mut self,
        take: impl Fn(&mut Self) -> Result<R, MemoryError>,
    ) -> Result<R, MemoryError> {
        let taken = insist(self, take, Self::ask_anybody);
        self.clear_scrap();
        taken
    }

    /// Has the system have what was let go of.
    pub fn clear_scrap(&self) {
        if let Some(Tenancy { tenants, .. }) = self.keeper.tenancy() {
            tenants.scrap.clear();
        }
    }

    fn ask_anybody(&mut self) -> Reclaimed {
        let Some(Tenancy { tenants, .. }) = self.keeper.tenancy() else { return self.let_last_go() };
        match ask(&tenants.least_urgent_first(), Some(&mut *self)) {
            // Nobody is waited for long under the lock: others want to know what is kept, and whoever watches over memory to let it go.
            Reclaimed::Reading => Reclaimed::Busy,
            gave => gave,
        }
    }

    pub fn give_up(&mut self, tenant: &ModelShare) -> Reclaimed {
        let ring = self.state.ring.bytes();
        if tenant.wanted().urgency.is_none() && ring > 0 {
            self.fit_ring();
        } else if self.pays_for_nothing() {
            self.set_ring(self.streamed.buffers());
        }
        if self.state.ring.bytes() < ring {
            return Reclaimed::Some;
        }
        let gave = if tenant.is_pinned { Reclaimed::Nothing } else { self.let_last_go() };
        if matches!(gave, Reclaimed::Nothing) {
            // Somebody is reading into a buffer, and gives it back then.
            return if self.pays_for_more_than_needed() { Reclaimed::Reading } else { Reclaimed::Nothing };
        }
        // Who kept everything, or all but one part of every block, needs more buffers now: of what it has given up itself.
        while tenant.wanted().urgency.is_some() && self.state.ring.bytes() < self.least_ring() {
            if !self.set_ring(self.few_buffers()) && !matches!(self.let_last_go(), Reclaimed::Some) {
                break;
            }
        }
        gave
    }

    /// Lets the part go that would be kept last.
    fn let_last_go(&mut self) -> Reclaimed {
        let kept = (0..self.streamed.parts()).filter(|&part| self.streamed.is_resident(part));
        let Some(part) = kept.max_by_key(|&part| self.keeper.order[part]) else { return Reclaimed::Nothing };
        self.evict(part);
        if self.keeper.tenancy().is_none() {
            self.fit_ring();
        }
        self.state.log(Event::Shed { layers: vec![part] }, self.streamed);
        Reclaimed::Some
    }

    /// Whether a part is one of those that come next: there may be room for it and for what is kept before it.
    pub fn is_among_the_next(&self, part: usize, bytes: u64) -> bool {
        let Some(tenancy) = self.keeper.tenancy() else { return false };
        let count = (0..self.streamed.parts()).filter(|&part| self.streamed.is_resident(part)).count();
        self.keeper.order[part] < count + (self.room(tenancy) / bytes.max(1)) as usize
    }

    /// Whether there may be room for all parts.
    pub fn could_keep_all(&self) -> bool {
        let Some(tenancy) = self.keeper.tenancy() else { return false };
        self.keeper.budget.held(Account::Weights) + self.room(tenancy) >= tenancy.tenant.bytes
    }

    /// Bytes that are left, or kept by those who are less urgent.
    fn room(&self, Tenancy { tenants, tenant }: &Tenancy) -> u64 {
        let weaker = tenants.least_urgent_first().into_iter().filter(|other| tenant.comes_before(other));
        let keepers = weaker.filter_map(|other| other.keeper.upgrade());
        let takeable: u64 = keepers.map(|keeper| keeper.budget.held(Account::Weights)).sum();
        self.keeper.budget.left() + takeable
    }

    /// Pays for a part with what is left, and with what those keep who are less urgent.
    pub fn wins(&mut self, part: usize, bytes: u64) -> bool {
        let Some(Tenancy { tenants, tenant }) = self.keeper.tenancy() else { return false };
        loop {
            if let Ok(charge) = self.keeper.budget.charge(Account::Weights, bytes) {
                self.state.weights[part] = Some(charge);
                return true;
            }
            let mut weaker = tenants.least_urgent_first();
            weaker.retain(|other| tenant.comes_before(other));
            if !matches!(ask(&weaker, Some(&mut *self)), Reclaimed::Some) {
                return false;
            }
        }
    }

    /// Where few are missing, puts a part in the place of one that is better not kept: what comes after the blocks in that of a part
    /// of a block, and a part of a block that lies near another one that is missing in that of one that does not. That is one part
    /// more to read, and memory that is new to be read into; whoever waits for a first token should not wait for those.
    pub fn takes_place(&mut self, part: usize, bytes: u64) -> bool {
        let is_awaited = |tenancy: &Tenancy| tenancy.tenant.wanted().is_awaited();
        if self.keeper.tenancy().is_some_and(is_awaited) || !self.few_are_missing() {
            return false;
        }
        let of_blocks = self.streamed.block_parts();
        let missing: Vec<usize> = (0..of_blocks).filter(|&part| !self.streamed.is_resident(part)).collect();
        let Some(other) = better_missing(part, &missing, of_blocks) else { return false };
        if self.keeper.budget.left() + self.bytes(other) < bytes {
            return false;
        }
        // One charge becomes the other, so that nobody takes it in between.
        let charge = self.state.weights[other].take();
        self.evict(other);
        self.state.log(Event::Shed { layers: vec![other] }, self.streamed);
        self.state.weights[part] =
            charge.and_then(|mut charge| charge.resize(bytes).is_ok().then_some(charge));
        self.state.weights[part].is_some()
    }

    /// Pays for a part with the ring, where that has room for all that is not kept.
    pub fn takes_ring(&mut self, part: usize, bytes: u64) -> bool {
        let each = self.streamed.buffer_bytes() as u64;
        let missing = self.missing() as u64;
        let Some(smaller) = self.state.ring.bytes().checked_sub(each) else { return false };
        if missing * each > self.state.ring.bytes() {
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

    pub fn keeps_all(&self) -> bool {
        (0..self.streamed.parts()).all(|part| self.streamed.is_resident(part))
    }

    /// Gives the ring what it needs, or as much of that as there is: less on a hot machine, which is not to work ahead.
    /// Where everything is kept it needs nothing.
    pub fn fit_ring(&mut self) {
        let heat = self.state.thermometer.as_ref().map_or(Heat::Nominal, Thermometer::heat);
        let is_idle = |tenancy: &Tenancy| tenancy.tenant.wanted().urgency.is_none();
        let needs_none = self.keeps_all() || self.keeper.tenancy().is_some_and(is_idle);
        let most = if self.keeper.tenancy().is_some() { self.few_buffers() } else { self.keeper.buffers };
        let at_once = self.streamed.most_missing().max(1);
        let wanted = if needs_none { 0 } else { heat.prefetch_depth(most).max(at_once) };
        let each = self.streamed.buffer_bytes() as u64;
        if self.keeper.tenancy().is_some() && !needs_none {
            // Nobody can do without, and somebody can always give up as much.
            let least = wanted.min(FEWEST_BUFFERS * at_once) as u64 * each;
            if self.state.ring.bytes() < least {
                // Buffers are made of what others let go of for them.
                let _ = insist(self, |kept| kept.state.ring.resize(least), Self::ask_anybody);
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
        (0..self.streamed.parts()).filter(|&part| !self.streamed.is_resident(part)).count()
    }

    fn few_are_missing(&self) -> bool {
        self.missing() * FEW_MISSING <= self.streamed.parts()
    }

    /// The buffers that others are asked to make room for.
    fn few_buffers(&self) -> usize {
        let at_once = self.streamed.most_missing().max(1);
        if self.few_are_missing() { at_once } else { FEWEST_BUFFERS * at_once }
    }

    /// Bytes of the buffers without which no pass goes on.
    fn least_ring(&self) -> u64 {
        (self.streamed.most_missing() * self.streamed.buffer_bytes()) as u64
    }

    /// Whether it has another number of buffers than it should.
    pub fn ring_is_misfit(&self) -> bool {
        let each = self.streamed.buffer_bytes() as u64;
        let buffers = if self.keeps_all() { 0 } else { self.few_buffers() as u64 };
        self.keeper.tenancy().is_some() && self.state.ring.bytes() != buffers * each
    }

    /// Whether it pays for buffers that it is going to give back.
    fn pays_for_more_than_needed(&self) -> bool {
        self.state.ring.bytes() > (self.streamed.buffers() * self.streamed.buffer_bytes()) as u64
    }

    /// Whether it pays for buffers that are there no longer.
    pub fn pays_for_nothing(&self) -> bool {
        let buffers = self.streamed.made_buffers().max(self.streamed.buffers());
        self.state.ring.bytes() > (buffers * self.streamed.buffer_bytes()) as u64
    }
}

/// The part of a block that should be missing instead of a part that is, where there is one: farther from all others that are
/// `missing`, if the part lies nearer to one of them by more than one than if all were spread evenly. One pass follows the other, so
/// that the first of the parts `of_blocks` comes after the last.
fn better_missing(part: usize, missing: &[usize], of_blocks: usize) -> Option<usize> {
    let others = || missing.iter().copied().filter(|other| *other != part);
    let distance = |part: usize| {
        let between = |other: usize| part.abs_diff(other).min(of_blocks - part.abs_diff(other));
        others().map(between).min().unwrap_or(of_blocks)
    };
    let own = if part < of_blocks { distance(part) + 1 } else { 0 };
    if own >= of_blocks / missing.len().max(1) && part < of_blocks {
        return None;
    }
    let kept = (0..of_blocks).filter(|other| *other != part && !missing.contains(other));
    let (farthest, other) = kept.map(|other| (distance(other), other)).max()?;
    (farthest >= own).then_some(other)
}

impl Residency for Kept<'_> {
    fn layers(&self) -> usize {
        self.streamed.parts()
    }

    fn is_resident(&self, part: usize) -> bool {
        self.streamed.is_resident(part)
    }

    fn bytes(&self, part: usize) -> u64 {
        self.streamed.part_bytes(part)
    }

    fn rank(&self, part: usize) -> usize {
        self.keeper.order[part]
    }

    fn load(&mut self, part: usize) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(self.load(part)?)
    }

    fn evict(&mut self, part: usize) {
        self.streamed.evict(part);
        self.state.weights[part] = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Budget;

    /// What comes of wanting memory that somebody else has, who says so until it has given it up after a while.
    fn insisted(gave: Reclaimed, after: Duration) -> bool {
        let budget = Budget::new(10);
        let mut theirs = Some(budget.charge(Account::Scratch, 10).unwrap());
        let began = Instant::now();
        let taken = insist(
            &mut theirs,
            |_| budget.charge(Account::Streams, 10),
            |theirs| match began.elapsed() < after {
                true => gave,
                false if theirs.take().is_some() => Reclaimed::Some,
                false => Reclaimed::Nothing,
            },
        );
        taken.is_ok()
    }

    #[test]
    fn who_reads_a_part_is_waited_for() {
        assert!(insisted(Reclaimed::Reading, Duration::from_millis(300)));
        assert!(!insisted(Reclaimed::Reading, 2 * SLOWEST_READ), "nobody waits for ever");
    }

    #[test]
    fn two_who_wait_for_each_other_do_not_do_so_for_long() {
        let began = Instant::now();
        assert!(!insisted(Reclaimed::Busy, Duration::from_secs(3600)));
        assert!(began.elapsed() < Duration::from_secs(60));
    }

    /// Passes until nothing changes any more, from some layers that are missing, and how often one took another's place.
    fn settled(missing: &mut [usize], layers: usize) -> usize {
        let mut changes = 0;
        loop {
            let before = changes;
            for at in 0..missing.len() {
                if let Some(other) = better_missing(missing[at], missing, layers) {
                    missing[at] = other;
                    changes += 1;
                }
            }
            if changes == before {
                return changes;
            }
        }
    }

    fn nearest(missing: &[usize], layers: usize) -> usize {
        let mut all = missing.to_vec();
        all.sort_unstable();
        all.push(all[0] + layers);
        all.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap()
    }

    #[test]
    fn what_is_missing_comes_to_lie_far_apart_with_few_changes() {
        for layers in [12, 18, 32, 36, 80] {
            for count in 1..=layers / FEW_MISSING {
                for from in [0, layers - count] {
                    let mut missing: Vec<usize> = (from..from + count).collect();
                    let changes = settled(&mut missing, layers);
                    let most = layers / count;
                    assert!(2 * nearest(&missing, layers) >= most, "{missing:?} of {layers}");
                    assert!(changes <= 3 * count, "{changes} for {count} of {layers}");
                }
            }
        }
    }

    #[test]
    fn what_lies_far_apart_stays() {
        for mut missing in [vec![3, 7, 11, 15, 19, 23, 27, 29, 31], vec![0, 16], vec![5], vec![1, 12, 23]] {
            assert_eq!(settled(&mut missing, 32), 0, "{missing:?}");
        }
    }

    #[test]
    fn a_layer_makes_place_for_what_comes_after_the_layers() {
        assert_eq!(better_missing(33, &[0], 32), Some(16));
        assert!(better_missing(33, &[], 32).is_some());
    }
}
