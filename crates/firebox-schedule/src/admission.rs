use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Priority;
use crate::ScheduleError;
use firebox_memory::thermal::Heat;

/// How many tasks of a lane run at once, and how many may wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionConfig {
    /// How many run together where memory and heat allow it.
    pub most_running: usize,
    /// How many of a priority, and of more urgent ones, may wait before one more is refused: a crowd of background tasks
    /// keeps nobody else out.
    pub most_waiting: usize,
    /// After having waited for so long a task comes among those of the next priority, short of pinned.
    pub ageing: Duration,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self { most_running: 8, most_waiting: 256, ageing: Duration::from_secs(30) }
    }
}

/// A task in a queue, whether it runs or waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Ticket(u64);

/// Where a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// It runs.
    Running,
    /// It waits.
    Waiting {
        /// How many come before it.
        ahead: usize,
    },
}

/// What is to be done because the number of those that run, or who is most urgent, has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It runs from now on, or goes on.
    Start(Ticket),
    /// It waits from now on, with what it has so far, before those that came later.
    Pause(Ticket),
}

/// Who runs on a lane and who waits, in order.
///
/// Nobody who was let in is ever refused: where there is room for fewer, the least urgent pause and go on later.
///
/// ```
/// use std::time::Duration;
/// use firebox_schedule::{AdmissionConfig, Place, Priority, Queue};
///
/// let mut queue = Queue::new(AdmissionConfig { most_running: 1, ..AdmissionConfig::default() });
/// let now = Duration::ZERO;
/// let first = queue.enter(now, Priority::Normal)?;
/// let second = queue.enter(now, Priority::Normal)?;
/// queue.update(now);
/// assert_eq!(queue.place(now, first), Some(Place::Running));
/// assert_eq!(queue.place(now, second), Some(Place::Waiting { ahead: 0 }));
/// # Ok::<(), firebox_schedule::ScheduleError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Queue {
    config: AdmissionConfig,
    heat: Heat,
    room: usize,
    entries: BTreeMap<Ticket, Entry>,
    made: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    priority: Priority,
    /// Absent while it runs.
    waits_since: Option<Duration>,
    /// Whether it is not to run, whatever the room.
    held: bool,
}

impl Entry {
    fn is_waiting(&self) -> bool {
        self.waits_since.is_some()
    }

    /// With what it has gained by waiting.
    fn standing(&self, now: Duration, ageing: Duration) -> Priority {
        let waited = self.waits_since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
        let steps = waited.as_nanos() / ageing.as_nanos().max(1);
        self.priority.raised(u32::try_from(steps).unwrap_or(u32::MAX))
    }
}

impl Queue {
    /// Empty, with room in memory for as many as may run.
    pub fn new(config: AdmissionConfig) -> Self {
        Self { room: config.most_running, config, heat: Heat::Nominal, entries: BTreeMap::new(), made: 0 }
    }

    /// Comes in, and waits until an [`update`](Self::update) starts it. Refused where too many wait already.
    pub fn enter(&mut self, now: Duration, priority: Priority) -> Result<Ticket, ScheduleError> {
        let as_urgent = |entry: &&Entry| entry.is_waiting() && entry.priority >= priority;
        let waiting = self.entries.values().filter(as_urgent).count();
        // Who could start at once does not wait.
        let limit = self.config.most_waiting;
        if waiting >= limit.saturating_add(self.batch().saturating_sub(self.running())) {
            return Err(ScheduleError::QueueFull { priority, limit });
        }
        let ticket = Ticket(self.made);
        self.made += 1;
        self.entries.insert(ticket, Entry { priority, waits_since: Some(now), held: false });
        Ok(ticket)
    }

    /// Goes, because it is done or not wanted any more. Whether it was there.
    pub fn leave(&mut self, ticket: Ticket) -> bool {
        self.entries.remove(&ticket).is_some()
    }

    /// Keeps a task from running, or lets it come among those that wait. One that runs has to pause.
    pub fn hold(&mut self, now: Duration, ticket: Ticket, held: bool) -> Option<Change> {
        let entry = self.entries.get_mut(&ticket)?;
        entry.held = held;
        (held && !entry.is_waiting()).then(|| self.pause(now, ticket))
    }

    /// For how many memory has room. Takes effect with the next [`update`](Self::update).
    pub fn set_room(&mut self, room: usize) {
        self.room = room;
    }

    /// Fewer run while it is hot. Takes effect with the next [`update`](Self::update).
    pub fn set_heat(&mut self, heat: Heat) {
        self.heat = heat;
    }

    /// How many may run at once now.
    pub fn batch(&self) -> usize {
        self.heat.batch(self.config.most_running.min(self.room))
    }

