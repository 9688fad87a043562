//! Models that are opened on their first request.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use firebox_runtime::{Model, RuntimeError};
use firebox_schedule::{AdmissionConfig, Queue, Ticket};

use crate::batch::EventSink;
use crate::error::EngineError;
use crate::event::Failure;
use crate::request::Request;
use crate::sequence::RequestId;

/// Opens a model.
pub(crate) type Opener = dyn Fn() -> Result<Model, RuntimeError> + Send + Sync;

/// A model that is opened on first use, on a thread of its own, with the requests that wait for it.
pub(crate) struct LazyModel {
    open: Arc<Opener>,
    opened: Option<Receiver<Result<Model, RuntimeError>>>,
    pub waiting: Vec<PendingRequest>,
    /// Admits as many requests as the queue of the open model would.
    pub queue: Queue,
}

/// A request for a model that is not open yet.
#[derive(Debug)]
pub(crate) struct PendingRequest {
    /// Its choices, each with a place in the queue.
    pub choices: Vec<(RequestId, Ticket)>,
    pub request: Request,
    /// When it was submitted.
    pub since: Duration,
    pub cancelled: Vec<RequestId>,
}

impl PendingRequest {
    pub fn has(&self, id: RequestId) -> bool {
        self.choices.iter().any(|(choice, _)| *choice == id)
    }

    /// Fails all choices. The first returns the session.
    pub fn fail(self, error: EngineError, sink: EventSink<'_>) {
        let failure = Box::new(Failure { error, session: self.request.session });
        let failures = failure.of_choices(self.choices.len());
        for ((id, _), failure) in self.choices.into_iter().zip(failures) {
            sink(id, failure);
        }
    }

    /// Returns whether the deadline of its first token has passed and the request is to fail for that.
    pub fn is_late(&self, now: Duration) -> bool {
        let first_by = self.request.task.first_by.filter(|_| self.request.or_not_at_all);
        first_by.is_some_and(|first_by| now >= self.since.saturating_add(first_by))
    }
}

impl LazyModel {
    pub fn new(open: Arc<Opener>, admission: AdmissionConfig) -> Self {
        Self { open, opened: None, waiting: Vec::new(), queue: Queue::new(admission) }
    }

    /// Removes and returns the requests whose first token is late.
    pub fn take_late(&mut self, now: Duration) -> Vec<PendingRequest> {
        let late: Vec<PendingRequest> = self.waiting.extract_if(.., |pending| pending.is_late(now)).collect();
        for (_, ticket) in late.iter().flat_map(|pending| &pending.choices) {
            self.queue.leave(*ticket);
        }
        late
    }

    /// Removes and returns all requests.
    pub fn take_waiting(&mut self) -> Vec<PendingRequest> {
        let waiting = std::mem::take(&mut self.waiting);
        for (_, ticket) in waiting.iter().flat_map(|pending| &pending.choices) {
            self.queue.leave(*ticket);
        }
        waiting
    }

    /// Starts to open the model unless that is already under way.
    pub fn start_opening(&mut self) {
        if self.is_opening() {
            return;
        }
        let ((done, opened), open) = (channel(), self.open.clone());
        // If the thread fails to spawn, the sender is dropped and `opened` reports it.
        let _ = thread::Builder::new().name("firebox-open".into()).spawn(move || done.send(open()));
        self.opened = Some(opened);
    }

    pub fn is_opening(&self) -> bool {
        self.opened.is_some()
    }

    /// Returns the model, or why it could not be opened, once the attempt has ended. The next request tries again.
    pub fn opened(&mut self) -> Option<Result<Model, RuntimeError>> {
        let opened = match self.opened.as_ref()?.try_recv() {
            Ok(opened) => opened,
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => {
                Err(RuntimeError::Threads { reason: "the thread that opens it is gone".into() })
            }
        };
        self.opened = None;
        Some(opened)
    }
}

impl fmt::Debug for LazyModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LazyModel").field("waiting", &self.waiting).finish_non_exhaustive()
    }
}
