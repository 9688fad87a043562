//! The queue of a model: which tasks run and which wait.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Priority;
use crate::ScheduleError;
use firebox_memory::thermal::Heat;

/// The number of tasks of a model that run at once, and that may wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionConfig {
    /// The most tasks that run at once; memory and heat may allow fewer.
    pub most_running: usize,
    /// The most waiting tasks of the same or a higher priority before another one is refused. Many background tasks thus keep
    /// no urgent one out.
    pub most_waiting: usize,
    /// A task that has waited this long is ordered as one of the next higher priority, but never as a pinned one.
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

/// The state of a task in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// The task runs.
    Running,
    /// The task waits.
    Waiting {
        /// The number of waiting tasks before it.
        ahead: usize,
    },
}

/// A change of the running tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The task starts or resumes.
    Start(Ticket),
    /// The task pauses. It keeps its state and comes before tasks that arrived later.
    Pause(Ticket),
}

/// The running and the waiting tasks of a model, in order.
///
/// A task that was admitted is never refused: when fewer may run, the least urgent ones pause and resume later.
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
    /// The time since when it waits; `None` while it runs.
    waits_since: Option<Duration>,
    /// Whether it must not run.
    held: bool,
}

impl Entry {
    fn is_waiting(&self) -> bool {
        self.waits_since.is_some()
    }

    /// Returns the priority, raised by the time it has waited.
    fn standing(&self, now: Duration, ageing: Duration) -> Priority {
        let waited = self.waits_since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
        let steps = waited.as_nanos() / ageing.as_nanos().max(1);
        self.priority.raised(u32::try_from(steps).unwrap_or(u32::MAX))
    }
}

impl Queue {
    /// Creates an empty queue, with memory for as many tasks as may run.
    pub fn new(config: AdmissionConfig) -> Self {
        Self { room: config.most_running, config, heat: Heat::Nominal, entries: BTreeMap::new(), made: 0 }
    }

    /// Adds a task, which waits until an [`update`](Self::update) starts it. Fails if too many tasks wait.
    pub fn enter(&mut self, now: Duration, priority: Priority) -> Result<Ticket, ScheduleError> {
        let as_urgent = |entry: &&Entry| entry.is_waiting() && entry.priority >= priority;
        let waiting = self.entries.values().filter(as_urgent).count();
        // A task that could start at once does not count as waiting.
        let limit = self.config.most_waiting;
        if waiting >= limit.saturating_add(self.batch().saturating_sub(self.running())) {
            return Err(ScheduleError::QueueFull { priority, limit });
        }
        let ticket = Ticket(self.made);
        self.made += 1;
        self.entries.insert(ticket, Entry { priority, waits_since: Some(now), held: false });
        Ok(ticket)
    }

    /// Removes a task that is done or cancelled. Returns whether it was there.
    pub fn leave(&mut self, ticket: Ticket) -> bool {
        self.entries.remove(&ticket).is_some()
    }

    /// Holds a task back, or lets it wait for its turn again. A running task pauses.
    pub fn hold(&mut self, now: Duration, ticket: Ticket, held: bool) -> Option<Change> {
        let entry = self.entries.get_mut(&ticket)?;
        entry.held = held;
        (held && !entry.is_waiting()).then(|| self.pause(now, ticket))
    }

    /// Sets the number of tasks that memory allows, from the next [`update`](Self::update) on.
    pub fn set_room(&mut self, room: usize) {
        self.room = room;
    }

    /// Sets the thermal state, from the next [`update`](Self::update) on. Fewer tasks run on a hot machine.
    pub fn set_heat(&mut self, heat: Heat) {
        self.heat = heat;
    }

    /// Returns how many tasks may run now.
    pub fn batch(&self) -> usize {
        self.heat.batch(self.config.most_running.min(self.room))
    }

    /// Returns the number of running tasks.
    pub fn running(&self) -> usize {
        self.entries.values().filter(|entry| !entry.is_waiting()).count()
    }

    /// Returns the number of waiting tasks.
    pub fn waiting(&self) -> usize {
        self.entries.len() - self.running()
    }

    /// Returns the state of a task; `None` if it is not in the queue.
    pub fn place(&self, now: Duration, ticket: Ticket) -> Option<Place> {
        if !self.entries.get(&ticket)?.is_waiting() {
            return Some(Place::Running);
        }
        let order = self.order(now);
        Some(Place::Waiting { ahead: order.iter().position(|&other| other == ticket)? })
    }

    /// Returns the waiting tasks in the order in which they will run.
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

    /// Lets as many tasks run as may: pauses some first, then starts others. A pinned task takes the place of the least
    /// urgent one at once, but leaves one of two or more places.
    pub fn update(&mut self, now: Duration) -> Vec<Change> {
        let mut changes = Vec::new();
        let batch = self.batch();
        while self.running() > batch {
            match self.least_urgent() {
                Some(ticket) => changes.push(self.pause(now, ticket)),
                None => break,
            }
        }
        // Usually all places are taken, and the waiting tasks need not be sorted.
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

    /// Returns how many pinned tasks may run beside others.
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

    /// Returns the least urgent running task, and of equals the last one.
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
    fn a_smaller_batch_pauses_tasks_that_resume_before_newcomers() {
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
    fn old_tasks_come_before_more_urgent_newcomers_unless_pinned() {
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
    fn pinned_tasks_leave_one_of_two_places() {
        let mut queue = queue(2);
        let [one, other, normal] =
            entered(&mut queue, [Priority::Pinned, Priority::Pinned, Priority::Normal]);
        assert_eq!(queue.update(at(0)), [Change::Start(one), Change::Start(normal)]);
        // A held task needs no place.
        assert_eq!(queue.hold(at(1), normal, true), Some(Change::Pause(normal)));
        assert_eq!(queue.update(at(1)), [Change::Start(other)]);
    }

    #[test]
    fn only_the_limit_refuses_tasks() {
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

        /// For any sequence of events: no task is lost or runs twice, no more run than may, none waits beside a free place,
        /// and waiting tasks have distinct places.
        #[test]
        fn every_task_runs_or_waits_in_line(
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
