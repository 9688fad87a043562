//! The queue of a model: which tasks run and which wait.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Priority;
use crate::ScheduleError;
use crate::client::{Client, ClientTasks, ClientUsage};
use firebox_memory::thermal::Heat;

/// The number of tasks of a model that run at once, and that may wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionConfig {
    /// The most tasks that run at once; memory and heat may allow fewer.
    pub most_running: usize,
    /// The most waiting tasks of the same or a higher priority before another one is refused. Many background tasks thus keep
    /// no urgent one out. A client that has less than its part of the queue is not refused for the tasks of others.
    pub most_waiting: usize,
    /// A task that has waited this long is ordered as one of the next higher priority, but never as a pinned one.
    pub ageing: Duration,
    /// Rows that passes compute for one client more than for another, by their weights, before a task of the other takes
    /// the place of one of the first where both have as many places as they can. A change of places costs a page or two, and
    /// where pages are short a prompt; this many rows outweigh that.
    pub turn_rows: u32,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self { most_running: 8, most_waiting: 256, ageing: Duration::from_secs(30), turn_rows: 256 }
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
/// A task that was admitted is never refused: when fewer may run, the least urgent ones pause and resume later. Clients share
/// the places by their weights: a task of a client with too few takes the place of one of a client with too many.
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
    clients: BTreeMap<Arc<str>, ClientUsage>,
    /// Rows that passes have computed since the last update, by the weights of their clients.
    served_since_update: f64,
    made: u64,
}

