//! An open model of an engine, with its queue and its running requests.

mod admission;
mod choices;
mod stalled;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use firebox_cache::{CacheError, PagePool};
use firebox_runtime::residency::Urgency;
use firebox_runtime::{
    GrammarCache, LookupDrafter, Model, ModelDrafter, PrefixTree, RuntimeError, Session, SessionFile,
    Speculation,
};
use firebox_schedule::{Change, ModelId, Queue, Readiness, Scheduler, Task, TaskId, Ticket};
use firebox_telemetry::Gauge;

use crate::batch::{Batch, EventSink};
use crate::embedding_queue::EmbeddingQueue;
use crate::error::EngineError;
use crate::event::Event;
use crate::prefetcher::{Fetcher, Prefetcher};
use crate::request_setup::RequestSetup;
use crate::request_status::RequestStatus;
use crate::sequence::{RequestId, Sequence};

/// After how long without use the system may have evicted pages of a mapped model.
const RESIDENCY_DOUBT: Duration = Duration::from_secs(1);

/// An open model of an engine, with its running and waiting requests.
#[derive(Debug)]
pub(crate) struct LoadedModel {
    pub name: String,
    pub model: Model,
    pub batch: Batch,
    pub queue: Queue,
    /// Requests for vectors. They take no places of answers.
    pub embeddings: EmbeddingQueue,
    /// Waiting requests, including those that ran and were paused.
    waiting: HashMap<Ticket, (Sequence, Task)>,
    running: HashMap<RequestId, (Ticket, TaskId, Task)>,
    tickets: HashMap<RequestId, Ticket>,
    /// The choices that wait for a prompt, by the choice of their request that computes it.
    followers: HashMap<RequestId, Vec<RequestId>>,
    setups: Vec<RequestSetup>,
    grammars: Arc<GrammarCache>,
    /// Requests to pause as soon as they are in no pass.
    pausing: Vec<RequestId>,
    /// The place in the queue that each waiting request was last sent.
    places: HashMap<RequestId, usize>,
    /// Stays alive with the model, so that its pages are reported.
    pool: Arc<PagePool>,
    /// Whether the set of running or waiting requests may have changed.
    pub changed: bool,
    /// When a request last came or ended.
    last_active: Duration,
    /// Whether a sequence has found the page pool exhausted.
    is_short_of_pages: bool,
    prefetcher: Prefetcher,
    /// The urgency and the read position last passed to the model's residency.
    urgency: Option<Urgency>,
    queue_position: Option<u32>,
    /// The drafter of the draft model; each request gets a clone.
    drafter: Option<ModelDrafter>,
    /// Whether requests that do not set `lookup` draft by lookup.
    lookup: bool,
}

impl LoadedModel {
    pub fn new(
        name: &str,
        model: Model,
        pool: PagePool,
        queue: Queue,
        prefixes: PrefixTree,
        fetcher: &Arc<Fetcher>,
    ) -> Result<Self, EngineError> {
        let decoder = model.decoder()?;
        let pool = Arc::new(pool);
        let weak_pool = Arc::downgrade(&pool);
        model.telemetry().ask(model.meters(), "pages", move |snapshot| {
            let Some(pool) = weak_pool.upgrade() else { return false };
            snapshot.gauges.insert(Gauge::KeysAndValues, pool.bytes() as u64);
            true
        });
        Ok(Self {
            name: name.to_owned(),
            batch: Batch::new(decoder.clone(), prefixes),
            embeddings: EmbeddingQueue::new(queue.clone()),
            queue,
            waiting: HashMap::new(),
            running: HashMap::new(),
            tickets: HashMap::new(),
            followers: HashMap::new(),
            setups: Vec::new(),
            grammars: Arc::default(),
            pausing: Vec::new(),
            places: HashMap::new(),
            pool,
            changed: false,
            last_active: Duration::ZERO,
            is_short_of_pages: false,
            prefetcher: Prefetcher::new(model.checkpoint(), &decoder, fetcher),
            urgency: None,
            queue_position: None,
            drafter: model.draft().map(|draft| ModelDrafter::new(draft, &model)).transpose()?,
            lookup: false,
            model,
        })
    }