    /// How many run.
    pub fn running(&self) -> usize {
        self.entries.values().filter(|entry| !entry.is_waiting()).count()
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.entries.len() - self.running()
    }

    /// Where a task is; absent if it left.
    pub fn place(&self, now: Duration, ticket: Ticket) -> Option<Place> {
        if !self.entries.get(&ticket)?.is_waiting() {
            return Some(Place::Running);
        }
        let order = self.order(now);
        Some(Place::Waiting { ahead: order.iter().position(|&other| other == ticket)? })
    }

    /// Those that wait, in the order in which they are going to run.
    pub fn order(&self, now: Duration) -> Vec<Ticket> {
        let mut waiting: Vec<(Reverse<Priority>, Ticket)> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.is_waiting() && !entry.held)
            .map(|(&ticket, entry)| (Reverse(entry.standing(now, self.config.ageing)), ticket))
            .collect();
        waiting.sort();
        waiting.into_iter().map(|(_, ticket)| ticket).collect()
    }

    /// Lets as many run as may: pauses first, then starts. A pinned task does not wait for others to be done; it takes
    /// the place of the least urgent, but of two places or more it leaves one.
    pub fn update(&mut self, now: Duration) -> Vec<Change> {
        let mut changes = Vec::new();
        let batch = self.batch();
        while self.running() > batch {
            match self.least_urgent() {
                Some(ticket) => changes.push(self.pause(now, ticket)),
                None => break,
            }
        }
        // Most of the time all places are taken, and a line need not be sorted for that.
        let waits_pinned =
            self.entries.values().any(|entry| entry.is_waiting() && entry.priority == Priority::Pinned);
        if self.running() >= batch && !waits_pinned {
            return changes;
        }
        for ticket in self.order(now) {
            let entry = self.entries[&ticket];
            let is_pinned = entry.priority == Priority::Pinned;
            if is_pinned && self.pinned() >= self.most_pinned(batch) {
                continue;
            }
            if self.running() >= batch {
                let Some(other) = self.least_urgent().filter(|other| is_pinned && !self.is_pinned(other))
                else {
                    continue;
                };
                changes.push(self.pause(now, other));
            }
            if let Some(entry) = self.entries.get_mut(&ticket) {
                entry.waits_since = None;
                changes.push(Change::Start(ticket));
            }
        }
        changes
    }

    /// How many pinned tasks may run while others are there.
    fn most_pinned(&self, batch: usize) -> usize {
        let others = self.entries.values().any(|entry| !entry.held && entry.priority != Priority::Pinned);
        if others && batch >= 2 { batch - 1 } else { batch }
    }

    fn pinned(&self) -> usize {
        let running = self.entries.values().filter(|entry| !entry.is_waiting());
        running.filter(|entry| entry.priority == Priority::Pinned).count()
    }

    fn is_pinned(&self, ticket: &Ticket) -> bool {
        self.entries[ticket].priority == Priority::Pinned
    }

    /// Of those that run, the least urgent, and of these the one that came last.
    fn least_urgent(&self) -> Option<Ticket> {
        let running = self.entries.iter().filter(|(_, entry)| !entry.is_waiting());
        running.min_by_key(|(ticket, entry)| (entry.priority, Reverse(**ticket))).map(|(&ticket, _)| ticket)
    }

    fn pause(&mut self, now: Duration, ticket: Ticket) -> Change {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.waits_since = Some(now);
        }
        Change::Pause(ticket)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn queue(most_running: usize) -> Queue {
        Queue::new(AdmissionConfig { most_running, ..AdmissionConfig::default() })
    }

    fn entered<const N: usize>(queue: &mut Queue, priorities: [Priority; N]) -> [Ticket; N] {
        priorities.map(|priority| queue.enter(at(0), priority).unwrap())
    }

    #[test]
    fn a_smaller_batch_pauses_and_a_larger_one_goes_on_before_newcomers() {
        let mut queue = queue(4);
        let [a, b, c, d] = entered(&mut queue, [Priority::Normal; 4]);
        assert_eq!(queue.update(at(0)), [a, b, c, d].map(Change::Start));
        queue.set_heat(Heat::Serious);
        assert_eq!(queue.update(at(1)), [Change::Pause(d), Change::Pause(c)]);
        let late = queue.enter(at(2), Priority::Normal).unwrap();
        let ahead = |queue: &Queue, ticket| queue.place(at(3), ticket);
        assert_eq!(ahead(&queue, c), Some(Place::Waiting { ahead: 0 }));
        assert_eq!(ahead(&queue, late), Some(Place::Waiting { ahead: 2 }));
        queue.set_heat(Heat::Nominal);
        queue.set_room(3);
        assert_eq!(queue.update(at(3)), [Change::Start(c)]);
        queue.set_room(8);
        assert_eq!(queue.update(at(4)), [Change::Start(d)]);
        queue.leave(a);
        assert_eq!(queue.update(at(5)), [Change::Start(late)]);
    }

    #[test]
    fn who_has_waited_long_comes_before_more_urgent_newcomers_but_pinned_ones() {
        let mut queue = queue(1);
        let [running, old] = entered(&mut queue, [Priority::Normal, Priority::Background]);
        queue.update(at(0));
        let newer = queue.enter(at(61), Priority::Interactive).unwrap();
        assert_eq!(queue.order(at(59)), [newer, old]);
        assert_eq!(queue.order(at(61)), [old, newer]);
        let pinned = queue.enter(at(3600), Priority::Pinned).unwrap();
        assert_eq!(queue.update(at(3600)), [Change::Pause(running), Change::Start(pinned)]);
        assert_eq!(queue.place(at(3600), old), Some(Place::Waiting { ahead: 0 }));
    }

    #[test]
    fn of_two_places_one_is_left_to_who_is_not_pinned() {
        let mut queue = queue(2);
        let [one, other, normal] =
            entered(&mut queue, [Priority::Pinned, Priority::Pinned, Priority::Normal]);
        assert_eq!(queue.update(at(0)), [Change::Start(one), Change::Start(normal)]);
        // Who is held needs none.
        assert_eq!(queue.hold(at(1), normal, true), Some(Change::Pause(normal)));
        assert_eq!(queue.update(at(1)), [Change::Start(other)]);
    }

    #[test]
    fn only_the_limit_refuses_and_says_so() {
        let config = AdmissionConfig { most_running: 1, most_waiting: 2, ..AdmissionConfig::default() };
        let mut queue = Queue::new(config);
        for _ in 0..3 {
            queue.enter(at(0), Priority::Background).unwrap();
            queue.update(at(0));
        }
        let refused = queue.enter(at(0), Priority::Background).unwrap_err().to_string();
        assert!(refused.contains("2 background") && refused.contains("most_waiting"), "{refused}");
        queue.enter(at(0), Priority::Normal).unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// Whatever comes, goes and changes: nobody is lost or runs twice, no more run than may, nobody waits beside a
        /// free place, and places are those of a line.
        #[test]
        fn everybody_runs_or_waits_in_line(
            steps in prop::collection::vec((0u8..10, 0usize..12, 0u64..40), 1..80),
        ) {
            let mut queue = queue(4);
            let (mut there, mut held) = (BTreeMap::new(), BTreeSet::new());
            let mut now = Duration::ZERO;
            for (kind, value, passed) in steps {
                now += at(passed);
                match kind {
                    0..=3 => {
                        let ticket = queue.enter(now, Priority::ALL[value % 4]).unwrap();
                        there.insert(ticket, false);
                    }
                    4 => queue.set_room(value),
                    5 => queue.set_heat([Heat::Nominal, Heat::Fair, Heat::Serious, Heat::Critical][value % 4]),
                    6 | 7 => {
                        if let Some(&ticket) = there.keys().nth(value) {
                            let is_held = !held.remove(&ticket) && held.insert(ticket);
                            let paused = queue.hold(now, ticket, is_held).is_some();
                            prop_assert_eq!(paused, is_held && there[&ticket]);
                            there.entry(ticket).and_modify(|runs| *runs &= !is_held);
                        }
                    }
                    _ => {
                        if let Some(&ticket) = there.keys().nth(value) {
                            prop_assert!(queue.leave(ticket));
                            there.remove(&ticket);
                            held.remove(&ticket);
                        }
                    }
                }
                for change in queue.update(now) {
                    let (ticket, runs) = match change {
                        Change::Start(ticket) => (ticket, true),
                        Change::Pause(ticket) => (ticket, false),
                    };
                    prop_assert_eq!(there.insert(ticket, runs), Some(!runs));
                }
                let running = there.values().filter(|runs| **runs).count();
                prop_assert_eq!(queue.running(), running);
                prop_assert_eq!(running, queue.batch().min(there.len() - held.len()));
                prop_assert_eq!(queue.waiting(), there.len() - running);
                for (place, ticket) in queue.order(now).into_iter().enumerate() {
                    prop_assert_eq!(there.get(&ticket), Some(&false));
                    prop_assert_eq!(queue.place(now, ticket), Some(Place::Waiting { ahead: place }));
                }
            }
        }
    }
}
