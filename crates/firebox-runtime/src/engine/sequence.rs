//! The state of one request while it runs in a lane.

use std::time::Duration;

use crate::decode::{Advance, DecodeState, OutputState, Timing};
use crate::engine::event::{Event, Failure, Outcome};
use crate::engine::lane::shielded;
use crate::schedule::Priority;
use crate::{Finish, PrefixHit, PrefixTree, RuntimeError, Session, Speculation};

/// Which request of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) u64);

/// A request on its way: a session that has accepted the prompt, and the answer that comes of it.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: RequestId,
    pub session: Session,
    pub state: DecodeState,
    /// Drafts tokens beyond those that a grammar forces.
    pub speculation: Option<Speculation>,
    /// Who must not notice others.
    pub scope: String,
    pub priority: Priority,
    /// Until it has run.
    prompt: Option<Vec<u32>>,
    pub prompt_tokens: usize,
    /// Of these, how many need not go through the layers.
    pub cached_tokens: usize,
    /// How long it waited until it ran.
    pub waited: Duration,
    /// After how many tokens of the sequence it stops on its way, for others to begin there.
    pub stop: Option<usize>,
    /// When it fails, unless its first token is there.
    pub late_at: Option<Duration>,
    /// Whether it must not go on for now: nobody takes what it says.
    pub held: bool,
    /// Whether it is to end where it is.
    pub cancelled: bool,
}

/// What a sequence needs of the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// The last token it has chosen, with a draft of what follows, and what a refused draft has undone.
    Step,
    /// A prompt, or what was forgotten of the sequence to make room.
    Feed,
}

impl Sequence {
    /// Waits to accept a prompt.
    pub fn new(
        id: RequestId,
        session: Session,
        prompt: Vec<u32>,
        output: OutputState,
        scope: String,
        priority: Priority,
        now: Duration,
    ) -> Self {
        let timing = Timing::begin(now, session.meters());
        Self {
            id,
            session,
            prompt_tokens: prompt.len(),
            prompt: Some(prompt),
            state: DecodeState::new(output, timing),
            speculation: None,
            scope,
            priority,
            cached_tokens: 0,
            waited: Duration::ZERO,
            stop: None,
            late_at: None,
            held: false,
            cancelled: false,
        }
    }

    /// It runs from now on, for the first time or again. What its prompt begins with may be known from others.
    pub fn starts(&mut self, prefixes: &PrefixTree, now: Duration) {
        if let Some(prompt) = self.prompt.take() {
            let before = self.session.tokens().len();
            let begun = self.begin(prefixes, &prompt);
            for &token in &prompt[begun.tokens..] {
                self.session.append(token);
            }
            self.cached_tokens = begun.tokens;
            self.stop = begun.stop.map(|stop| before + stop);
            self.waited = self.state.timing().since_begin(now);
            self.state.timing().waited(self.waited);
            self.state.timing().prompt(self.prompt_tokens - self.cached_tokens, self.cached_tokens);
        }
        self.state.timing().set_running(true);
    }

    /// Begins with what is known of its prompt. Where that cannot be had, it is computed, and nothing is known any more.
    fn begin(&mut self, prefixes: &PrefixTree, prompt: &[u32]) -> PrefixHit {
        let before = self.session.clone();
        let begun = || Ok(prefixes.begin(&mut self.session, &self.scope, prompt));
        shielded(before.decoder.device(), begun).unwrap_or_else(|_| {
            prefixes.clear();
            self.session = before;
            PrefixHit::default()
        })
    }

    /// Has others begin with what it has computed so far. It goes on where that cannot be kept: what is wrong with the device is
    /// told by the next pass.
    pub fn keep(&self, prefixes: &PrefixTree) {
        let kept = || {
            prefixes.insert(&self.session, &self.scope);
            Ok(())
        };
        if shielded(self.session.decoder.device(), kept).is_err() {
            prefixes.clear();
        }
    }

    /// What it has said so far.
    pub fn output(&self) -> &OutputState {
        self.state.output()
    }

    /// It waits from now on.
    pub fn pauses(&mut self) {
        self.state.timing().set_running(false);
    }

    /// Whether its first token is not there and should be.
    pub fn is_late(&self, now: Duration) -> bool {
        self.late_at.is_some_and(|late_at| now >= late_at) && self.output().count() == 0
    }

    pub fn need(&self) -> Need {
        if self.state.is_decoding(&self.session) { Need::Step } else { Need::Feed }
    }

    /// Takes the logits after the last token, chooses what follows, and returns the events of it, and whether the request
    /// has ended.
    pub fn advance(
        &mut self,
        logits: Vec<f32>,
        now: Duration,
        events: &mut dyn FnMut(Event),
    ) -> Result<bool, RuntimeError> {
        self.state.receive_logits(&self.session, logits);
        let ended = loop {
            match self.state.advance(&mut self.session, self.speculation.as_mut(), || now) {
                Ok(Advance::Token(piece)) => events(Event::Piece(piece)),
                Ok(Advance::Ended(held_back)) => {
                    held_back.into_iter().for_each(|piece| events(Event::Piece(piece)));
                    break Ok(true);
                }
                Ok(Advance::NeedsPass) => break Ok(false),
                Err(error) => break Err(error),
            }
        };
        // The session of a sequence has draft tokens only during a pass.
        self.state.settle(&mut self.session);
        ended
    }

    /// Takes back what a pass that failed has left, before which the cache had `cached` tokens.
    pub fn abandon_pass(&mut self, cached: usize) {
        self.state.cancel_draft(&mut self.session);
        self.session.undo_pass(cached);
    }

    /// Ends where it is.
    pub fn cancel(&mut self) -> Option<Event> {
        self.state.end(Finish::Cancelled).map(Event::Piece)
    }

    /// What is left of it where it cannot go on.
    pub fn failed(mut self, error: RuntimeError) -> Event {
        self.state.timing().ended(None);
        Event::Failed(Box::new(Failure { error, session: Some(Box::new(self.session)) }))
    }

    /// What it came to, with the session as it is now.
    pub fn finished(mut self, now: Duration) -> Event {
        let fed = if self.prompt.is_some() { 0 } else { self.prompt_tokens - self.cached_tokens };
        let summary = self.state.summarize(self.prompt_tokens, fed, self.waited, now);
        let (cached_tokens, waited) = (self.cached_tokens, self.waited);
        Event::Finished(Box::new(Outcome { summary, cached_tokens, waited, session: self.session }))
    }
}