    /// Sets whether requests that do not set `lookup` draft by lookup.
    pub fn with_lookup(self, lookup: bool) -> Self {
        Self { lookup, ..self }
    }

    /// Shares compiled grammars with other models.
    pub fn with_grammars(self, grammars: Arc<GrammarCache>) -> Self {
        Self { grammars, ..self }
    }

    /// Returns what drafts tokens for a request, if anything does. Sequences of a batch verify one branch each.
    fn speculation(&self, lookup: Option<bool>) -> Option<Speculation> {
        let speculation = match &self.drafter {
            Some(drafter) => Speculation::new(drafter.clone()),
            None if lookup.unwrap_or(self.lookup) => Speculation::new(LookupDrafter::new()),
            None => return None,
        };
        Some(speculation.with_draft_branches(1))
    }

    /// Returns an empty session with pages from the model's pool.
    pub fn session(&self) -> Result<Session, EngineError> {
        Ok(self.model.session_in(&self.pool)?)
    }

    /// Returns a session that continues from a file, with pages from the model's pool.
    pub fn restored(&self, saved: &SessionFile) -> Result<Session, EngineError> {
        Ok(self.model.restored_in(saved, &self.pool)?)
    }

    /// Returns the requests that are queued or running.
    pub fn requests(&self) -> impl Iterator<Item = RequestStatus> {
        let status = |sequence: &Sequence, waits: Option<usize>| RequestStatus {
            id: sequence.id,
            model: self.name.clone(),
            waits,
            prompt_tokens: sequence.prompt_tokens,
            generated_tokens: sequence.output().count(),
        };
        let waiting = self.waiting.values().map(move |(sequence, _)| {
            status(sequence, Some(self.places.get(&sequence.id).copied().unwrap_or_default()))
        });
        let answers = self.batch.sequences().map(move |sequence| status(sequence, None)).chain(waiting);
        answers.chain(self.embeddings.statuses(&self.name, &self.batch))
    }

    /// Marks the residency of mapped segments as unknown if the model has been idle for a while.
    fn doubt_residency(&self, now: Duration) {
        if !self.batch.has_work() && now.saturating_sub(self.last_active) > RESIDENCY_DOUBT {
            self.prefetcher.forget_residency();
        }
    }

    /// Starts and pauses requests as the queue says, and sends the waiting ones their place. Returns requests that were
    /// cancelled in a pass and have ended now.
    pub fn update(
        &mut self,
        id: ModelId,
        scheduler: &mut Scheduler,
        now: Duration,
        sink: EventSink<'_>,
    ) -> Vec<RequestId> {
        if !std::mem::take(&mut self.changed) {
            return Vec::new();
        }
        let mut ended = Vec::new();
        for change in self.queue.update(now) {
            match change {
                Change::Start(ticket) => {
                    let Some((mut sequence, task)) = self.waiting.remove(&ticket) else {
                        // It is not queued yet, only being prepared.
                        self.pausing.retain(|id| self.tickets.get(id) != Some(&ticket));
                        continue;
                    };
                    sequence.start(self.batch.prefixes(), now);
                    // Time in the queue counts towards the deadline of the first token.
                    let waited = sequence.state.timing().since_begin(now);
                    let first_by = task.first_by.filter(|_| sequence.output().count() == 0);
                    let first_by = first_by.map(|first_by| first_by.saturating_sub(waited));
                    let scheduled = scheduler.add(now, id, Task { first_by, ..task });
                    self.places.remove(&sequence.id);
                    self.running.insert(sequence.id, (ticket, scheduled, task));
                    match choices::first_token(&mut sequence, now, sink) {
                        Ok(false) => self.batch.add(sequence),
                        Ok(true) => {
                            ended.push(sequence.id);
                            sink(sequence.id, sequence.finished(now));
                        }
                        Err(error) => {
                            ended.push(sequence.id);
                            sink(sequence.id, sequence.failed(error));
                        }
                    }
                }
                Change::Pause(ticket) => {
                    let running = self.running.iter().find(|(_, (other, ..))| *other == ticket);
                    // One that is being paused already may have left.
                    if let Some((&id, _)) = running {
                        self.pausing.push(id);
                    }
                }
            }
        }
        ended.extend(self.pause(scheduler, now, sink));
        let release = self.is_short_of_pages;
        ended.extend(self.embeddings.update(id, scheduler, &mut self.batch, release, now, sink));
        self.changed |= self.embeddings.is_pausing();
        let meters = self.model.meters();
        let waiting = self.queue.waiting() + self.embeddings.queue.waiting();
        meters.set(Gauge::WaitingRequests, waiting as u64);
        meters.set(Gauge::BatchLimit, self.queue.batch() as u64);
        for (ahead, ticket) in self.queue.order(now).into_iter().enumerate() {
            let Some((sequence, _)) = self.waiting.get(&ticket) else { continue };
            if self.places.insert(sequence.id, ahead) != Some(ahead) {
                sink(sequence.id, Event::Waiting { place: ahead });
            }
        }
        ended
    }

