//! The setup of a request: its head is loaded and its grammar compiled before it is queued.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use firebox_memory::process::lower_thread_priority;
use firebox_runtime::decode::OutputState;
use firebox_runtime::heads::HeadPool;
use firebox_runtime::session::FetchedHead;
use firebox_runtime::{
    CompilePermit, CompiledGrammar, GenerationConfig, GrammarCache, Model, OWN_HEAD, RequestGrammar,
    RuntimeError, Session,
};
use firebox_schedule::{Client, Task, Ticket};
use firebox_telemetry::Meters;

use crate::error::EngineError;
use crate::event::Failure;
use crate::sequence::RequestId;
use crate::shield::shielded;

/// A request that the queue has admitted.
#[derive(Debug)]
pub(crate) struct AdmittedRequest {
    /// Its choices, each with a place in the queue.
    pub choices: Vec<(RequestId, Ticket)>,
    pub task: Task,
    pub scope: String,
    pub client: Client,
    /// Whether its choices draft by lookup.
    pub lookup: Option<bool>,
    pub since: Duration,
    /// When it fails unless its first token is out.
    pub fail_at: Option<Duration>,
}

/// The session and the prompt of a request. They stay with the engine during the setup, so that the session can
/// be returned unchanged if that fails.
#[derive(Debug)]
pub(crate) struct RequestParts {
    pub session: Box<Session>,
    pub prompt: Arc<[u32]>,
}

/// The work before a request is queued that may take long: loading a head that is not resident, and compiling a
/// grammar, for the first of which the whole vocabulary is sorted.
#[derive(Debug)]
pub(crate) struct SetupTask {
    pool: Option<HeadPool>,
    meters: Arc<Meters>,
    device: Device,
    head: Option<String>,
    config: GenerationConfig,
    compiled: Option<CompiledGrammar>,
    choices: usize,
    model: Model,
    grammars: Arc<GrammarCache>,
}

/// The result of a setup.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// The head, if the request names one.
    fetched: Option<FetchedHead>,
    /// The output of each choice.
    outputs: Vec<OutputState>,
}

/// A request that can be queued.
#[derive(Debug)]
pub(crate) struct Ready {
    pub session: Box<Session>,
    pub prompt: Arc<[u32]>,
    /// The output of each choice.
    pub outputs: Vec<OutputState>,
}

/// A request that is being set up while the engine runs others.
#[derive(Debug)]
pub(crate) struct RequestSetup {
    pub request: AdmittedRequest,
    pub parts: RequestParts,
    /// Choices to cancel once it is prepared.
    pub cancelled: Vec<RequestId>,
    state: SetupState,
}

#[derive(Debug)]
enum SetupState {
    /// It waits while as many grammars are compiled as may be.
    Waiting(Box<SetupTask>),
    Running(Receiver<Result<Prepared, EngineError>>),
}

impl RequestParts {
    /// Applies the result of the setup, or refuses the request and restores the session's head.
    pub fn with(self, prepared: Result<Prepared, EngineError>) -> Result<Ready, Box<Failure>> {
        let Self { mut session, prompt } = self;
        let selection = session.head_selection();
        let device = session.decoder().device().clone();
        let configured = prepared.and_then(|Prepared { fetched, outputs }| {
            shielded(&device, || {
                if let Some(fetched) = fetched {
                    session.switch_head(fetched);
                }
                session.check_generates()?;
                Ok(outputs)
            })
        });
        match configured {
            Ok(outputs) => Ok(Ready { session, prompt, outputs }),
            Err(error) => {
                session.restore_head(selection);
                Err(Self { session, prompt }.refused(error))
            }
        }
    }

    /// Fails the request and returns its session.
    pub fn refused(self, error: EngineError) -> Box<Failure> {
        Box::new(Failure { error, session: Some(self.session) })
    }
}

impl SetupTask {
    /// The setup of the choices of an answer in `session`.
    pub fn new(
        session: &Session,
        head: Option<String>,
        config: GenerationConfig,
        compiled: Option<CompiledGrammar>,
        choices: usize,
        model: &Model,
        grammars: &Arc<GrammarCache>,
    ) -> Self {
        Self {
            pool: session.heads().cloned(),
            meters: session.meters().clone(),
            device: session.decoder().device().clone(),
            head,
            config,
            compiled,
            choices,
            model: model.clone(),
            grammars: grammars.clone(),
        }
    }

    /// Returns whether the setup may take long enough to delay other requests. If finding out panics, it is
    /// assumed to, and `run` reports the panic to the request.
    pub fn takes_long(&self) -> bool {
        let is_resident =
            |head: &String| head == OWN_HEAD || self.pool.as_ref().is_none_or(|pool| pool.is_resident(head));
        let has_grammar = self.config.grammar.is_some() || self.compiled.is_some();
        let takes_long = || Ok(has_grammar || self.head.as_ref().is_some_and(|head| !is_resident(head)));
        shielded(&self.device, takes_long).unwrap_or(true)
    }

