//! An engine on a thread of its own, and the streams of its responses.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use firebox_memory::thermal::Thermometer;
use firebox_runtime::{GrammarCache, Model, RuntimeError};
use firebox_text::panic_message;
use futures_core::Stream;

use crate::engine_core::{EngineConfig, EngineCore};
use crate::engine_thread::{Command, EngineThread};
use crate::error::EngineError;
use crate::event::{Event, Outcome};
use crate::heartbeat::{EngineHealth, Heartbeat};
use crate::request::Request;

/// Events of a request that are buffered; when the buffer is full, the request pauses.
const BACKLOG: usize = 64;
/// [`BACKLOG`] of a request for vectors: an event has those of a whole pass.
const VECTORS_BACKLOG: usize = 2;

/// Answers requests of several models at once, on a thread of its own. Clones share the engine, which ends with the
/// last of them. Each [`ResponseStream`] holds a clone.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use firebox_engine::{Engine, Event, EngineConfig, Request};
/// use firebox_runtime::{Model, device};
///
/// let engine = Engine::start(EngineConfig::default())?;
/// let model = Model::open("models/chat", &device("cpu")?)?;
/// let prompt = model.tokenizer()?.encode("Once upon", true)?;
/// engine.add("chat", model)?;
/// for event in engine.generate(Request::new("chat", prompt)) {
///     if let Event::Piece(piece) = event {
///         print!("{}", piece.text);
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Engine(Arc<Handle>);

struct Handle {
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
    heartbeat: Arc<Heartbeat>,
    stall_after: Duration,
    grammars: Arc<GrammarCache>,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts an engine without models.
    pub fn start(config: EngineConfig) -> Result<Self, EngineError> {
        let (commands, received) = channel();
        let (heartbeat, stall_after) = (Arc::new(Heartbeat::new()), config.stall_after);
        let core = EngineCore::new(config)?;
        let grammars = core.grammars().clone();
        let reported = heartbeat.clone();
        let run = move || EngineThread::new(core, received, reported).run();
        // If the thread fails to spawn, every request is refused.
        let thread = thread::Builder::new().name("firebox-engine".into()).spawn(run).ok();
        if thread.is_none() {
            heartbeat.ended();
        }
        Ok(Self(Arc::new(Handle { commands, thread, heartbeat, stall_after, grammars })))
    }

    /// Returns whether the engine's thread is alive, without waiting for it.
    pub fn health(&self) -> EngineHealth {
        self.0.heartbeat.health(self.0.stall_after)
    }

    /// Returns how often a panic has failed all requests.
    pub fn failures(&self) -> u64 {
        self.0.heartbeat.failures()
    }

    /// Returns the message of the last panic that failed all requests.
    pub fn last_failure(&self) -> Option<String> {
        self.0.heartbeat.last_failure()
    }

    /// Adds a model.
    pub fn add(&self, name: &str, model: Model) -> Result<(), EngineError> {
        let name = name.to_owned();
        self.with_core(move |core| core.add(&name, model))?
    }

    /// Adds a model that is opened on its first request; see [`EngineCore::add_later`].
    pub fn add_later(
        &self,
        name: &str,
        open: impl Fn() -> Result<Model, RuntimeError> + Send + Sync + 'static,
    ) -> Result<(), EngineError> {
        let name = name.to_owned();
        self.with_core(move |core| core.add_later(&name, open))?
    }

    /// Removes a model. Its requests fail.
    pub fn remove(&self, name: &str) -> Result<(), EngineError> {
        let (done, removed) = channel();
        self.send(Command::Remove { name: name.to_owned(), done })?;
        removed.recv().map_err(|_| EngineError::EngineOver)?
    }

    /// Replaces the system's thermometer. The hotter, the fewer requests run together and the shorter the quanta.
    pub fn set_thermometer(&self, thermometer: Thermometer) -> Result<(), EngineError> {
        self.send(Command::Thermometer(Box::new(thermometer)))
    }