    fn pause(&mut self, scheduler: &mut Scheduler, now: Duration, sink: EventSink<'_>) -> Vec<RequestId> {
        let mut ended = Vec::new();
        for id in std::mem::take(&mut self.pausing) {
            if self.batch.is_in_pass(id) {
                self.pausing.push(id);
                self.changed = true;
            } else if let Some(mut sequence) = self.batch.remove(id)
                && let Some((ticket, scheduled, task)) = self.running.remove(&id)
            {
                scheduler.remove(scheduled);
                if sequence.cancelled {
                    if let Some(event) = sequence.cancel() {
                        sink(id, event);
                    }
                    sink(id, sequence.finished(now));
                    ended.push(id);
                    continue;
                }
                sequence.pause();
                if self.is_short_of_pages && frees_pages(&sequence.session) {
                    sequence.session.drop_cache();
                    self.batch.decoder().release_recorded_step();
                    self.pool.shrink();
                }
                self.waiting.insert(ticket, (sequence, task));
            }
        }
        ended
    }

    /// Removes a request that has ended; its slot is free.
    pub fn finish(&mut self, id: RequestId, now: Duration, scheduler: &mut Scheduler) {
        self.changed = true;
        self.last_active = now;
        self.is_short_of_pages = false;
        self.queue.set_room(usize::MAX);
        self.places.remove(&id);
        if let Some(ticket) = self.tickets.remove(&id) {
            self.queue.leave(ticket);
            self.waiting.remove(&ticket);
        }
        if let Some((_, task, _)) = self.running.remove(&id) {
            scheduler.remove(task);
        }
        self.embeddings.finish(id, scheduler);
        // If it ended before its prompt was computed, another choice computes that.
        if let Some(mut choices) = self.followers.remove(&id) {
            choices.retain(|id| self.tickets.contains_key(id));
            self.share_prompt(choices, now);
        }
    }

    /// Cancels a request. Returns whether it has ended; one that is in a pass ends with that pass.
    pub fn cancel(&mut self, id: RequestId, now: Duration, sink: EventSink<'_>) -> bool {
        if let Some(setup) = self.setups.iter_mut().find(|setup| setup.has(id)) {
            setup.cancelled.push(id);
            return false;
        }
        if let Some(sequence) = self.batch.get_mut(id) {
            sequence.cancelled = true;
            return false;
        }
        if self.embeddings.cancel(id, &mut self.batch, sink) {
            return true;
        }
        let Some((mut sequence, _)) = self.tickets.get(&id).and_then(|ticket| self.waiting.remove(ticket))
        else {
            return false;
        };
        if let Some(event) = sequence.cancel() {
            sink(id, event);
        }
        sink(id, sequence.finished(now));
        true
    }

