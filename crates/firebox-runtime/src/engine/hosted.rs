use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use firebox_cache::{CacheError, Pool};

use crate::answer::Answer;
use crate::engine::event::Event;
use crate::engine::lane::{Lane, Told};
use crate::engine::request::Request;
use crate::engine::segments::{Fetcher, Segments};
use crate::engine::sequence::{RequestId, Sequence};
use crate::schedule::{Change, LaneId, Queue, Readiness, Scheduler, Task, TaskId, Ticket};
use crate::telemetry::Gauge;
use crate::{Model, PrefixTree, RuntimeError};

/// A model that nobody used for so long may have lost its pages to others.
const DOUBTFUL: Duration = Duration::from_secs(1);

/// A model of a host, with those who use it and those who wait for it.
#[derive(Debug)]
pub(crate) struct Hosted {
    pub name: String,
    pub model: Model,
    pub lane: Lane,
    pub queue: Queue,
    /// Requests that wait, those included that have begun and had to make room.
    waiting: HashMap<Ticket, (Sequence, Task)>,
    running: HashMap<RequestId, (Ticket, TaskId, Task)>,
    tickets: HashMap<RequestId, Ticket>,
    /// Those that are to wait as soon as they are in no pass.
    pausing: Vec<RequestId>,
    /// The place that was told last, of each that waits.
    places: HashMap<RequestId, usize>,
    pool: Pool,
    /// Whether who runs and who waits may have changed.
    pub changed: bool,
    /// When a request came or ended last.
    busy: Duration,
    /// Whether somebody has found no room for what it remembers.
    short: bool,
    segments: Segments,
}

impl Hosted {
    pub fn new(
        name: &str,
        model: Model,
        pool: Pool,
        queue: Queue,
        prefixes: PrefixTree,
        fetcher: &Arc<Fetcher>,
    ) -> Result<Self, RuntimeError> {
        let decoder = model.decoder()?;
        Ok(Self {
            name: name.to_owned(),
            lane: Lane::new(decoder.clone(), prefixes),
            queue,
            waiting: HashMap::new(),
            running: HashMap::new(),
            tickets: HashMap::new(),
            pausing: Vec::new(),
            places: HashMap::new(),
            pool,
            changed: false,
            busy: Duration::ZERO,
            short: false,
            segments: Segments::of(model.checkpoint(), &decoder, fetcher),
            model,
        })
    }

    /// Lets a request in, to wait until it is started.
    pub fn enter(&mut self, id: RequestId, request: Request, now: Duration) -> Result<(), RuntimeError> {
        let Request { prompt, config, session, head, task, or_not_at_all, scope, .. } = request;
        let mut session = match session {
            Some(session) if Arc::ptr_eq(&session.decoder, &self.model.decoder()?) => *session,
            Some(_) => return Err(RuntimeError::ForeignSession { model: self.name.clone() }),
            None => self.model.session_in(&self.pool)?,
        };
        if let Some(head) = &head {
            session.use_head(head);
        }
        session.expect_answer(prompt.len(), config.context)?;
        session.expect_known(&prompt)?;
        let tokenizer = self.model.tokenizer().ok().cloned();
        let answer = Answer::new(config, tokenizer)?;
        let ticket = self.queue.enter(now, task.priority)?;
        let begun = self.lane.prefixes().begin(&mut session, &scope, &prompt);
        let mut sequence = Sequence::begin(id, session, &prompt[begun.tokens..], answer, scope, now);
        sequence.prompt_tokens = prompt.len();
        sequence.cached_tokens = begun.tokens;
        sequence.stop = begun.stop.map(|stop| sequence.session.tokens().len() - prompt.len() + stop);
        sequence.late_at = task.first_by.filter(|_| or_not_at_all).map(|first_by| now + first_by);
        self.waiting.insert(ticket, (sequence, task));
        self.tickets.insert(id, ticket);
        self.changed = true;
        if !self.lane.has_work() && now.saturating_sub(self.busy) > DOUBTFUL {
            self.segments.doubt();
        }
        self.busy = now;
        Ok(())
    }

