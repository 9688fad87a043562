//! The setup of a request: its head is loaded and its grammar compiled before it is queued.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use firebox_runtime::decode::OutputState;
use firebox_runtime::heads::HeadPool;
use firebox_runtime::session::FetchedHead;
use firebox_runtime::{GenerationConfig, OWN_HEAD, RuntimeError, Session, Speculation};
use firebox_schedule::{Task, Ticket};
use firebox_telemetry::Meters;
use firebox_text::Tokenizer;

use crate::error::EngineError;
use crate::event::Failure;
use crate::sequence::RequestId;
use crate::shield::shielded;

/// The session and the prompt of a request. They stay with the engine during the setup, so that the session can
/// be returned unchanged if that fails.
#[derive(Debug)]
pub(crate) struct RequestParts {
    pub session: Box<Session>,
    pub prompt: Vec<u32>,
    pub speculation: Option<Speculation>,
}

/// The work before a request is queued that may take long: loading a head that is not resident, and compiling a
/// grammar, for the first of which the whole vocabulary is sorted.
pub(crate) struct SetupTask {
    pool: Option<HeadPool>,
    meters: Arc<Meters>,
    device: Device,
    head: Option<String>,
    config: GenerationConfig,
    tokenizer: Option<Arc<Tokenizer>>,
}

/// The result of a setup.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// The head, if the request names one.
    fetched: Option<FetchedHead>,
    output: OutputState,
}

/// A request that can be queued.
#[derive(Debug)]
pub(crate) struct Ready {
    pub session: Box<Session>,
    pub prompt: Vec<u32>,
    pub speculation: Option<Speculation>,
    pub output: OutputState,
}

/// A request that is being set up while the engine runs others.
#[derive(Debug)]
pub(crate) struct RequestSetup {
    pub id: RequestId,
    pub ticket: Ticket,
    pub task: Task,
    pub parts: RequestParts,
    pub scope: String,
    pub since: Duration,
    /// When it fails unless its first token is out.
    pub fail_at: Option<Duration>,
    pub cancelled: bool,
    prepared: Receiver<Result<Prepared, EngineError>>,
}

impl RequestParts {
    /// Applies the result of the setup, or refuses the request and restores the session's head.
    pub fn with(self, prepared: Result<Prepared, EngineError>) -> Result<Ready, Box<Failure>> {
        let Self { mut session, prompt, speculation } = self;
        let selection = session.head_selection();
        let device = session.decoder().device().clone();
        let configured = prepared.and_then(|Prepared { fetched, output }| {
            shielded(&device, || {
                if let Some(fetched) = fetched {
                    session.switch_head(fetched);
                }
                session.check_generates()?;
                Ok(output)
            })
        });
        match configured {
            Ok(output) => Ok(Ready { session, prompt, speculation, output }),
            Err(error) => {
                session.restore_head(selection);
                Err(Self { session, prompt, speculation }.refused(error))
            }
        }
    }

    /// Fails the request and returns its session.
    pub fn refused(self, error: EngineError) -> Box<Failure> {
        Box::new(Failure { error, session: Some(self.session) })
    }
}

impl SetupTask {
    /// The setup of an answer in `session`.
    pub fn new(
        session: &Session,
        head: Option<String>,
        config: GenerationConfig,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Self {
        let (pool, meters) = (session.heads().cloned(), session.meters().clone());
        Self { pool, meters, device: session.decoder().device().clone(), head, config, tokenizer }
    }

    /// Returns whether the setup may take long enough to delay other requests. If finding out panics, it is
    /// assumed to, and `run` reports the panic to the request.
    pub fn takes_long(&self) -> bool {
        let is_resident =
            |head: &String| head == OWN_HEAD || self.pool.as_ref().is_none_or(|pool| pool.is_resident(head));
        let takes_long =
            || Ok(self.config.grammar.is_some() || self.head.as_ref().is_some_and(|head| !is_resident(head)));
        shielded(&self.device, takes_long).unwrap_or(true)
    }

    /// Prepares the request, however long that takes.
    pub fn run(self) -> Result<Prepared, EngineError> {
        let Self { pool, meters, device, head, config, tokenizer } = self;
        shielded(&device, || {
            let fetched = head.map(|name| fetch(&name, pool.as_ref(), &meters)).transpose()?;
            Ok(Prepared { fetched, output: OutputState::new(config, tokenizer)? })
        })
    }

    /// Runs on a thread of its own, or on the calling one if none can be spawned.
    pub fn begin(self) -> Receiver<Result<Prepared, EngineError>> {
        let (done, prepared) = channel();
        let ((sender, receiver), done_here) = (channel(), done.clone());
        let on_thread = move || {
            if let Ok(task) = receiver.recv() {
                let task: Self = task;
                let _ = done.send(task.run());
            }
        };
        match thread::Builder::new().name("firebox-prepare".into()).spawn(on_thread) {
            Ok(_) => drop(sender.send(self)),
            Err(_) => drop(done_here.send(self.run())),
        }
        prepared
    }
}

/// Fetches a head. A fallback is an error, because the request named the head.
fn fetch(name: &str, pool: Option<&HeadPool>, meters: &Meters) -> Result<FetchedHead, EngineError> {
    let fetched = FetchedHead::fetch(name, pool, meters);
    match fetched.switch.fallback_reason {
        Some(source) => Err(EngineError::HeadUnavailable { name: name.into(), source }),
        None => Ok(fetched),
    }
}

impl RequestSetup {
    pub fn new(
        (id, ticket, task): (RequestId, Ticket, Task),
        parts: RequestParts,
        scope: String,
        since: Duration,
        fail_at: Option<Duration>,
        setup: SetupTask,
    ) -> Self {
        let prepared = setup.begin();
        Self { id, ticket, task, parts, scope, since, fail_at, cancelled: false, prepared }
    }

    /// Returns the result once there is one or the deadline has passed. `model` is named in the error.
    pub fn outcome(&self, model: &str, now: Duration) -> Option<Result<Prepared, EngineError>> {
        if self.fail_at.is_some_and(|fail_at| now >= fail_at) {
            return Some(Err(EngineError::Late { model: model.into() }));
        }
        match self.prepared.try_recv() {
            Ok(prepared) => Some(prepared),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                let reason = "the thread that prepares a request is gone".into();
                Some(Err(RuntimeError::Threads { reason }.into()))
            }
        }
    }
}