    /// Fails requests whose first token is late, and returns them.
    pub fn fail_late(&mut self, now: Duration, sink: EventSink<'_>) -> Vec<RequestId> {
        let running = self.batch.sequences().filter(|one| one.is_late(now) && !self.batch.is_in_pass(one.id));
        let waiting = self.waiting.values().map(|(sequence, _)| sequence).filter(|one| one.is_late(now));
        let late = running.chain(waiting).map(|sequence| sequence.id);
        let late: Vec<RequestId> = late.chain(self.embeddings.late(&self.batch, now)).collect();
        for &id in &late {
            self.fail(id, EngineError::Late { model: self.name.clone() }, sink);
        }
        late
    }

    /// Fails a request that is in no pass.
    pub fn fail(&mut self, id: RequestId, error: EngineError, sink: EventSink<'_>) {
        if let Some(at) = self.setups.iter().position(|setup| setup.has(id)) {
            let choices = &mut self.setups[at].request.choices;
            choices.retain(|(choice, _)| *choice != id);
            let failure = match choices.is_empty() {
                true => self.setups.remove(at).parts.refused(error),
                false => error.into(),
            };
            return sink(id, Event::Failed(failure));
        }
        if let Some(request) = self.embeddings.take(id, &mut self.batch) {
            return sink(id, request.failed(error));
        }
        let waiting = self.tickets.get(&id).and_then(|ticket| self.waiting.remove(ticket));
        let sequence = waiting.map(|(sequence, _)| sequence).or_else(|| self.batch.remove(id));
        let event = match sequence {
            Some(sequence) => sequence.failed(error),
            None => Event::Failed(error.into()),
        };
        sink(id, event);
    }

    /// Fails all requests after a panic. A session that cannot be rolled back is lost.
    pub fn fail_all(&mut self, error: &dyn Fn() -> EngineError, sink: EventSink<'_>) {
        self.batch.abandon();
        let ids: HashSet<RequestId> =
            self.tickets.keys().copied().chain(self.embeddings.requests()).collect();
        for id in ids {
            self.fail(id, error(), sink);
        }
    }

    /// Returns the name, the model and its pool of pages.
    pub fn into_parts(self) -> (String, Model, PagePool) {
        (self.name, self.model, (*self.pool).clone())
    }

    /// Pauses a request, or lets it go on. Others run in its place meanwhile.
    pub fn hold(&mut self, id: RequestId, held: bool, now: Duration) {
        let Some(&ticket) = self.tickets.get(&id) else {
            self.changed |= self.embeddings.hold(id, held, &mut self.batch, now);
            return;
        };
        let waiting = self.waiting.get_mut(&ticket).map(|(sequence, _)| sequence);
        let Some(sequence) = waiting.or_else(|| self.batch.get_mut(id)) else { return };
        if sequence.held == held {
            return;
        }
        sequence.held = held;
        self.changed = true;
        let held = held || sequence.awaits_prompt;
        if let Some(Change::Pause(_)) = self.queue.hold(now, ticket, held) {
            self.pausing.push(id);
        }
    }

    pub fn task(&self, id: RequestId) -> Option<TaskId> {
        self.running.get(&id).map(|(_, task, _)| *task).or_else(|| self.embeddings.task(id))
    }

    /// Returns whether the model has work and its next layer is resident. Starts to read the layer if it is not.
    pub fn readiness(&self) -> Readiness {
        if !self.batch.has_work() {
            self.clear_wanted();
            return Readiness::Idle;
        }
        if self
            .are_weights_resident()
            .unwrap_or_else(|| self.prefetcher.is_resident(self.batch.upcoming_layer()))
        {
            Readiness::Ready
        } else {
            Readiness::Waiting
        }
    }

    /// For a model that streams its weights, returns whether those of the next step are resident and no pass outside
    /// the engine streams. Moves missing weights to the front of the read order.
    fn are_weights_resident(&self) -> Option<bool> {
        let streamed = self.batch.decoder().streamed()?;
        Some(!streamed.is_busy() && self.batch.upcoming_step().is_none_or(|step| streamed.prioritize(step)))
    }

