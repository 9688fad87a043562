//! The thread of an engine, and the handles that send it commands and receive its events.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use async_channel::TrySendError;
use firebox_memory::thermal::{self, Thermometer};
use firebox_runtime::{Model, RuntimeError};
use firebox_text::panic_message;
use futures_core::Stream;

use crate::clock::{Clock, WallClock};
use crate::engine_core::{EngineConfig, EngineCore, StepOutcome};
use crate::error::EngineError;
use crate::event::{Event, Outcome};
use crate::request::Request;
use crate::sequence::RequestId;

/// Events of a request that are buffered; when the buffer is full, the request pauses.
const BACKLOG: usize = 64;
/// Interval at which a full buffer is checked for room.
const BACKLOG_CHECK: Duration = Duration::from_millis(2);
/// Interval at which the core is polled while weights are being loaded.
const DISK_CHECK: Duration = Duration::from_micros(200);

/// Interval between two readings of the thermometer.
const HEAT_CHECK: Duration = Duration::from_secs(1);

/// The most commands that are executed between two layers.
const COMMANDS: usize = 16;

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
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

enum Command {
    Submit { request: Box<Request>, ticket: u64, events: async_channel::Sender<Event> },
    Cancel { ticket: u64 },
    Remove { name: String, done: Sender<Result<(), EngineError>> },
    WithCore(Box<dyn FnOnce(&mut EngineCore) + Send>),
    Thermometer(Box<Thermometer>),
    End,
}

