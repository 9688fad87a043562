//! The engine: a thread around a host, and the stream of each request's events.

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
use firebox_text::panic_message;
use futures_core::Stream;

use crate::engine::clock::{Clock, WallClock};
use crate::engine::event::{Event, Outcome};
use crate::engine::host::{Host, HostConfig, Worked};
use crate::engine::request::Request;
use crate::engine::sequence::RequestId;
use crate::thermal::{self, Thermometer};
use crate::{Model, RuntimeError};

/// Events of a request that nobody has taken yet; with more, it waits until somebody does.
const BACKLOG: usize = 64;
/// From one look to the next whether somebody takes what a request says.
const BACKLOG_CHECK: Duration = Duration::from_millis(2);
/// From one look to the next whether the disk has brought what was waited for.
const DISK_CHECK: Duration = Duration::from_micros(200);

/// From one look at the thermometer to the next.
const HEAT_CHECK: Duration = Duration::from_secs(1);

/// Commands that are obeyed between two layers.
const COMMANDS: usize = 16;

/// Answers requests of several models at once, on a thread of its own. Clones are the same engine; it ends with the last of
/// them; whoever waits for an answer has one.
///
/// ```no_run
/// # fn main() -> Result<(), firebox_runtime::RuntimeError> {
/// use firebox_runtime::engine::{Engine, Event, HostConfig, Request};
/// use firebox_runtime::{Model, device};
///
/// let engine = Engine::start(HostConfig::default())?;
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
    Host(Box<dyn FnOnce(&mut Host) + Send>),
    Thermometer(Box<Thermometer>),
    End,
}

impl Engine {
    /// Begins, without any model.
    pub fn start(config: HostConfig) -> Result<Self, RuntimeError> {
        let (commands, received) = channel();
        let host = Host::new(config)?;
        let running = move || Running::new(host, received).run();
        // A machine that has no thread left refuses every request instead.
        let thread = thread::Builder::new().name("firebox-engine".into()).spawn(running).ok();
        Ok(Self(Arc::new(Handle { commands, thread })))
    }

    /// Takes a model in.
    pub fn add(&self, name: &str, model: Model) -> Result<(), RuntimeError> {
        let name = name.to_owned();
        self.with_host(move |host| host.add(&name, model))?
    }

    /// Takes a model in that is opened when somebody asks for it: see [`Host::add_later`].
    pub fn add_later(
        &self,
        name: &str,
        open: impl Fn() -> Result<Model, RuntimeError> + Send + Sync + 'static,
    ) -> Result<(), RuntimeError> {
        let name = name.to_owned();
        self.with_host(move |host| host.add_later(&name, open))?
    }

    /// Lets go of a model. Requests that it has end as failed.
    pub fn remove(&self, name: &str) -> Result<(), RuntimeError> {
        let (done, removed) = channel();
        self.send(Command::Remove { name: name.to_owned(), done })?;
        removed.recv().map_err(|_| RuntimeError::EngineOver)?
    }

    /// Has it follow another thermometer than the system's: fewer requests run together when it is hot, for shorter.
    pub fn set_thermometer(&self, thermometer: Thermometer) -> Result<(), RuntimeError> {
        self.send(Command::Thermometer(Box::new(thermometer)))
    }

