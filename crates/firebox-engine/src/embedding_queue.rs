//! The queue of a model's requests for vectors.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use firebox_runtime::Embedding;
use firebox_runtime::decode::Timing;
use firebox_schedule::{Change, ModelId, Priority, Queue, Scheduler, Task, TaskId, Ticket};
use firebox_telemetry::{Counter, Meters};

use crate::batch::{Batch, EventSink};
use crate::embedding_request::EmbeddingRequest;
use crate::error::EngineError;
use crate::event::Event;
use crate::request::Request;
use crate::request_status::RequestStatus;
use crate::sequence::RequestId;

/// The requests for vectors of a model. They have places of their own: they share the rows of prompts, and would keep
/// answers from decoding if they took theirs.
#[derive(Debug)]
pub(crate) struct EmbeddingQueue {
    pub queue: Queue,
    /// Waiting requests, including those that ran and were paused.
    waiting: HashMap<Ticket, (EmbeddingRequest, Task)>,
    running: HashMap<RequestId, (Ticket, TaskId, Task)>,
    tickets: HashMap<RequestId, Ticket>,
    /// Requests to pause as soon as they are in no pass.
    pausing: Vec<RequestId>,
    /// The place in the queue that each waiting request was last sent.
    places: HashMap<RequestId, usize>,
}

impl EmbeddingQueue {
    pub fn new(queue: Queue) -> Self {
        Self {
            queue,
            waiting: HashMap::new(),
            running: HashMap::new(),
            tickets: HashMap::new(),
            pausing: Vec::new(),
            places: HashMap::new(),
        }
    }

    /// Queues a request.
    pub fn submit(
        &mut self,
        id: RequestId,
        embedding: Embedding,
        Request { task, or_not_at_all, client, .. }: &Request,
        meters: &Arc<Meters>,
        now: Duration,
    ) -> Result<(), EngineError> {
        let tickets = self.queue.enter_all(now, task.priority, client, 1);
        let tickets = tickets.inspect_err(|_| meters.add(Counter::RefusedRequests, 1))?;
        let Some(&ticket) = tickets.first() else { return Ok(()) };
        let first_by = task.first_by.filter(|_| *or_not_at_all);
        let request = EmbeddingRequest {
            id,
            embedding,
            client: client.clone(),
            priority: task.priority,
            timing: Timing::begin(now, meters),
            waited: None,
            has_vectors: false,
            fail_at: first_by.map(|first_by| now.saturating_add(first_by)),
            held: false,
            cancelled: false,
        };
        self.waiting.insert(ticket, (request, *task));
        self.tickets.insert(id, ticket);
        Ok(())
    }