impl Engine {
    /// Starts an engine without models.
    pub fn start(config: EngineConfig) -> Result<Self, EngineError> {
        let (commands, received) = channel();
        let core = EngineCore::new(config)?;
        let run = move || EngineThread::new(core, received).run();
        // If the thread fails to spawn, every request is refused.
        let thread = thread::Builder::new().name("firebox-engine".into()).spawn(run).ok();
        Ok(Self(Arc::new(Handle { commands, thread })))
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

    /// Submits a request. If it is invalid, the first event is also the last and says why.
    pub fn generate(&self, request: Request) -> ResponseStream {
        static TICKETS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let ticket = TICKETS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (events, received) = async_channel::bounded(BACKLOG);
        let submitted = self.send(Command::Submit { request: Box::new(request), ticket, events });
        ResponseStream {
            received: Box::pin(received),
            ticket,
            engine: self.clone(),
            is_closed: submitted.is_err(),
            has_ended: false,
        }
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
                Event::Waiting { .. } | Event::Piece(_) => {}
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

/// The state of an engine's thread.
struct EngineThread {
    core: EngineCore,
    commands: Receiver<Command>,
    clock: WallClock,
    subscriptions: HashMap<RequestId, Subscription>,
    tickets: HashMap<u64, RequestId>,
    /// `None` if the system has no thermometer.
    thermometer: Option<Thermometer>,
    /// When the thermometer is read next.
    next_reading: Duration,
}

/// The receiver of a request's events.
struct Subscription {
    ticket: u64,
    events: async_channel::Sender<Event>,
    /// Events that did not fit into the channel.
    backlog: VecDeque<Event>,
    /// Whether the last event is out.
    ended: bool,
}

impl EngineThread {
    fn new(core: EngineCore, commands: Receiver<Command>) -> Self {
        Self {
            core,
            commands,
            clock: WallClock::default(),
            subscriptions: HashMap::new(),
            tickets: HashMap::new(),
            thermometer: thermal::system().map(Thermometer::new),
            next_reading: Duration::ZERO,
        }
    }

    fn run(mut self) {
        loop {
            for _ in 0..COMMANDS {
                match self.commands.try_recv() {
                    Ok(Command::End) | Err(TryRecvError::Disconnected) => return,
                    Ok(command) => self.execute(command),
                    Err(TryRecvError::Empty) => break,
                }
            }
            self.deliver();
            self.read_thermometer();
            let mut events = Vec::new();
            let outcome = self.core.work(&self.clock, &mut |id, event| events.push((id, event)));
            self.dispatch(events);
            let pause = match outcome {
                StepOutcome::Layer { .. } => continue,
                StepOutcome::Waiting => Some(DISK_CHECK),
                StepOutcome::Idle => self
                    .subscriptions
                    .values()
                    .any(|subscription| !subscription.backlog.is_empty())
                    .then_some(BACKLOG_CHECK),
            };
            let command = match pause {
                Some(pause) => self.commands.recv_timeout(pause),
                None => self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match command {
                Ok(Command::End) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(command) => self.execute(command),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Reads the thermometer if it is time to.
    fn read_thermometer(&mut self) {
        let now = self.clock.now();
        let Some(thermometer) = self.thermometer.as_mut().filter(|_| self.next_reading <= now) else {
            return;
        };
        self.next_reading = now + HEAT_CHECK;
        let before = thermometer.heat();
        let heat = thermometer.read();
        if heat != before {
            self.core.set_heat(heat);
        }
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Submit { request, ticket, events } => {
                let now = self.clock.now();
                match self.core.submit(*request, now) {
                    Ok(id) => {
                        self.tickets.insert(ticket, id);
                        self.subscriptions.insert(
                            id,
                            Subscription { ticket, events, backlog: VecDeque::new(), ended: false },
                        );
                    }
                    Err(failure) => drop(events.try_send(Event::Failed(failure))),
                }
            }
            Command::Cancel { ticket } => {
                if let Some(&id) = self.tickets.get(&ticket) {
                    let (now, mut events) = (self.clock.now(), Vec::new());
                    self.core.hold(id, false, self.clock.now());
                    self.core.cancel(id, now, &mut |id, event| events.push((id, event)));
                    self.dispatch(events);
                }
            }
            Command::Remove { name, done } => {
                let mut events = Vec::new();
                let removed = self.core.remove(&name, &mut |id, event| events.push((id, event)));
                self.dispatch(events);
                drop(done.send(removed.map(drop)));
            }
            Command::WithCore(act) => {
                act(&mut self.core);
                // Events that `act` caused went to its own sink and not to the receivers.
                let gone = self
                    .subscriptions
                    .iter()
                    .filter(|(id, subscription)| !subscription.ended && !self.core.knows(**id));
                let gone: Vec<RequestId> = gone.map(|(id, _)| *id).collect();
                let failure = |id| (id, Event::Failed(EngineError::EngineOver.into()));
                self.dispatch(gone.into_iter().map(failure).collect());
            }
            Command::Thermometer(thermometer) => {
                self.core.set_heat(thermometer.heat());
                self.thermometer = Some(*thermometer);
                self.next_reading = Duration::ZERO;
            }
            Command::End => {}
        }
    }

    fn dispatch(&mut self, events: Vec<(RequestId, Event)>) {
        for (id, event) in events {
            let Some(subscription) = self.subscriptions.get_mut(&id) else { continue };
            subscription.ended = event.is_last();
            if let (Event::Waiting { .. }, Some(Event::Waiting { .. })) =
                (&event, subscription.backlog.back())
            {
                // Only the newest place matters.
                subscription.backlog.pop_back();
            }
            subscription.backlog.push_back(event);
            if !subscription.deliver() {
                self.core.hold(id, true, self.clock.now());
            }
            self.remove_if_closed(id);
        }
    }

    /// Sends buffered events to the receivers that have room.
    fn deliver(&mut self) {
        let waiting: Vec<RequestId> = self
            .subscriptions
            .iter()
            .filter(|(_, subscription)| !subscription.backlog.is_empty())
            .map(|(id, _)| *id)
            .collect();
        for id in waiting {
            let Some(subscription) = self.subscriptions.get_mut(&id) else { continue };
            if subscription.deliver() {
                self.core.hold(id, false, self.clock.now());
            }
            self.remove_if_closed(id);
        }
    }

    fn remove_if_closed(&mut self, id: RequestId) {
        let is_closed =
            |subscription: &Subscription| subscription.events.is_closed() && subscription.backlog.is_empty();
        if self.subscriptions.get(&id).is_some_and(is_closed)
            && let Some(subscription) = self.subscriptions.remove(&id)
        {
            self.tickets.remove(&subscription.ticket);
            if !subscription.ended {
                // The receiver was dropped, and the backlog shows that before its cancel command is read.
                self.core.hold(id, false, self.clock.now());
                self.core.cancel(id, self.clock.now(), &mut |_, _| {});
            }
        }
    }
}

impl Subscription {
    /// Sends what fits. Returns whether nothing is left.
    fn deliver(&mut self) -> bool {
        while let Some(event) = self.backlog.pop_front() {
            let last = event.is_last();
            match self.events.try_send(event) {
                Ok(()) if last => {
                    self.events.close();
                }
                Ok(()) => {}
                // The receiver was dropped.
                Err(TrySendError::Closed(_)) => self.backlog.clear(),
                Err(TrySendError::Full(event)) => {
                    self.backlog.push_front(event);
                    return false;
                }
            }
        }
        true
    }
}
