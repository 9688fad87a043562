//! The loop of an engine's thread: it executes commands, runs the core and delivers events.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::Duration;

use async_channel::TrySendError;
use firebox_memory::thermal::{self, Thermometer};
use firebox_text::panic_message;

use crate::clock::Clock;
use crate::engine_core::{EngineCore, StepOutcome};
use crate::error::EngineError;
use crate::event::Event;
use crate::heartbeat::Heartbeat;
use crate::on_failure::OnFailure;
use crate::request::Request;
use crate::sequence::RequestId;

/// Interval at which a full buffer is checked for room.
const BACKLOG_CHECK: Duration = Duration::from_millis(2);
/// Interval at which the core is polled while weights are being loaded.
const DISK_CHECK: Duration = Duration::from_micros(200);

/// Interval between two readings of the thermometer.
const HEAT_CHECK: Duration = Duration::from_secs(1);

/// The most commands that are executed between two layers.
const COMMANDS: usize = 16;

/// A command to an engine's thread.
pub(crate) enum Command {
    /// A request, with the ticket and the receiver of each choice.
    Submit {
        request: Box<Request>,
        choices: Vec<(u64, async_channel::Sender<Event>)>,
    },
    Cancel {
        ticket: u64,
    },
    Remove {
        name: String,
        done: Sender<Result<(), EngineError>>,
    },
    WithCore(Box<dyn FnOnce(&mut EngineCore) + Send>),
    Thermometer(Box<Thermometer>),
    End,
}

/// The state of an engine's thread.
pub(crate) struct EngineThread {
    core: EngineCore,
    commands: Receiver<Command>,
    clock: Arc<dyn Clock>,
    heartbeat: Arc<Heartbeat>,
    /// Events that are not yet with their subscriptions.
    outbox: VecDeque<(RequestId, Event)>,
    /// The receivers of a request that is being submitted.
    submitting: Vec<async_channel::Sender<Event>>,
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
    /// Since when the receiver has taken nothing while its buffer is full.
    stalled_since: Option<Duration>,
    /// Whether the last event is out.
    ended: bool,
}

impl EngineThread {
    pub fn new(core: EngineCore, commands: Receiver<Command>, heartbeat: Arc<Heartbeat>) -> Self {
        Self {
            clock: core.config().clock.clone(),
            core,
            commands,
            heartbeat,
            outbox: VecDeque::new(),
            submitting: Vec::new(),
            subscriptions: HashMap::new(),
            tickets: HashMap::new(),
            thermometer: thermal::system().map(Thermometer::new),
            next_reading: Duration::ZERO,
        }
    }

