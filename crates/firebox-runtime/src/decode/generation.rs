//! One generation in one session.

use std::sync::Arc;
use std::time::{Duration, Instant};

use firebox_text::Tokenizer;

use crate::decode::branch::DraftBranch;
use crate::decode::{
    Advance, DecodeState, Finish, GenerationConfig, OutputState, PartialOutput, PausedGeneration, Piece,
    Speculation, Summary, Timing,
};
use crate::{RuntimeError, Session};

/// What a generation holds beside its session once the prompt is fed.
#[derive(Debug)]
pub(crate) struct GenerationStart {
    state: DecodeState,
    prompt_tokens: usize,
    began: Instant,
}

impl GenerationStart {
    /// Feeds the prompt.
    pub fn feed(
        session: &mut Session,
        tokenizer: Option<Arc<Tokenizer>>,
        prompt: &[u32],
        config: GenerationConfig,
    ) -> Result<Self, RuntimeError> {
        session.check_prompt(prompt.len(), config.context)?;
        let output = OutputState::new(config, tokenizer)?;
        let before = session.tokens().len();
        let began = Instant::now();
        let mut timing = Timing::begin(Duration::ZERO, session.meters());
        timing.set_running(true);
        let mut state = DecodeState::new(output, timing);
        let prompt_tokens = match session.feed_scored(prompt, state.candidates()) {
            Ok(scores) => {
                state.receive(session, vec![DraftBranch::new(Vec::new(), scores)], None);
                prompt.len()
            }
            Err(RuntimeError::Cancelled) => {
                state.end(Finish::Cancelled);
                // Earlier turns may have been evicted to make room.
                session.tokens().len().saturating_sub(before)
            }
            Err(error) => {
                state.timing().ended(None);
                return Err(error);
            }
        };
        state.timing().prompt(prompt_tokens, 0);
        Ok(Self { state, prompt_tokens, began })
    }
}

/// A generation in progress, an iterator over its pieces. Dropping it leaves the session with every token it handed out; the
/// last one goes through the layers with the next feed.
#[derive(Debug)]
pub struct Generation<'s> {
    session: &'s mut Session,
    speculation: Option<&'s mut Speculation>,
    state: DecodeState,
    prompt_tokens: usize,
    /// Prompt tokens that this generation has fed.
    fed: usize,
    began: Instant,
}

impl<'s> Generation<'s> {
    /// Feeds the prompt. Without a tokenizer only tokens come out.
    pub fn begin(
        session: &'s mut Session,
        tokenizer: Option<Arc<Tokenizer>>,
        prompt: &[u32],
        config: GenerationConfig,
    ) -> Result<Self, RuntimeError> {
        let start = GenerationStart::feed(session, tokenizer, prompt, config)?;
        Ok(Self::from_start(session, start))
    }

    /// Continues a session that has read the prompt.
    pub(crate) fn from_start(session: &'s mut Session, start: GenerationStart) -> Self {
        let GenerationStart { state, prompt_tokens, began } = start;
        Self { session, speculation: None, state, prompt_tokens, fed: prompt_tokens, began }
    }

    /// Drafts tokens by `speculation`. The tokens are the same as without it, and come faster where the drafts are good.
    pub fn with_speculation(mut self, speculation: &'s mut Speculation) -> Self {
        self.speculation = Some(speculation);
        self
    }

    /// Returns the next token, or nothing once the generation has ended.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, RuntimeError> {
        loop {
            let speculation = self.speculation.as_deref_mut();
            match self.state.advance(self.session, speculation, || self.began.elapsed())? {
                Advance::Token(piece) => return Ok(Some(piece)),
                Advance::Ended(held_back) => return Ok(held_back),
                Advance::NeedsPass => self.state.forward(self.session, self.speculation.as_deref_mut())?,
            }
        }
    }

    /// Ends the generation where it is, and returns the text that was held back, if any was.
    pub fn cancel(&mut self) -> Option<Piece> {
        if self.state.output().finish().is_some() { None } else { self.state.end(Finish::Cancelled) }
    }

    /// Stops between two tokens. The generated tokens become part of the session, which may then be saved and restored.
    /// Returns what it takes to [resume](Self::resume) with the same tokens, and the output so far.
    pub fn pause(mut self) -> Result<(PausedGeneration, PartialOutput), RuntimeError> {
        self.state.pause(self.session, self.prompt_tokens)
    }

    /// Continues a generation that was [paused](Self::pause), with its session as it was then. `output` is what it had
    /// generated; without that, only what follows is part of the outcome.
    pub fn resume(
        session: &'s mut Session,
        tokenizer: Option<Arc<Tokenizer>>,
        paused: &PausedGeneration,
        output: PartialOutput,
    ) -> Result<Self, RuntimeError> {
        let output = OutputState::resume(paused, output, tokenizer)?;
        paused.check(session)?;
        let began = Instant::now();
        let mut timing = Timing::begin(Duration::ZERO, session.meters());
        timing.set_running(true);
        let state = DecodeState::resume(output, timing, paused.chosen());
        let prompt_tokens = paused.prompt_tokens();
        Ok(Self { session, speculation: None, state, prompt_tokens, fed: 0, began })
    }

    /// Generates up to the end and closes the generation.
    pub fn complete(mut self) -> Result<Summary, RuntimeError> {
        while self.next_piece()?.is_some() {}
        self.finish()
    }

    /// Closes the generation where it is: its tokens become part of the session.
    pub fn finish(mut self) -> Result<Summary, RuntimeError> {
        self.state.settle(self.session);
        Ok(self.state.summarize(self.prompt_tokens, self.fed, Duration::ZERO, self.began.elapsed()))
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Piece, RuntimeError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece().transpose()
    }
}

impl Drop for Generation<'_> {
    fn drop(&mut self) {
        self.state.settle(self.session);
    }
}