#[derive(Debug, Clone)]
struct Entry {
    priority: Priority,
    client: Arc<str>,
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
        Self {
            room: config.most_running,
            config,
            heat: Heat::Nominal,
            entries: BTreeMap::new(),
            clients: BTreeMap::new(),
            served_since_update: 0.0,
            made: 0,
        }
    }

    /// Adds a task of no named client, which waits until an [`update`](Self::update) starts it. Fails if too many tasks wait.
    pub fn enter(&mut self, now: Duration, priority: Priority) -> Result<Ticket, ScheduleError> {
        self.enter_all(now, priority, &Client::default(), 1).map(|tickets| tickets[0])
    }

    /// Adds several tasks of a client, or none if too many tasks of all or of the client wait.
    pub fn enter_all(
        &mut self,
        now: Duration,
        priority: Priority,
        client: &Client,
        count: usize,
    ) -> Result<Vec<Ticket>, ScheduleError> {
        self.check_limits(priority, client, count)?;
        let name = client.name.clone();
        let least = self.least_served();
        let usage = self.clients.entry(name.clone());
        let usage = usage.or_insert_with(|| ClientUsage { client: client.clone(), served: 0.0 });
        usage.client = client.clone();
        // Time without tasks earns nothing.
        usage.served = usage.served.max(least.unwrap_or(usage.served));
        let tickets = (self.made..).take(count).map(Ticket).collect::<Vec<_>>();
        self.made += count as u64;
        let entry = Entry { priority, client: name, waits_since: Some(now), held: false };
        self.entries.extend(tickets.iter().map(|ticket| (*ticket, entry.clone())));
        Ok(tickets)
    }

    fn check_limits(&self, priority: Priority, client: &Client, count: usize) -> Result<(), ScheduleError> {
        let limit = self.config.most_waiting;
        let as_urgent = |entry: &&Entry| entry.is_waiting() && entry.priority >= priority;
        let waiting = self.entries.values().filter(as_urgent).count();
        let own = self.entries.values().filter(as_urgent).filter(|entry| entry.client == client.name).count();
        let tasks = self.tasks();
        // A task that could start at once does not count as waiting.
        if waiting + count > limit.saturating_add(self.batch().saturating_sub(self.running())) {
            let others = tasks.keys().filter(|name| **name != client.name);
            let others: f64 = others.map(|name| f64::from(self.clients[name].client.weight)).sum();
            let weight = f64::from(client.weight);
            let part = limit as f64 * weight / (weight + others);
            if others == 0.0 || (own + count) as f64 > part.max(1.0) {
                return Err(ScheduleError::QueueFull { priority, limit });
            }
        }
        let Some(limit) = client.most_waiting else { return Ok(()) };
        let ClientTasks { running, waiting } = tasks.get(&client.name).copied().unwrap_or_default();
        let may_run = client.most_running.map_or(self.batch(), |most| most.min(self.batch()));
        if waiting + count > limit.saturating_add(may_run.saturating_sub(running)) {
            return Err(ScheduleError::ClientQueueFull { limit });
        }
        Ok(())
    }

    /// Removes a task that is done or cancelled. Returns whether it was there.
    pub fn leave(&mut self, ticket: Ticket) -> bool {
        let was_there = self.entries.remove(&ticket).is_some();
        let active: BTreeSet<&Arc<str>> = self.entries.values().map(|entry| &entry.client).collect();
        let least = self.least_served().unwrap_or(f64::INFINITY);
        // A client that leaves and comes back is where it was, unless the others have caught up.
        self.clients.retain(|name, usage| active.contains(name) || usage.served > least);
        was_there
    }

    /// Records rows that a pass has computed for a task. Returns whether an [`update`](Self::update) may be due, because
    /// another client has waited while this one was served.
    pub fn served(&mut self, ticket: Ticket, rows: usize) -> bool {
        let Some(entry) = self.entries.get(&ticket) else { return false };
        let Some(usage) = self.clients.get_mut(&entry.client) else { return false };
        let rows = usage.client.by_weight(rows as f64);
        usage.served += rows;
        self.served_since_update += rows;
        self.clients.len() > 1 && self.served_since_update >= f64::from(self.config.turn_rows)
    }

    /// Returns the least that a client with tasks was served.
    fn least_served(&self) -> Option<f64> {
        let served = self.entries.values().map(|entry| self.clients[&entry.client].served);
        served.min_by(f64::total_cmp)
    }

    /// Returns how many tasks every client has.
    fn tasks(&self) -> BTreeMap<Arc<str>, ClientTasks> {
        let mut tasks: BTreeMap<Arc<str>, ClientTasks> = BTreeMap::new();
        for entry in self.entries.values() {
            let tasks = tasks.entry(entry.client.clone()).or_default();
            match entry.is_waiting() {
                true => tasks.waiting += 1,
                false => tasks.running += 1,
            }
        }
        tasks
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

    /// Returns the waiting tasks in the order in which they will run: by priority, then the next of the client with the
    /// fewest places for its weight, then of the one that was served least.
    pub fn order(&self, now: Duration) -> Vec<Ticket> {
        let mut waiting: Vec<(Reverse<Priority>, Ticket, &Arc<str>)> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.is_waiting() && !entry.held)
            .map(|(&ticket, entry)| (Reverse(entry.standing(now, self.config.ageing)), ticket, &entry.client))
            .collect();
        waiting.sort();
        if self.clients.len() > 1 {
            let mut tasks = self.tasks();
            let mut places = |name: &Arc<str>| {
                let usage = &self.clients[name];
                let tasks = tasks.entry(name.clone()).or_default();
                tasks.running += 1;
                (usage.client.by_weight(tasks.running as f64), usage.served)
            };
            let mut shared: Vec<_> = waiting.iter().map(|one| (one.0, places(one.2), one.1)).collect();
            shared.sort_by(|one, other| {
                let by_places = one.1.0.total_cmp(&other.1.0).then(one.1.1.total_cmp(&other.1.1));
                one.0.cmp(&other.0).then(by_places).then(one.2.cmp(&other.2))
            });
            return shared.into_iter().map(|(.., ticket)| ticket).collect();
        }
        waiting.into_iter().map(|(_, ticket, _)| ticket).collect()
    }

    /// Lets as many tasks run as may: pauses some first, then starts others. A pinned task takes the place of the least
    /// urgent one at once, but leaves one of two or more places. A task of a client with too few places takes that of a client
    /// with too many.
    pub fn update(&mut self, now: Duration) -> Vec<Change> {
        let mut changes = Vec::new();
        self.served_since_update = 0.0;
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
        if self.running() >= batch && !waits_pinned && self.clients.len() < 2 {
            return changes;
        }
        let mut tasks = self.tasks();
        let mut running = self.running();
        let mut started = BTreeSet::new();
        // The most urgent task of each client that has found no place to take.
        let mut refused: BTreeMap<Arc<str>, Priority> = BTreeMap::new();
        for ticket in self.order(now) {
            let Entry { priority, client, .. } = self.entries[&ticket].clone();
            let is_pinned = priority == Priority::Pinned;
            if refused.get(&client).is_some_and(|refused| priority <= *refused && !is_pinned)
                || (is_pinned && self.pinned() >= self.most_pinned(batch))
            {
                continue;
            }
            let own = tasks.get(&client).map_or(0, |tasks| tasks.running);
            if self.clients[&client].client.most_running.is_some_and(|most| own >= most) {
                refused.insert(client, Priority::Pinned);
                continue;
            }
            if running >= batch {
                let other = match is_pinned {
                    true => self.least_urgent().filter(|other| !self.is_pinned(other)),
                    false => self.surplus(priority, &client, &tasks, &started),
                };
                let Some(other) = other else {
                    refused.insert(client, priority);
                    continue;
                };
                if let Some(tasks) = tasks.get_mut(&self.entries[&other].client) {
                    tasks.running -= 1;
                }
                running -= 1;
                changes.push(self.pause(now, other));
            }
            if let Some(entry) = self.entries.get_mut(&ticket) {
                entry.waits_since = None;
                tasks.entry(client).or_default().running += 1;
                running += 1;
                started.insert(ticket);
                changes.push(Change::Start(ticket));
            }
        }
        changes
    }

    /// Returns the running task that gives its place to one of `client`, which has fewer places for its weight: of the
    /// client with the most, the least urgent and last task that is no more urgent than the other. A client that has one
    /// place more only because places cannot be divided gives it up once it was served for a turn.
    fn surplus(
        &self,
        priority: Priority,
        client: &Arc<str>,
        tasks: &BTreeMap<Arc<str>, ClientTasks>,
        started: &BTreeSet<Ticket>,
    ) -> Option<Ticket> {
        let usage = &self.clients[client];
        let with_one_more = usage.client.by_weight((tasks[client].running + 1) as f64);
        let gives = |ticket: &Ticket, entry: &Entry| {
            let other = &self.clients[&entry.client];
            let running = tasks[&entry.client].running as f64;
            let is_turn = other.served - usage.served > f64::from(self.config.turn_rows);
            let has_more = other.client.by_weight(running - 1.0) >= with_one_more
                || (is_turn && other.client.by_weight(running) >= with_one_more);
            entry.client != *client
                && has_more
                && entry.priority <= priority
                && entry.priority != Priority::Pinned
                && !started.contains(ticket)
        };
        let running = self.entries.iter().filter(|(_, entry)| !entry.is_waiting());
        let giving = running.filter(|(ticket, entry)| gives(ticket, entry));
        giving
            .max_by(|one, other| {
                self.excess(one, tasks)
                    .total_cmp(&self.excess(other, tasks))
                    .then_with(|| (Reverse(one.1.priority), one.0).cmp(&(Reverse(other.1.priority), other.0)))
            })
            .map(|(&ticket, _)| ticket)
    }

    /// Returns how many places the client of a task has for its weight.
    fn excess(&self, (_, entry): &(&Ticket, &Entry), tasks: &BTreeMap<Arc<str>, ClientTasks>) -> f64 {
        let running = tasks.get(&entry.client).map_or(0, |tasks| tasks.running);
        self.clients[&entry.client].client.by_weight(running as f64)
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

    /// Returns the least urgent running task: of equals one of the client with the most places for its weight, and of its
    /// tasks the last one.
    fn least_urgent(&self) -> Option<Ticket> {
        let tasks = self.tasks();
        let running = self.entries.iter().filter(|(_, entry)| !entry.is_waiting());
        let least = running.min_by(|one, other| {
            let by_excess = || self.excess(other, &tasks).total_cmp(&self.excess(one, &tasks));
            let by_priority = one.1.priority.cmp(&other.1.priority);
            by_priority.then_with(by_excess).then_with(|| other.0.cmp(one.0))
        });
        least.map(|(&ticket, _)| ticket)
    }

    fn pause(&mut self, now: Duration, ticket: Ticket) -> Change {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.waits_since = Some(now);
        }
        Change::Pause(ticket)
    }
}

#[cfg(test)]
mod tests;