    /// Reports the model's urgency to its residency if it has changed: memory goes to the most urgent model.
    pub fn report_urgency(&mut self) {
        let Some(residency) = self.model.residency() else { return };
        let waiting = self.waiting.values().map(|(sequence, _)| sequence);
        let active = self.batch.sequences().chain(waiting).filter(|one| !one.held || one.cancelled);
        let answers = active.map(|one| (one.priority, one.output().count() == 0));
        let embeddings = self.embeddings.priorities(&self.batch).map(|priority| (priority, false));
        let highest = answers.chain(embeddings).max();
        let urgency = highest.map(|(priority, awaits_first_token)| Urgency { priority, awaits_first_token });
        if std::mem::replace(&mut self.urgency, urgency) != urgency {
            residency.set_urgency(urgency);
        }
    }

    /// Lets passes outside the engine begin: none of the engine is to.
    fn clear_wanted(&self) {
        if let Some(streamed) = self.batch.decoder().streamed() {
            streamed.clear_wanted();
        }
    }

    /// Reports that the engine no longer needs the model, even if it is used elsewhere.
    pub fn retire(&mut self) {
        self.clear_wanted();
        self.model.meters().set(Gauge::WaitingRequests, 0);
        if let Some(residency) = self.model.residency() {
            residency.set_urgency(None);
        }
        self.report_queue_position(u32::MAX);
    }

    /// Returns the urgency last reported, for a model that shares its memory.
    pub fn urgency(&self) -> Option<Urgency> {
        self.urgency
    }

    /// Reports the model's position in the order of disk reads if it has changed.
    pub fn report_queue_position(&mut self, position: u32) {
        if self.queue_position.replace(position) != Some(position)
            && let Some(residency) = self.model.residency()
        {
            residency.set_queue_position(position);
        }
    }

    /// Prefetches the segments of the next layers.
    pub fn prefetch(&self, now: Duration) {
        if self.batch.decoder().streamed().is_some() {
            // It reads ahead by itself once it has work, and holds no buffers before.
            return;
        }
        self.doubt_residency(now);
        self.prefetcher.prefetch_from(self.batch.upcoming_layer());
    }

    /// Frees pages for sequences that found the pool exhausted. First drops the cache of the waiting request that runs
    /// last, which is recomputed when it runs. If there is none, runs one request fewer. If only one runs, fails the
    /// starved sequences and returns them.
    pub fn preempt(&mut self, starved: Vec<RequestId>, now: Duration, sink: EventSink<'_>) -> Vec<RequestId> {
        self.changed = true;
        // Texts that are embedded begin again later.
        if self.batch.yield_pages(&starved) {
            return Vec::new();
        }
        let order = self.queue.order(now);
        let place = |ticket: &Ticket| order.iter().position(|other| other == ticket).unwrap_or(usize::MAX);
        let with_pages = self.waiting.iter().filter(|(_, (sequence, _))| frees_pages(&sequence.session));
        let last = with_pages.map(|(ticket, _)| *ticket).max_by_key(|ticket| (place(ticket), *ticket));
        if let Some((sequence, _)) = last.and_then(|ticket| self.waiting.get_mut(&ticket)) {
            sequence.session.drop_cache();
            self.batch.decoder().release_recorded_step();
            self.pool.shrink();
            return Vec::new();
        }
        // Pausing requests will return pages soon.
        let running = self.queue.running().max(self.batch.sequences().len());
        if running > 1 {
            self.queue.set_room(running - 1);
            self.is_short_of_pages = true;
            return Vec::new();
        }
        if self.drop_shared_prompts() {
            return Vec::new();
        }
        let pages = self.pool.pages();
        for &id in &starved {
            self.fail(id, RuntimeError::from(CacheError::PoolExhausted { pages }).into(), sink);
        }
        starved
    }
}

/// Returns whether dropping the session's cache frees pages and loses nothing that cannot be recomputed. A branch of a
/// conversation that goes on elsewhere may own no page.
fn frees_pages(session: &Session) -> bool {
    session.is_reproducible() && session.cache().has_own_page()
}
