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
use crate::event::{Event, Outcome};
use crate::request::Request;
use crate::sequence::RequestId;

/// Events of a request that are buffered; when the buffer is full, the request pauses.
const BACKLOG: usize = 64;
/// Interval at which a full buffer is checked for room.
const BACKLOG_CHECK: Duration = Duration::from_millis(2);
/// Interval at which the host is polled while weights are being loaded.
const DISK_CHECK: Duration = Duration::from_micros(200);

/// Interval between two readings of the thermometer.
const HEAT_CHECK: Duration = Duration::from_secs(1);

/// The most commands that are executed between two layers.
const COMMANDS: usize = 16;

/// Answers requests of several models at once, on a thread of its own. Clones share the engine, which ends with the
/// last of them. Each [`ResponseStream`] holds a clone.
///
/// ```no_run
/// # fn main() -> Result<(), firebox_runtime::RuntimeError> {
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
    Remove { name: String, done: Sender<Result<(), RuntimeError>> },
    Host(Box<dyn FnOnce(&mut EngineCore) + Send>),
    Thermometer(Box<Thermometer>),
    End,
}

impl Engine {
    /// Starts an engine without models.
    pub fn start(config: EngineConfig) -> Result<Self, RuntimeError> {
        let (commands, received) = channel();
        let host = EngineCore::new(config)?;
        let running = move || Running::new(host, received).run();
        // If the thread fails to spawn, every request is refused.
        let thread = thread::Builder::new().name("firebox-engine".into()).spawn(running).ok();
        Ok(Self(Arc::new(Handle { commands, thread })))
    }

    /// Adds a model.
    pub fn add(&self, name: &str, model: Model) -> Result<(), RuntimeError> {
        let name = name.to_owned();
        self.with_host(move |host| host.add(&name, model))?
    }

    /// Adds a model that is opened on its first request; see [`EngineCore::add_later`].
    pub fn add_later(
        &self,
        name: &str,
        open: impl Fn() -> Result<Model, RuntimeError> + Send + Sync + 'static,
    ) -> Result<(), RuntimeError> {
        let name = name.to_owned();
        self.with_host(move |host| host.add_later(&name, open))?
    }

    /// Removes a model. Its requests fail.
    pub fn remove(&self, name: &str) -> Result<(), RuntimeError> {
        let (done, removed) = channel();
        self.send(Command::Remove { name: name.to_owned(), done })?;
        removed.recv().map_err(|_| RuntimeError::EngineOver)?
    }

    /// Replaces the system's thermometer. The hotter, the fewer requests run together and the shorter the quanta.
    pub fn set_thermometer(&self, thermometer: Thermometer) -> Result<(), RuntimeError> {
        self.send(Command::Thermometer(Box::new(thermometer)))
    }

    /// Calls `act` with the host between two layers, and waits for the result. A panic is returned as an error. `act`
    /// must not call the engine and wait, which would deadlock.
    pub fn with_host<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut EngineCore) -> R + Send + 'static,
    ) -> Result<R, RuntimeError> {
        let (done, result) = channel();
        self.send(Command::Host(Box::new(move |host| {
            // Unwind safety: models are added and removed as a whole.
            drop(done.send(catch_unwind(AssertUnwindSafe(|| act(host)))));
        })))?;
        let acted = result.recv().map_err(|_| RuntimeError::EngineOver)?;
        acted.map_err(|panic| RuntimeError::Panicked { reason: panic_message(&*panic).to_owned() })
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
            over: submitted.is_err(),
            sink: false,
        }
    }

    fn send(&self, command: Command) -> Result<(), RuntimeError> {
        let sent = self.0.thread.is_some().then(|| self.0.commands.send(command).ok()).flatten();
        sent.ok_or(RuntimeError::EngineOver)
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
    over: bool,
    sink: bool,
}

impl ResponseStream {
    /// Waits for the end and returns the result.
    pub fn wait(self) -> Result<Outcome, RuntimeError> {
        for event in self {
            match event {
                Event::Finished(outcome) => return Ok(*outcome),
                Event::Failed(failure) => return Err(failure.error),
                Event::Waiting { .. } | Event::Piece(_) => {}
            }
        }
        Err(RuntimeError::EngineOver)
    }

    /// Cancels the request. Its last events still follow.
    pub fn cancel(&self) {
        let _ = self.engine.send(Command::Cancel { ticket: self.ticket });
    }

    fn note(&mut self, event: Option<Event>) -> Option<Event> {
        match event {
            Some(event) => {
                self.over = event.is_last();
                self.sink |= self.over;
                Some(event)
            }
            None => {
                // The engine has ended, and the request with it.
                self.over = true;
                let over = || Event::Failed(RuntimeError::EngineOver.into());
                (!std::mem::replace(&mut self.sink, true)).then(over)
            }
        }
    }
}

impl Iterator for ResponseStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let event = if self.over { None } else { self.received.recv_blocking().ok() };
        self.note(event)
    }
}

impl Stream for ResponseStream {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let event =
            if self.over { None } else { std::task::ready!(self.received.as_mut().poll_next(context)) };
        Poll::Ready(self.note(event))
    }
}

impl Drop for ResponseStream {
    fn drop(&mut self) {
        if !self.over {
            self.cancel();
        }
    }
}

