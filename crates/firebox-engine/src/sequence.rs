//! A request in progress: its session and the state of its answer.

use std::sync::Arc;
use std::time::Duration;

use firebox_runtime::decode::{Advance, DecodeState, OutputState, Scores, Timing};
use firebox_runtime::session::NextChunk;
use firebox_runtime::{Finish, PrefixHit, PrefixTree, Session, Speculation};
use firebox_schedule::{Client, Priority};

use crate::error::EngineError;
use crate::event::{Event, Failure, Outcome};
use crate::shield::shielded;

/// Identifies a request of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) u64);

/// A request in progress: a session with the prompt, and the state of its answer.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: RequestId,
    pub session: Session,
    pub state: DecodeState,
    /// Drafts tokens beyond those that a grammar forces.
    pub speculation: Option<Speculation>,
    /// The scope within which requests share prefixes.
    pub scope: String,
    pub client: Client,
    pub priority: Priority,
    /// The last decode step of its batch that it was in.
    pub last_step: u64,
    /// The prompt, until the sequence first runs.
    prompt: Option<Arc<[u32]>>,
    /// The scores after the prompt, if another choice of its request has computed it, until the sequence first runs.
    first_scores: Option<Arc<Scores>>,
    started: bool,
    pub prompt_tokens: usize,
    /// Prompt tokens that the prefix cache supplied.
    pub cached_tokens: usize,
    /// How long it waited in the queue before it first ran.
    pub waited: Duration,
    /// The length at which prefill stops to cache the prefix for other requests.
    pub prefix_end: Option<usize>,
    /// When it fails unless its first token is out.
    pub fail_at: Option<Duration>,
    /// Whether it is paused because its events are not being read.
    pub held: bool,
    /// Whether it waits for another choice of its request that computes their prompt.
    pub awaits_prompt: bool,
    /// Whether other choices of its request wait for its prompt.
    pub shares_prompt: bool,
    /// Whether it is to end as soon as possible.
    pub cancelled: bool,
}

/// A prompt that a choice has taken through the layers, for the other choices of its request.
#[derive(Debug)]
pub(crate) struct ComputedPrompt {
    /// The choice that computed it.
    pub id: RequestId,
    pub session: Session,
    /// The scores after its last token: choices differ in nothing but their seeds, and need the same.
    pub scores: Arc<Scores>,
}

/// The kind of pass that a sequence needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// The last token chosen, with a draft of the next ones, and tokens that a refused draft has undone.
    Decode,
    /// A prompt, or evicted tokens that are recomputed.
    Prefill,
}

impl Sequence {
    /// A sequence that has not yet accepted its prompt.
    pub fn new(
        id: RequestId,
        session: Session,
        prompt: impl Into<Arc<[u32]>>,
        output: OutputState,
        scope: String,
        priority: Priority,
        now: Duration,
    ) -> Self {
        let timing = Timing::begin(now, session.meters());
        let prompt = prompt.into();
        Self {
            id,
            session,
            prompt_tokens: prompt.len(),
            prompt: Some(prompt),
            first_scores: None,
            started: false,
            state: DecodeState::new(output, timing),
            speculation: None,
            scope,
            client: Client::default(),
            priority,
            last_step: 0,
            cached_tokens: 0,
            waited: Duration::ZERO,
            prefix_end: None,
            fail_at: None,
            held: false,
            awaits_prompt: false,
            shares_prompt: false,
            cancelled: false,
        }
    }

    /// Marks it as running, for the first time or again. The first time, it takes the prompt's prefix from the cache.
    pub fn start(&mut self, prefixes: &PrefixTree, now: Duration) {
        if let Some(prompt) = self.prompt.take() {
            let before = self.session.tokens().len();
            let hit = self.begin(prefixes, &prompt);
            for &token in &prompt[hit.tokens..] {
                self.session.append(token);
            }
            self.cached_tokens = hit.tokens;
            self.prefix_end = hit.stop.map(|end| before + end);
        }
        if !std::mem::replace(&mut self.started, true) {
            self.waited = self.state.timing().since_begin(now);
            self.state.timing().waited(self.waited);
            self.state.timing().prompt(self.prompt_tokens - self.cached_tokens, self.cached_tokens);
        }
        self.state.timing().set_running(true);
    }

    /// Continues after the prompt that another choice of its request has computed, and shares its pages.
    pub fn continue_after(&mut self, prompt: &ComputedPrompt) {
        self.awaits_prompt = false;
        if self.prompt.take().is_some() {
            self.session = prompt.session.clone();
            self.first_scores = Some(prompt.scores.clone());
            self.cached_tokens = self.prompt_tokens;
        }
    }