    /// Returns whether a grammar has to be compiled.
    fn compiles(&self) -> bool {
        self.config.grammar.is_some() && self.compiled.is_none()
    }

    /// Prepares the request, however long that takes.
    pub fn run(self) -> Result<Prepared, EngineError> {
        let device = self.device.clone();
        shielded(&device, || {
            let fetch = |name: String| fetch(&name, self.pool.as_ref(), &self.meters);
            let fetched = self.head.clone().map(fetch).transpose()?;
            let grammar = self.grammar()?;
            let outputs = (0..self.choices).map(|nth| self.output(nth, grammar.clone()));
            Ok(Prepared { fetched, outputs: outputs.collect::<Result<_, _>>()? })
        })
    }

    /// Begins the texts of the grammar, if there is one, and compiles it unless that is done.
    fn grammar(&self) -> Result<Option<RequestGrammar>, RuntimeError> {
        let compiled = match (&self.compiled, &self.config.grammar) {
            (Some(compiled), _) => compiled.clone(),
            (None, Some(grammar)) => self.grammars.compile(grammar, &self.model, &self.config.end_tokens)?,
            (None, None) => return Ok(None),
        };
        compiled.begin().map(Some)
    }

    /// Returns the output of the nth choice. The same seed would give the same text.
    fn output(&self, nth: usize, grammar: Option<RequestGrammar>) -> Result<OutputState, RuntimeError> {
        let mut config = self.config.clone();
        config.sampler.seed = config.sampler.seed.wrapping_add(nth as u64);
        let tokenizer = self.model.tokenizer().ok().cloned();
        match grammar {
            Some(grammar) => OutputState::with_grammar(config, tokenizer, grammar),
            None => OutputState::new(config, tokenizer),
        }
    }

    /// Prepares a request that is cancelled, without its work.
    fn run_cancelled(mut self) -> Result<Prepared, EngineError> {
        (self.head, self.compiled, self.config.grammar) = (None, None, None);
        self.run()
    }

    /// Runs on a thread of its own, or on the calling one if none can be spawned.
    fn begin(self, permit: Option<CompilePermit>) -> Receiver<Result<Prepared, EngineError>> {
        let (done, prepared) = channel();
        let ((sender, receiver), done_here) = (channel(), done.clone());
        let on_thread = move || {
            if permit.is_some() {
                lower_thread_priority();
            }
            let _permit = permit;
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
    pub fn new(request: AdmittedRequest, parts: RequestParts, setup: SetupTask) -> Self {
        let state = SetupState::Waiting(Box::new(setup));
        Self { request, parts, cancelled: Vec::new(), state }
    }

    /// Returns whether a choice belongs to the request.
    pub fn has(&self, id: RequestId) -> bool {
        self.request.choices.iter().any(|(choice, _)| *choice == id)
    }

    /// Begins the work, unless that is to compile one grammar more than may be at once.
    pub fn start(&mut self, grammars: &Arc<GrammarCache>) {
        let SetupState::Waiting(task) = &self.state else { return };
        let permit = if task.compiles() { grammars.try_permit() } else { None };
        if permit.is_none() && task.compiles() {
            return;
        }
        let (_, nothing) = channel();
        if let SetupState::Waiting(task) = std::mem::replace(&mut self.state, SetupState::Running(nothing)) {
            self.state = SetupState::Running(task.begin(permit));
        }
    }

    /// Returns the result once there is one or the deadline has passed. `model` is named in the error.
    pub fn outcome(&mut self, model: &str, now: Duration) -> Option<Result<Prepared, EngineError>> {
        if self.request.fail_at.is_some_and(|fail_at| now >= fail_at) {
            return Some(Err(EngineError::Late { model: model.into() }));
        }
        let is_cancelled = self.request.choices.iter().all(|(id, _)| self.cancelled.contains(id));
        match &self.state {
            SetupState::Waiting(_) if is_cancelled => {
                let (_, nothing) = channel();
                match std::mem::replace(&mut self.state, SetupState::Running(nothing)) {
                    SetupState::Waiting(task) => Some(task.run_cancelled()),
                    SetupState::Running(_) => None,
                }
            }
            SetupState::Waiting(_) => None,
            SetupState::Running(prepared) => match prepared.try_recv() {
                Ok(prepared) => Some(prepared),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => {
                    let reason = "the thread that prepares a request is gone".into();
                    Some(Err(RuntimeError::Threads { reason }.into()))
                }
            },
        }
    }
}