    /// Does something with the host between two layers, and waits for it. A panic ends what is done, and not the engine. What
    /// it does must not call the engine and wait: that would be for itself.
    pub fn with_host<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Host) -> R + Send + 'static,
    ) -> Result<R, RuntimeError> {
        let (done, result) = channel();
        self.send(Command::Host(Box::new(move |host| {
            // Models are taken in and let go of as a whole, so that none is left half there.
            drop(done.send(catch_unwind(AssertUnwindSafe(|| act(host)))));
        })))?;
        let acted = result.recv().map_err(|_| RuntimeError::EngineOver)?;
        acted.map_err(|panic| RuntimeError::Panicked { reason: panic_message(&*panic).to_owned() })
    }

    /// Asks for an answer. What is wrong with the request is told by the answer's first event, which is then its last.
    pub fn generate(&self, request: Request) -> Answering {
        static TICKETS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let ticket = TICKETS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (events, received) = async_channel::bounded(BACKLOG);
        let submitted = self.send(Command::Submit { request: Box::new(request), ticket, events });
        Answering {
            received: Box::pin(received),
            ticket,
            engine: self.clone(),
            over: submitted.is_err(),
            told: false,
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

/// The events of one request, as a [`Stream`] for any executor and as an iterator that waits. Dropping it cancels the
/// request.
#[derive(Debug)]
pub struct Answering {
    received: Pin<Box<async_channel::Receiver<Event>>>,
    ticket: u64,
    engine: Engine,
    /// Whether nothing comes any more.
    over: bool,
    told: bool,
}

impl Answering {
    /// Waits for the end, and returns what it came to.
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

    /// Ends the request where it is. Its last events still come.
    pub fn cancel(&self) {
        let _ = self.engine.send(Command::Cancel { ticket: self.ticket });
    }

    fn note(&mut self, event: Option<Event>) -> Option<Event> {
        match event {
            Some(event) => {
                self.over = event.is_last();
                self.told |= self.over;
                Some(event)
            }
            None => {
                // An engine that ended says nothing more, and its requests have ended with it.
                self.over = true;
                let over = || Event::Failed(RuntimeError::EngineOver.into());
                (!std::mem::replace(&mut self.told, true)).then(over)
            }
        }
    }
}

impl Iterator for Answering {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let event = if self.over { None } else { self.received.recv_blocking().ok() };
        self.note(event)
    }
}

impl Stream for Answering {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let event =
            if self.over { None } else { std::task::ready!(self.received.as_mut().poll_next(context)) };
        Poll::Ready(self.note(event))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        if !self.over {
            self.cancel();
        }
    }
}

/// The thread of an engine.
struct Running {
    host: Host,
    commands: Receiver<Command>,
    clock: WallClock,
    asking: HashMap<RequestId, Asking>,
    tickets: HashMap<u64, RequestId>,
    /// None where nobody says how hot it is.
    thermometer: Option<Thermometer>,
    /// When it is looked at next.
    next_look: Duration,
}

/// Who waits for the events of a request.
struct Asking {
    ticket: u64,
    events: async_channel::Sender<Event>,
    /// What was said and not taken.
    backlog: VecDeque<Event>,
    /// Whether nothing more will be said.
    ended: bool,
}

impl Running {
    fn new(host: Host, commands: Receiver<Command>) -> Self {
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
            let mut told = Vec::new();
            let worked = self.host.work(&self.clock, &mut |id, event| told.push((id, event)));
            self.tell(told);
            let pause = match worked {
                Worked::Layer { .. } => continue,
                Worked::Waiting => Some(DISK_CHECK),
                Worked::Idle => {
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

    /// Looks how hot it is, from time to time.
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
                    let (now, mut told) = (self.clock.now(), Vec::new());
                    self.host.hold(id, false, self.clock.now());
                    self.host.cancel(id, now, &mut |id, event| told.push((id, event)));
                    self.tell(told);
                }
            }
            Command::Remove { name, done } => {
                let mut told = Vec::new();
                let removed = self.host.remove(&name, &mut |id, event| told.push((id, event)));
                self.tell(told);
                drop(done.send(removed.map(drop)));
            }
            Command::Host(act) => {
                act(&mut self.host);
                // What it ended was told to it and not to those who asked.
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

    fn tell(&mut self, told: Vec<(RequestId, Event)>) {
        for (id, event) in told {
            let Some(asking) = self.asking.get_mut(&id) else { continue };
            asking.ended = event.is_last();
            if let (Event::Waiting { .. }, Some(Event::Waiting { .. })) = (&event, asking.backlog.back()) {
                // Only the newest place is of any use.
                asking.backlog.pop_back();
            }
            asking.backlog.push_back(event);
            if !asking.deliver() {
                self.host.hold(id, true, self.clock.now());
            }
            self.forget_if_over(id);
        }
    }

    /// Hands out what has not been taken.
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
                // Whoever asked is gone, and is noticed before what it says of that is read.
                self.host.hold(id, false, self.clock.now());
                self.host.cancel(id, self.clock.now(), &mut |_, _| {});
            }
        }
    }
}

impl Asking {
    /// Hands out what it can. Whether nothing is left.
    fn deliver(&mut self) -> bool {
        while let Some(event) = self.backlog.pop_front() {
            let last = event.is_last();
            match self.events.try_send(event) {
                Ok(()) if last => {
                    self.events.close();
                }
                Ok(()) => {}
                // Whoever asked is gone.
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