    /// Returns the scores after a prompt that another choice has computed, to choose the first token from. If the cache was
    /// dropped meanwhile, a pass computes them again.
    pub fn take_first_scores(&mut self) -> Option<Scores> {
        let scores = self.first_scores.take()?;
        (self.session.uncached_tokens() == 0).then(|| Arc::unwrap_or_clone(scores))
    }

    /// Starts from the cached prefix of the prompt. On failure, clears the prefix cache and computes the whole prompt.
    fn begin(&mut self, prefixes: &PrefixTree, prompt: &[u32]) -> PrefixHit {
        let before = self.session.clone();
        let lookup = || Ok(prefixes.begin(&mut self.session, &self.scope, prompt));
        shielded(before.decoder().device(), lookup).unwrap_or_else(|_| {
            prefixes.clear();
            self.session = before;
            PrefixHit::default()
        })
    }

    /// Caches what it has computed so far as a prefix for other requests. On failure, clears the prefix cache and goes
    /// on; a lost device is reported by the next pass.
    pub fn cache_prefix(&self, prefixes: &PrefixTree) {
        let insert = || {
            prefixes.insert(&self.session, &self.scope);
            Ok(())
        };
        if shielded(self.session.decoder().device(), insert).is_err() {
            prefixes.clear();
        }
    }

    /// Returns the output so far.
    pub fn output(&self) -> &OutputState {
        self.state.output()
    }

    /// Marks it as waiting.
    pub fn pause(&mut self) {
        self.state.timing().set_running(false);
    }

    /// Returns whether its first token is late.
    pub fn is_late(&self, now: Duration) -> bool {
        self.fail_at.is_some_and(|fail_at| now >= fail_at) && self.output().count() == 0
    }

    /// Returns whether the next pass may verify a draft. Other choices continue after the prompt, and not after a draft.
    pub fn may_draft(&self) -> bool {
        self.need() == Need::Decode && !self.held && !self.cancelled && !self.shares_prompt
    }

    pub fn need(&self) -> Need {
        if self.state.is_decoding(&self.session) { Need::Decode } else { Need::Prefill }
    }

    /// Takes at most `most` tokens for a pass and reserves pages for them, without the draft if there are too few for it.
    pub fn next_chunk(&mut self, most: usize) -> Result<NextChunk, EngineError> {
        let Self { session, state, .. } = self;
        let device = session.decoder().device().clone();
        let chunk = shielded(&device, || {
            let chunk = session.next_chunk(most)?;
            let Err(error) = session.reserve_pages(&chunk) else { return Ok(chunk) };
            if state.pending() == 0 {
                return Err(error.into());
            }
            state.cancel_draft(session);
            let chunk = session.next_chunk(session.uncached_tokens())?;
            session.reserve_pages(&chunk)?;
            Ok(chunk)
        });
        if chunk.is_err() {
            state.cancel_draft(session);
        }
        chunk
    }

    /// Takes the scores after the last token, chooses the next tokens and emits their events. Returns whether the
    /// request has ended.
    pub fn advance(
        &mut self,
        scores: Scores,
        now: Duration,
        events: &mut dyn FnMut(Event),
    ) -> Result<bool, EngineError> {
        self.state.receive_scores(&self.session, scores);
        let ended = loop {
            match self.state.advance(&mut self.session, self.speculation.as_mut(), || now) {
                Ok(Advance::Token(piece)) => events(Event::Piece(piece)),
                Ok(Advance::Ended(held_back)) => {
                    held_back.into_iter().for_each(|piece| events(Event::Piece(piece)));
                    break Ok(true);
                }
                Ok(Advance::NeedsPass) => break Ok(false),
                Err(error) => break Err(error.into()),
            }
        };
        // Draft tokens are in the session only during a pass.
        self.state.settle(&mut self.session);
        ended
    }

    /// Rolls back a failed pass, before which the cache had `cached` tokens.
    pub fn abandon_pass(&mut self, cached: usize) {
        self.state.cancel_draft(&mut self.session);
        self.session.undo_pass(cached);
    }

    /// Ends the answer as cancelled, and returns text that was held back.
    pub fn cancel(&mut self) -> Option<Event> {
        self.state.end(Finish::Cancelled).map(Event::Piece)
    }

    /// Fails the request and returns its session.
    pub fn failed(mut self, error: EngineError) -> Event {
        self.state.timing().ended(None);
        Event::Failed(Box::new(Failure { error, session: Some(Box::new(self.session)) }))
    }

    /// Returns the last event, with the summary and the session.
    pub fn finished(mut self, now: Duration) -> Event {
        let fed = if self.started { self.prompt_tokens - self.cached_tokens } else { 0 };
        let summary = self.state.summarize(self.prompt_tokens, fed, self.waited, now);
        let (cached_tokens, waited) = (self.cached_tokens, self.waited);
        Event::Finished(Box::new(Outcome { summary, cached_tokens, waited, session: self.session }))
    }
}