    /// Calls `act` with the core between two layers, and waits for the result. A panic is returned as an error. `act`
    /// must not call the engine and wait, which would deadlock.
    pub fn with_core<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut EngineCore) -> R + Send + 'static,
    ) -> Result<R, EngineError> {
        let (done, result) = channel();
        self.send(Command::WithCore(Box::new(move |core| {
            // Unwind safety: models are added and removed as a whole.
            drop(done.send(catch_unwind(AssertUnwindSafe(|| act(core)))));
        })))?;
        let acted = result.recv().map_err(|_| EngineError::EngineOver)?;
        acted.map_err(|panic| EngineError::Panicked { reason: panic_message(&*panic).to_owned() })
    }

    /// Returns the grammars that were compiled lately, to compile one ahead of its
    /// [request](Request::with_compiled_grammar).
    pub fn grammars(&self) -> &Arc<GrammarCache> {
        &self.0.grammars
    }

    /// Submits a request. If it is invalid, the first event is also the last and says why.
    pub fn generate(&self, request: Request) -> ResponseStream {
        self.generate_choices(request, 1).remove(0)
    }

    /// Submits a request for several choices, at least one: see [`EngineCore::submit_choices`]. If it is invalid, the first
    /// event of each is also the last and says why.
    pub fn generate_choices(&self, request: Request, count: usize) -> Vec<ResponseStream> {
        static TICKETS: AtomicU64 = AtomicU64::new(0);
        let count = count.max(1);
        let backlog = if request.embedding.is_some() { VECTORS_BACKLOG } else { BACKLOG };
        let tickets = TICKETS.fetch_add(count as u64, Ordering::Relaxed)..;
        let (choices, received): (Vec<_>, Vec<_>) = tickets
            .take(count)
            .map(|ticket| {
                let (events, received) = async_channel::bounded(backlog);
                ((ticket, events), (ticket, received))
            })
            .unzip();
        let is_closed = self.send(Command::Submit { request: Box::new(request), choices }).is_err();
        let response = |(ticket, received)| {
            let (received, engine) = (Box::pin(received), self.clone());
            ResponseStream { received, ticket, engine, is_closed, has_ended: false }
        };
        received.into_iter().map(response).collect()
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        let sent = self.0.thread.is_some().then(|| self.0.commands.send(command).ok()).flatten();
        sent.ok_or(EngineError::EngineOver)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::End);
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// The events of a request, as a [`Stream`] for any executor and as a blocking iterator. Dropping it cancels the
/// request.
#[derive(Debug)]
pub struct ResponseStream {
    received: Pin<Box<async_channel::Receiver<Event>>>,
    ticket: u64,
    engine: Engine,
    /// Whether no event follows.
    is_closed: bool,
    /// Whether the last event was delivered.
    has_ended: bool,
}

impl ResponseStream {
    /// Waits for the end and returns the result.
    pub fn wait(self) -> Result<Outcome, EngineError> {
        for event in self {
            match event {
                Event::Finished(outcome) => return Ok(*outcome),
                Event::Failed(failure) => return Err(failure.error),
                Event::Embedded(_) => break,
                Event::Waiting { .. } | Event::Piece(_) | Event::Vectors(_) => {}
            }
        }
        Err(EngineError::EngineOver)
    }

    /// Waits for the end of a [request for vectors](Request::embedding), and returns them in the order of the texts.
    pub fn vectors(self) -> Result<Vec<Vec<f32>>, EngineError> {
        let mut vectors = Vec::new();
        for event in self {
            match event {
                Event::Vectors(more) => vectors.extend(more.into_iter().map(|text| text.vector)),
                Event::Embedded(_) => return Ok(vectors),
                Event::Failed(failure) => return Err(failure.error),
                Event::Waiting { .. } | Event::Piece(_) | Event::Finished(_) => {}
            }
        }
        Err(EngineError::EngineOver)
    }

    /// Cancels the request. Its last events still follow.
    pub fn cancel(&self) {
        let _ = self.engine.send(Command::Cancel { ticket: self.ticket });
    }

    fn record(&mut self, event: Option<Event>) -> Option<Event> {
        match event {
            Some(event) => {
                self.is_closed = event.is_last();
                self.has_ended |= self.is_closed;
                Some(event)
            }
            None => {
                // The engine has ended, and the request with it.
                self.is_closed = true;
                let over = || Event::Failed(EngineError::EngineOver.into());
                (!std::mem::replace(&mut self.has_ended, true)).then(over)
            }
        }
    }
}

impl Iterator for ResponseStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let event = if self.is_closed { None } else { self.received.recv_blocking().ok() };
        self.record(event)
    }
}

impl Stream for ResponseStream {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let event =
            if self.is_closed { None } else { std::task::ready!(self.received.as_mut().poll_next(context)) };
        Poll::Ready(self.record(event))
    }
}

impl Drop for ResponseStream {
    fn drop(&mut self) {
        if !self.is_closed {
            self.cancel();
        }
    }
}