    /// Lets those run that may, and tells those that wait how many come before them.
    pub fn update(&mut self, id: LaneId, scheduler: &mut Scheduler, now: Duration, told: Told<'_>) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        for change in self.queue.update(now) {
            match change {
                Change::Start(ticket) => {
                    let Some((mut sequence, task)) = self.waiting.remove(&ticket) else {
                        // It has not come to wait yet.
                        self.pausing.retain(|id| self.tickets.get(id) != Some(&ticket));
                        continue;
                    };
                    sequence.starts(now);
                    let scheduled = scheduler.add(now, id, task);
                    self.places.remove(&sequence.id);
                    self.running.insert(sequence.id, (ticket, scheduled, task));
                    self.lane.join(sequence);
                }
                Change::Pause(ticket) => {
                    let paused = self.running.iter().find(|(_, (other, ..))| *other == ticket);
                    // One that was to wait already may be on its way out.
                    if let Some((&id, _)) = paused {
                        self.pausing.push(id);
                    }
                }
            }
        }
        self.pause(scheduler);
        let meters = self.model.meters();
        meters.set(Gauge::WaitingRequests, self.queue.waiting() as u64);
        meters.set(Gauge::BatchLimit, self.queue.batch() as u64);
        for (ahead, ticket) in self.queue.order(now).into_iter().enumerate() {
            let Some((sequence, _)) = self.waiting.get(&ticket) else { continue };
            if self.places.insert(sequence.id, ahead) != Some(ahead) {
                told(sequence.id, Event::Waiting { place: ahead });
            }
        }
    }

    fn pause(&mut self, scheduler: &mut Scheduler) {
        for id in std::mem::take(&mut self.pausing) {
            if self.lane.is_passing(id) {
                self.pausing.push(id);
                self.changed = true;
            } else if let Some(mut sequence) = self.lane.leave(id)
                && let Some((ticket, task, wish)) = self.running.remove(&id)
            {
                scheduler.remove(task);
                sequence.pauses();
                if self.short && sequence.session.can_lose() {
                    sequence.session.lose();
                    self.pool.shrink();
                }
                self.waiting.insert(ticket, (sequence, wish));
            }
        }
    }

    /// A request has ended, and its place is free.
    pub fn left(&mut self, id: RequestId, now: Duration, scheduler: &mut Scheduler) {
        self.changed = true;
        self.busy = now;
        self.short = false;
        self.queue.set_room(usize::MAX);
        self.places.remove(&id);
        if let Some(ticket) = self.tickets.remove(&id) {
            self.queue.leave(ticket);
            self.waiting.remove(&ticket);
        }
        if let Some((_, task, _)) = self.running.remove(&id) {
            scheduler.remove(task);
        }
    }

    /// Ends a request where it is. Whether it has ended with that: one that is in a pass ends with it.
    pub fn cancel(&mut self, id: RequestId, now: Duration, told: Told<'_>) -> bool {
        if let Some(sequence) = self.lane.get_mut(id) {
            sequence.cancelled = true;
            return false;
        }
        let Some((mut sequence, _)) = self.tickets.get(&id).and_then(|ticket| self.waiting.remove(ticket))
        else {
            return false;
        };
        if let Some(event) = sequence.cancel() {
            told(id, event);
        }
        told(id, sequence.finished(now));
        true
    }

    /// Lets those fail whose first token should be there, and returns them.
    pub fn fail_late(&mut self, now: Duration, told: Told<'_>) -> Vec<RequestId> {
        let running = self.lane.sequences().filter(|one| one.is_late(now) && !self.lane.is_passing(one.id));
        let waiting = self.waiting.values().map(|(sequence, _)| sequence).filter(|one| one.is_late(now));
        let late: Vec<RequestId> = running.chain(waiting).map(|sequence| sequence.id).collect();
        for &id in &late {
            self.lane.leave(id);
            told(id, Event::Failed(RuntimeError::Late { model: self.name.clone() }));
        }
        late
    }

    /// Keeps a request from going on, or lets it go on.
    pub fn hold(&mut self, id: RequestId, held: bool) {
        let waiting = self.tickets.get(&id).and_then(|ticket| self.waiting.get_mut(ticket));
        let sequence = waiting.map(|(sequence, _)| sequence).or_else(|| self.lane.get_mut(id));
        if let Some(sequence) = sequence {
            sequence.held = held;
        }
    }

    pub fn task(&self, id: RequestId) -> Option<TaskId> {
        self.running.get(&id).map(|(_, task, _)| *task)
    }

    /// What it could do with the machine. Asks for the layers it needs next, if they are not in memory.
    pub fn readiness(&self) -> Readiness {
        if !self.lane.has_work() {
            return Readiness::Idle;
        }
        if self.segments.are_there(self.lane.next_layer()) { Readiness::Ready } else { Readiness::Waiting }
    }

    /// Has it read ahead what it is going to need.
    pub fn prefetch(&self) {
        self.segments.fetch_from(self.lane.next_layer());
    }

    /// Sequences found no room for what they remember. What others remember that wait goes first, the last one's before that of
    /// those who come sooner; it is computed again when it is their turn. Then fewer run, if there is anybody to wait for.
    /// Otherwise they fail, and are returned.
    pub fn starve(&mut self, starved: Vec<RequestId>, now: Duration, told: Told<'_>) -> Vec<RequestId> {
        self.changed = true;
        let order = self.queue.order(now);
        let waiting = order.iter().rev().find_map(|ticket| {
            let (sequence, _) = self.waiting.get(ticket)?;
            (sequence.session.can_lose() && !sequence.session.cache().is_empty()).then_some(*ticket)
        });
        if let Some((sequence, _)) = waiting.and_then(|ticket| self.waiting.get_mut(&ticket)) {
            sequence.session.lose();
            self.pool.shrink();
            return Vec::new();
        }
        // Who is about to pause gives pages back soon.
        let running = self.queue.running().max(self.lane.sequences().len());
        if running > 1 {
            self.queue.set_room(running - 1);
            self.short = true;
            return Vec::new();
        }
        for &id in &starved {
            if let Some(sequence) = self.lane.leave(id) {
                let pages = sequence.session.cache().pool().pages();
                told(id, Event::Failed(CacheError::PoolExhausted { pages }.into()));
            }
        }
        starved
    }
}