/// The state of an engine's thread.
struct Running {
    host: EngineCore,
    commands: Receiver<Command>,
    clock: WallClock,
    asking: HashMap<RequestId, Asking>,
    tickets: HashMap<u64, RequestId>,
    /// `None` if the system has no thermometer.
    thermometer: Option<Thermometer>,
    /// When the thermometer is read next.
    next_look: Duration,
}

/// The receiver of a request's events.
struct Asking {
    ticket: u64,
    events: async_channel::Sender<Event>,
    /// Events that did not fit into the channel.
    backlog: VecDeque<Event>,
    /// Whether the last event is out.
    ended: bool,
}

impl Running {
    fn new(host: EngineCore, commands: Receiver<Command>) -> Self {
        Self {
            host,
            commands,
            clock: WallClock::default(),
            asking: HashMap::new(),
            tickets: HashMap::new(),
            thermometer: thermal::system().map(Thermometer::new),
            next_look: Duration::ZERO,
        }
    }

    fn run(mut self) {
        loop {
            for _ in 0..COMMANDS {
                match self.commands.try_recv() {
                    Ok(Command::End) | Err(TryRecvError::Disconnected) => return,
                    Ok(command) => self.obey(command),
                    Err(TryRecvError::Empty) => break,
                }
            }
            self.deliver();
            self.feel();
            let mut sink = Vec::new();
            let worked = self.host.work(&self.clock, &mut |id, event| sink.push((id, event)));
            self.tell(sink);
            let pause = match worked {
                StepOutcome::Layer { .. } => continue,
                StepOutcome::Waiting => Some(DISK_CHECK),
                StepOutcome::Idle => {
                    self.asking.values().any(|asking| !asking.backlog.is_empty()).then_some(BACKLOG_CHECK)
                }
            };
            let command = match pause {
                Some(pause) => self.commands.recv_timeout(pause),
                None => self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match command {
                Ok(Command::End) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(command) => self.obey(command),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Reads the thermometer if it is time to.
    fn feel(&mut self) {
        let now = self.clock.now();
        let Some(thermometer) = self.thermometer.as_mut().filter(|_| self.next_look <= now) else { return };
        self.next_look = now + HEAT_CHECK;
        let before = thermometer.heat();
        let heat = thermometer.read();
        if heat != before {
            self.host.set_heat(heat);
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit { request, ticket, events } => {
                let now = self.clock.now();
                match self.host.submit(*request, now) {
                    Ok(id) => {
                        self.tickets.insert(ticket, id);
                        self.asking
                            .insert(id, Asking { ticket, events, backlog: VecDeque::new(), ended: false });
                    }
                    Err(failure) => drop(events.try_send(Event::Failed(failure))),
                }
            }
            Command::Cancel { ticket } => {
                if let Some(&id) = self.tickets.get(&ticket) {
                    let (now, mut sink) = (self.clock.now(), Vec::new());
                    self.host.hold(id, false, self.clock.now());
                    self.host.cancel(id, now, &mut |id, event| sink.push((id, event)));
                    self.tell(sink);
                }
            }
            Command::Remove { name, done } => {
                let mut sink = Vec::new();
                let removed = self.host.remove(&name, &mut |id, event| sink.push((id, event)));
                self.tell(sink);
                drop(done.send(removed.map(drop)));
            }
            Command::Host(act) => {
                act(&mut self.host);
                // Events that `act` caused went to its own sink and not to the receivers.
                let gone = self.asking.iter().filter(|(id, asking)| !asking.ended && !self.host.knows(**id));
                let gone: Vec<RequestId> = gone.map(|(id, _)| *id).collect();
                let over = |id| (id, Event::Failed(RuntimeError::EngineOver.into()));
                self.tell(gone.into_iter().map(over).collect());
            }
            Command::Thermometer(thermometer) => {
                self.host.set_heat(thermometer.heat());
                self.thermometer = Some(*thermometer);
                self.next_look = Duration::ZERO;
            }
            Command::End => {}
        }
    }

    fn tell(&mut self, sink: Vec<(RequestId, Event)>) {
        for (id, event) in sink {
            let Some(asking) = self.asking.get_mut(&id) else { continue };
            asking.ended = event.is_last();
            if let (Event::Waiting { .. }, Some(Event::Waiting { .. })) = (&event, asking.backlog.back()) {
                // Only the newest place matters.
                asking.backlog.pop_back();
            }
            asking.backlog.push_back(event);
            if !asking.deliver() {
                self.host.hold(id, true, self.clock.now());
            }
            self.forget_if_over(id);
        }
    }

    /// Sends buffered events to the receivers that have room.
    fn deliver(&mut self) {
        let behind: Vec<RequestId> =
            self.asking.iter().filter(|(_, asking)| !asking.backlog.is_empty()).map(|(id, _)| *id).collect();
        for id in behind {
            let Some(asking) = self.asking.get_mut(&id) else { continue };
            if asking.deliver() {
                self.host.hold(id, false, self.clock.now());
            }
            self.forget_if_over(id);
        }
    }

    fn forget_if_over(&mut self, id: RequestId) {
        let over = |asking: &Asking| asking.events.is_closed() && asking.backlog.is_empty();
        if self.asking.get(&id).is_some_and(over)
            && let Some(asking) = self.asking.remove(&id)
        {
            self.tickets.remove(&asking.ticket);
            if !asking.ended {
                // The receiver was dropped, and the backlog shows that before its cancel command is read.
                self.host.hold(id, false, self.clock.now());
                self.host.cancel(id, self.clock.now(), &mut |_, _| {});
            }
        }
    }
}

impl Asking {
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