    /// Starts and pauses requests as the queue says, and sends the waiting ones their place. A paused request gives up its
    /// pages if `release` says so. Returns requests that were cancelled in a pass and have ended now.
    pub fn update(
        &mut self,
        model: ModelId,
        scheduler: &mut Scheduler,
        batch: &mut Batch,
        release: bool,
        now: Duration,
        sink: EventSink<'_>,
    ) -> Vec<RequestId> {
        for change in self.queue.update(now) {
            match change {
                Change::Start(ticket) => {
                    if let Some((request, task)) = self.waiting.remove(&ticket) {
                        self.start(request, ticket, task, model, scheduler, batch, now);
                    } else {
                        // It was to be paused and is still in a pass.
                        self.pausing.retain(|id| self.tickets.get(id) != Some(&ticket));
                    }
                }
                Change::Pause(ticket) => {
                    let running = self.running.iter().find(|(_, (other, ..))| *other == ticket);
                    self.pausing.extend(running.map(|(id, _)| *id));
                }
            }
        }
        let mut ended = Vec::new();
        for id in std::mem::take(&mut self.pausing) {
            if batch.is_in_pass(id) {
                self.pausing.push(id);
            } else if let Some(mut request) = batch.embeddings.take(id)
                && let Some((ticket, scheduled, task)) = self.running.remove(&id)
            {
                scheduler.remove(scheduled);
                if request.cancelled {
                    sink(id, request.finished());
                    ended.push(id);
                    continue;
                }
                request.timing.set_running(false);
                if release {
                    request.embedding.release_pages();
                }
                self.waiting.insert(ticket, (request, task));
            }
        }
        for (ahead, ticket) in self.queue.order(now).into_iter().enumerate() {
            let Some((request, _)) = self.waiting.get(&ticket) else { continue };
            if self.places.insert(request.id, ahead) != Some(ahead) {
                sink(request.id, Event::Waiting { place: ahead });
            }
        }
        ended
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of a start, each of another owner")]
    fn start(
        &mut self,
        mut request: EmbeddingRequest,
        ticket: Ticket,
        task: Task,
        model: ModelId,
        scheduler: &mut Scheduler,
        batch: &mut Batch,
        now: Duration,
    ) {
        request.start(now);
        // Time in the queue counts towards the deadline of the first vectors.
        let waited = request.timing.since_begin(now);
        let first_by = task.first_by.filter(|_| !request.has_vectors);
        let first_by = first_by.map(|first_by| first_by.saturating_sub(waited));
        let scheduled = scheduler.add(now, model, Task { first_by, ..task });
        self.places.remove(&request.id);
        self.running.insert(request.id, (ticket, scheduled, task));
        batch.embeddings.add(request);
    }

    /// Returns whether a request is to be paused when its pass ends.
    pub fn is_pausing(&self) -> bool {
        !self.pausing.is_empty()
    }

    /// Removes a request that has ended.
    pub fn finish(&mut self, id: RequestId, scheduler: &mut Scheduler) {
        self.places.remove(&id);
        if let Some(ticket) = self.tickets.remove(&id) {
            self.queue.leave(ticket);
            self.waiting.remove(&ticket);
        }
        if let Some((_, task, _)) = self.running.remove(&id) {
            scheduler.remove(task);
        }
    }

    /// Cancels a request. Returns whether it has ended; one that runs ends as soon as it is in no pass.
    pub fn cancel(&mut self, id: RequestId, batch: &mut Batch, sink: EventSink<'_>) -> bool {
        if let Some(request) = batch.embeddings.get_mut(id) {
            request.cancelled = true;
            return false;
        }
        let Some(mut request) = self.take(id, batch) else { return false };
        request.cancelled = true;
        sink(id, request.finished());
        true
    }

    /// Removes a request, whether it waits or runs.
    pub fn take(&mut self, id: RequestId, batch: &mut Batch) -> Option<EmbeddingRequest> {
        let ticket = self.tickets.get(&id)?;
        let waiting = self.waiting.remove(ticket).map(|(request, _)| request);
        waiting.or_else(|| batch.embeddings.take(id))
    }

    /// Pauses a request, or lets it go on. Returns whether that changed anything.
    pub fn hold(&mut self, id: RequestId, held: bool, batch: &mut Batch, now: Duration) -> bool {
        let Some(&ticket) = self.tickets.get(&id) else { return false };
        let waiting = self.waiting.get_mut(&ticket).map(|(request, _)| request);
        let Some(request) = waiting.or_else(|| batch.embeddings.get_mut(id)) else { return false };
        if std::mem::replace(&mut request.held, held) == held {
            return false;
        }
        if let Some(Change::Pause(_)) = self.queue.hold(now, ticket, held) {
            self.pausing.push(id);
        }
        true
    }

    /// Returns the requests that wait or run.
    pub fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.tickets.keys().copied()
    }

    /// Returns the requests in no pass whose first vectors are late.
    pub fn late(&self, batch: &Batch, now: Duration) -> Vec<RequestId> {
        let running = batch.embeddings.iter().filter(|one| !batch.is_in_pass(one.id));
        let waiting = self.waiting.values().map(|(request, _)| request);
        running.chain(waiting).filter(|one| one.is_late(now)).map(|one| one.id).collect()
    }

    /// Returns the priorities of requests that are not held.
    pub fn priorities<'q>(&'q self, batch: &'q Batch) -> impl Iterator<Item = Priority> + 'q {
        let waiting = self.waiting.values().map(|(request, _)| request);
        let all = batch.embeddings.iter().chain(waiting);
        all.filter(|one| !one.held || one.cancelled).map(|one| one.priority)
    }

    /// Counts rows that a request was computed. Returns whether the order of the queue may have changed.
    pub fn served(&mut self, id: RequestId, rows: usize) -> bool {
        self.tickets.get(&id).is_some_and(|ticket| self.queue.served(*ticket, rows))
    }

    pub fn task(&self, id: RequestId) -> Option<TaskId> {
        self.running.get(&id).map(|(_, task, _)| *task)
    }

    /// Returns the requests that are queued or running.
    pub fn statuses<'q>(
        &'q self,
        model: &'q str,
        batch: &'q Batch,
    ) -> impl Iterator<Item = RequestStatus> + 'q {
        let status = |request: &EmbeddingRequest, waits: Option<usize>| RequestStatus {
            id: request.id,
            model: model.to_owned(),
            waits,
            prompt_tokens: request.embedding.tokens(),
            generated_tokens: 0,
        };
        let running = batch.embeddings.iter().map(move |request| status(request, None));
        let waiting = self.waiting.values().map(move |(request, _)| {
            status(request, Some(self.places.get(&request.id).copied().unwrap_or_default()))
        });
        running.chain(waiting)
    }
}