    /// Runs until the last handle of the engine is dropped, or until a failure ends the engine.
    pub fn run(mut self) {
        let _ending = Ending(self.heartbeat.clone());
        // Unwind safety: `recover` fails all requests and replaces what they ran in.
        while let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.serve())) {
            let ends = self.core.config().on_failure == OnFailure::End;
            if !self.recover(panic_message(&*panic)) || ends {
                return;
            }
        }
    }

    fn serve(&mut self) {
        loop {
            self.heartbeat.beat();
            for _ in 0..COMMANDS {
                match self.commands.try_recv() {
                    Ok(Command::End) | Err(TryRecvError::Disconnected) => return,
                    Ok(command) => self.execute(command),
                    Err(TryRecvError::Empty) => break,
                }
            }
            self.read_thermometer();
            let pause = match self.work() {
                StepOutcome::Layer { .. } => continue,
                StepOutcome::Waiting => Some(DISK_CHECK),
                StepOutcome::Idle => self
                    .subscriptions
                    .values()
                    .any(|subscription| !subscription.backlog.is_empty())
                    .then_some(BACKLOG_CHECK),
            };
            self.heartbeat.rest();
            let command = match pause {
                Some(pause) => self.commands.recv_timeout(pause),
                None => self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            self.heartbeat.beat();
            match command {
                Ok(Command::End) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(command) => self.execute(command),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Fails all requests after a panic, and starts the core again. Returns whether that succeeded.
    fn recover(&mut self, reason: &str) -> bool {
        self.heartbeat.failed(reason);
        let error = || EngineError::EngineFailed { reason: reason.to_owned() };
        for events in self.submitting.drain(..) {
            drop(events.try_send(Event::Failed(error().into())));
        }
        let outbox = &mut self.outbox;
        let mut restart = || self.core.restart(&error, &mut |id, event| outbox.push_back((id, event)));
        let restarted = catch_unwind(AssertUnwindSafe(&mut restart));
        // Requests that the core no longer knows have lost their sessions.
        let failed = self.subscriptions.keys().map(|id| (*id, Event::Failed(error().into())));
        self.outbox.extend(failed);
        while !self.outbox.is_empty() {
            // Each call takes at least one event from the outbox.
            drop(catch_unwind(AssertUnwindSafe(|| self.dispatch())));
        }
        matches!(restarted, Ok(Ok(())))
    }

    /// Delivers events that have room now, and runs a layer.
    pub fn work(&mut self) -> StepOutcome {
        self.deliver();
        self.fail_stalled();
        let outbox = &mut self.outbox;
        let outcome = self.core.work(&*self.clock, &mut |id, event| outbox.push_back((id, event)));
        self.dispatch();
        outcome
    }

    /// Fails the requests whose events have not been read for too long.
    fn fail_stalled(&mut self) {
        let Some(after) = self.core.config().stall_timeout else { return };
        let now = self.clock.now();
        let is_stalled = |subscription: &Subscription| {
            let since = subscription.stalled_since.filter(|_| !subscription.ended);
            since.is_some_and(|since| now.saturating_sub(since) >= after)
        };
        let stalled = self.subscriptions.iter().filter(|(_, subscription)| is_stalled(subscription));
        let stalled: Vec<RequestId> = stalled.map(|(id, _)| *id).collect();
        let outbox = &mut self.outbox;
        for id in stalled {
            self.core.fail_stalled(id, after, now, &mut |id, event| outbox.push_back((id, event)));
        }
        self.dispatch();
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

    pub fn execute(&mut self, command: Command) {
        match command {
            Command::Submit { request, choices } => {
                self.submitting = choices.iter().map(|(_, events)| events.clone()).collect();
                let submitted = self.core.submit_choices(*request, choices.len(), self.clock.now());
                self.submitting.clear();
                match submitted {
                    Ok(ids) => {
                        for (id, (ticket, events)) in ids.into_iter().zip(choices) {
                            self.tickets.insert(ticket, id);
                            self.subscriptions.insert(id, Subscription::new(ticket, events));
                        }
                    }
                    Err(failure) => {
                        let failures = failure.of_choices(choices.len());
                        for ((_, events), failure) in choices.into_iter().zip(failures) {
                            drop(events.try_send(failure));
                        }
                    }
                }
            }
            Command::Cancel { ticket } => {
                if let Some(&id) = self.tickets.get(&ticket) {
                    let (now, outbox) = (self.clock.now(), &mut self.outbox);
                    self.core.hold(id, false, now);
                    self.core.cancel(id, now, &mut |id, event| outbox.push_back((id, event)));
                    self.dispatch();
                }
            }
            Command::Remove { name, done } => {
                let outbox = &mut self.outbox;
                let removed = self.core.remove(&name, &mut |id, event| outbox.push_back((id, event)));
                self.dispatch();
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
                self.outbox.extend(gone.into_iter().map(failure));
                self.dispatch();
            }
            Command::Thermometer(thermometer) => {
                self.core.set_heat(thermometer.heat());
                self.thermometer = Some(*thermometer);
                self.next_reading = Duration::ZERO;
            }
            Command::End => {}
        }
    }

    /// Passes the events of the outbox to their subscriptions. The last event of a request is its first last one.
    fn dispatch(&mut self) {
        while let Some((id, event)) = self.outbox.pop_front() {
            let subscription = self.subscriptions.get_mut(&id).filter(|subscription| !subscription.ended);
            let Some(subscription) = subscription else { continue };
            subscription.ended = event.is_last();
            if let (Event::Waiting { .. }, Some(Event::Waiting { .. })) =
                (&event, subscription.backlog.back())
            {
                // Only the newest place matters.
                subscription.backlog.pop_back();
            }
            subscription.backlog.push_back(event);
            if !subscription.deliver(self.clock.now()) {
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
            if subscription.deliver(self.clock.now()) {
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

/// Marks the engine as ended when its thread does, however that comes about.
struct Ending(Arc<Heartbeat>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.ended();
    }
}

impl Subscription {
    fn new(ticket: u64, events: async_channel::Sender<Event>) -> Self {
        Self { ticket, events, backlog: VecDeque::new(), stalled_since: None, ended: false }
    }

    /// Sends what fits. Returns whether nothing is left.
    fn deliver(&mut self, now: Duration) -> bool {
        let before = self.stalled_since.take();
        let mut has_sent = false;
        while let Some(event) = self.backlog.pop_front() {
            let last = event.is_last();
            match self.events.try_send(event) {
                Ok(()) => {
                    has_sent = true;
                    if last {
                        self.events.close();
                    }
                }
                // The receiver was dropped.
                Err(TrySendError::Closed(_)) => self.backlog.clear(),
                Err(TrySendError::Full(event)) => {
                    self.backlog.push_front(event);
                    self.stalled_since = before.filter(|_| !has_sent).or(Some(now));
                    return false;
                }
            }
        }
        true
    }
}
