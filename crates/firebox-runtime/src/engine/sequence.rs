use std::time::Duration;

use crate::answer::Answer;
use crate::engine::event::{Event, Failure, Outcome};
use crate::engine::lane::shielded;
use crate::schedule::Priority;
use crate::timing::Timing;
use crate::{Begun, Finish, Piece, PrefixTree, RuntimeError, Session, Summary};

/// Which request of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) u64);

/// A request on its way: a session that has accepted the prompt, and the answer that comes of it.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: RequestId,
    pub session: Session,
    pub answer: Answer,
    /// Who must not notice others.
    pub scope: String,
    pub priority: Priority,
    pub timing: Timing,
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
    /// One token, the last it has chosen.
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
        answer: Answer,
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
            answer,
            scope,
            priority,
            timing,
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
            self.waited = self.timing.since_begin(now);
            self.timing.waited(self.waited);
            self.timing.prompt(self.prompt_tokens - self.cached_tokens, self.cached_tokens);
        }
        self.timing.set_running(true);
    }

    /// Begins with what is known of its prompt. Where that cannot be had, it is computed, and nothing is known any more.
    fn begin(&mut self, prefixes: &PrefixTree, prompt: &[u32]) -> Begun {
        let before = self.session.clone();
        let begun = || Ok(prefixes.begin(&mut self.session, &self.scope, prompt));
        shielded(before.decoder.device(), begun).unwrap_or_else(|_| {
            prefixes.clear();
            self.session = before;
            Begun::default()
        })
    }

    /// Has others begin with what it has computed so far. It goes on where that cannot be kept: what is wrong with the device is
    /// told by the next pass.
    pub fn keep(&self, prefixes: &PrefixTree) {
        let kept = || {
            prefixes.keep(&self.session, &self.scope);
            Ok(())
        };
        if shielded(self.session.decoder.device(), kept).is_err() {
            prefixes.clear();
        }
    }

    /// It waits from now on.
    pub fn pauses(&mut self) {
        self.timing.set_running(false);
    }

    /// Whether its first token is not there and should be.
    pub fn is_late(&self, now: Duration) -> bool {
        self.late_at.is_some_and(|late_at| now >= late_at) && self.answer.count() == 0
    }

    pub fn need(&self) -> Need {
        if self.session.behind() == 1 && !self.session.has_lost() { Need::Step } else { Need::Feed }
    }

    /// Goes on by the token that follows the logits, or ends. Returns what is to be told, and whether it has ended.
    pub fn go_on(&mut self, logits: &[f32], now: Duration) -> Result<(Option<Event>, bool), RuntimeError> {
        let told = |piece: Option<_>| piece.map(Event::Piece);
        if self.answer.finish().is_some() {
            return Ok((None, true));
        }
        if self.answer.room(self.session.tokens().len()) == 0 {
            return Ok((told(self.answer.end(Finish::Length)), true));
        }
        let token = self.answer.choose(logits, self.session.tokens())?;
        self.timing.token(now);
        if self.answer.ends_at(token) {
            return Ok((told(self.answer.end(Finish::Stop)), true));
        }
        self.timing.generated();
        self.session.append(token);
        let piece = self.answer.add(token);
        if self.answer.finish().is_none() && self.answer.room(self.session.tokens().len()) == 0 {
            // Another pass would find no room for what comes of it.
            let rest = self.answer.end(Finish::Length).map(|rest| rest.text).unwrap_or_default();
            let piece = Piece { text: piece.text + &rest, ..piece };
            return Ok((Some(Event::Piece(piece)), true));
        }
        Ok((Some(Event::Piece(piece)), self.answer.finish().is_some()))
    }

    /// Ends where it is.
    pub fn cancel(&mut self) -> Option<Event> {
        self.answer.end(Finish::Cancelled).map(Event::Piece)
    }

    /// What is left of it where it cannot go on.
    pub fn failed(self, error: RuntimeError) -> Event {
        self.timing.ended(None);
        Event::Failed(Box::new(Failure { error, session: Some(Box::new(self.session)) }))
    }

    /// What it came to, with the session as it is now.
    pub fn finished(self, now: Duration) -> Event {
        let finish = self.answer.finish().unwrap_or(Finish::Cancelled);
        self.timing.ended(Some(finish));
        let first = self.timing.first(now);
        let (text, tokens) = self.answer.into_parts();
        let fed = if self.prompt.is_some() { 0 } else { self.prompt_tokens - self.cached_tokens };
        let summary = Summary {
            text,
            tokens,
            prompt_tokens: self.prompt_tokens,
            ttft_ms: first.as_secs_f64() * 1000.0,
            prefill_tps: fed as f64 / first.saturating_sub(self.waited).as_secs_f64().max(f64::EPSILON),
            decode_tps: self.timing.decode_tps(),
            drafted_tokens: 0,
            accepted_tokens: 0,
            finish,
        };
        let (cached_tokens, waited) = (self.cached_tokens, self.waited);
        Event::Finished(Box::new(Outcome { summary, cached_tokens, waited, session: self.session }))
    }
}
