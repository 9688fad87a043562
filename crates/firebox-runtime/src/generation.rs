use std::sync::Arc;

use firebox_text::Tokenizer;
use serde::{Deserialize, Serialize};

use crate::answer::Answer;
use crate::engine::{Clock, WallClock};
use crate::lookahead::Lookahead;
use crate::paused::{Paused, Said};
use crate::timing::Timing;
use crate::{Grammar, LogProbabilities, RuntimeError, SamplerConfig, Session, Speculation};

/// What a generation is asked to do.
#[derive(Debug, Clone, Default)]
pub struct GenerationConfig {
    /// Ends after this many tokens.
    pub max_tokens: Option<usize>,
    /// Ends when the sequence, prompt included, has this many tokens.
    pub context: Option<usize>,
    /// Ends before any of these.
    pub stop: Vec<String>,
    /// Ends at any of these tokens, beside those the tokenizer knows; [`Model::end_tokens`](crate::Model::end_tokens)
    /// has them for a model without a tokenizer.
    pub end_tokens: Vec<u32>,
    /// Goes on after a token that would end it, unless a grammar has permitted that.
    pub ignore_end: bool,
    /// The text goes on from the prompt's, so a space before its first word is kept, as it is under a grammar; otherwise
    /// it begins anew.
    pub continues: bool,
    /// What the answer has to be, token by token. It ends where the grammar does, and where the model ends it and the
    /// grammar permits that.
    pub grammar: Option<Grammar>,
    /// With every token comes its log-probability, and those of this many of the likeliest.
    pub logprobs: Option<usize>,
    /// How tokens are chosen.
    pub sampler: SamplerConfig,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model said so, or a stop string did.
    Stop,
    /// As many tokens as were asked for, or as fit.
    Length,
    /// The caller did.
    Cancelled,
}

/// One generated token and the text that is now certain.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// The token; absent when the text was held back from earlier ones.
    pub token: Option<u32>,
    /// Empty while a character or a stop string may still be incomplete.
    pub text: String,
    /// How likely the token was, if that was [asked for](GenerationConfig::logprobs).
    pub logprobs: Option<LogProbabilities>,
}

/// What a generation came to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// The text.
    pub text: String,
    /// The tokens, without the one that ended it.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Milliseconds to the first token.
    pub ttft_ms: f64,
    /// Prompt tokens per second; 0 where a generation was [resumed](Generation::resume), whose prompt had been fed before.
    pub prefill_tps: f64,
    /// Generated tokens per second after the first; 0 when there are fewer than two.
    pub decode_tps: f64,
    /// Tokens that were drafted, and went through the layers before it was their turn.
    pub drafted_tokens: usize,
    /// How many of these were what the model chose.
    pub accepted_tokens: usize,
    /// Why it ended.
    pub finish: Finish,
}

/// A generation in progress. Dropping it leaves the session with all but the last token it handed out, which has not been
/// through the layers; [`finish`](Self::finish) adds that too.
#[derive(Debug)]
pub struct Generation<'s> {
    ahead: Lookahead<'s>,
    answer: Answer,
    prompt_tokens: usize,
    /// Those of them that it has fed itself.
    fed: usize,
    timing: Timing,
    clock: WallClock,
}

impl<'s> Generation<'s> {
    /// Feeds the prompt. Without a tokenizer only tokens come out.
    pub fn begin(
        session: &'s mut Session,
        tokenizer: Option<Arc<Tokenizer>>,
        prompt: &[u32],
        config: GenerationConfig,
    ) -> Result<Self, RuntimeError> {
        session.expect_answer(prompt.len(), config.context)?;
        let mut answer = Answer::new(config, tokenizer)?;
        let before = session.tokens().len();
        let clock = WallClock::default();
        let mut timing = Timing::begin(clock.now(), session.meters());
        timing.set_running(true);
        let (logits, prompt_tokens) = match session.feed(prompt) {
            Ok(logits) => (logits, prompt.len()),
            Err(RuntimeError::Cancelled) => {
                answer.end(Finish::Cancelled);
                // Earlier turns may have gone to make room.
                (Vec::new(), session.tokens().len().saturating_sub(before))
            }
            Err(error) => {
                timing.ended(None);
                return Err(error);
            }
        };
        timing.prompt(prompt_tokens, 0);
        let ahead = Lookahead::new(session, logits);
        Ok(Self { ahead, answer, prompt_tokens, fed: prompt_tokens, timing, clock })
    }

    /// The same, faster where the drafts of `speculation` are good: tokens stay what they are without it.
    pub fn with_speculation(mut self, speculation: &'s mut Speculation) -> Self {
        self.ahead.speculate(speculation);
        self
    }

    /// The next token, or nothing once the generation has ended.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, RuntimeError> {
        if self.answer.finish().is_some() {
            return Ok(None);
        }
        let room = self.answer.room(self.ahead.len());
        if room == 0 {
            return Ok(self.answer.end(Finish::Length));
        }
        let token = self.ahead.choose(&mut self.answer, room)?;
        self.timing.token(self.clock.now());
        if self.answer.ends_at(token) {
            return Ok(self.answer.end(Finish::Stop));
        }
        self.timing.generated();
        self.ahead.add(token);
        Ok(Some(self.answer.add(token)))
    }

    /// Ends the generation where it is, and hands out the text that was held back, if any was.
    pub fn cancel(&mut self) -> Option<Piece> {
        if self.answer.finish().is_some() { None } else { self.answer.end(Finish::Cancelled) }
    }

    /// Stops between two tokens. What it has generated becomes part of the session, which may then be saved and restored;
    /// what is returned says how to [go on](Self::resume) to the same tokens, and what was said so far.
    pub fn pause(mut self) -> Result<(Paused, Said), RuntimeError> {
        let length = self.ahead.len();
        let goes_on = self.answer.finish().is_none() && self.answer.room(length) > 0;
        let chosen = match self.ahead.has_pending() {
            // Logits take more room than all else, and what was chosen from them a word.
            false if goes_on => Some(self.ahead.choose(&mut self.answer, 1)?),
            _ => None,
        };
        self.ahead.finish();
        Ok(self.answer.pause(length, chosen, self.prompt_tokens))
    }

    /// Goes on where a generation was [paused](Self::pause), with its session as it was then. `said` is what it had said;
    /// without that, only what comes is part of what it comes to.
    pub fn resume(
        session: &'s mut Session,
        tokenizer: Option<Arc<Tokenizer>>,
        paused: &Paused,
        said: Said,
    ) -> Result<Self, RuntimeError> {
        let answer = Answer::resume(paused, said, tokenizer)?;
        paused.check(session)?;
        let clock = WallClock::default();
        let mut timing = Timing::begin(clock.now(), session.meters());
        timing.set_running(true);
        let ahead = Lookahead::resume(session, paused.chosen());
        Ok(Self { ahead, answer, prompt_tokens: paused.prompt_tokens(), fed: 0, timing, clock })
    }

    /// Closes the generation: what it generated becomes part of the session.
    pub fn finish(mut self) -> Result<Summary, RuntimeError> {
        self.ahead.finish();
        let (drafted_tokens, accepted_tokens) = self.ahead.counts();
        let finish = self.answer.finish().unwrap_or(Finish::Cancelled);
        self.timing.ended(Some(finish));
        let first = self.timing.first(self.clock.now()).as_secs_f64();
        let (text, tokens) = self.answer.into_parts();
        Ok(Summary {
            text,
            tokens,
            prompt_tokens: self.prompt_tokens,
            ttft_ms: first * 1000.0,
            prefill_tps: self.fed as f64 / first.max(f64::EPSILON),
            decode_tps: self.timing.decode_tps(),
            drafted_tokens,
            accepted_tokens,
            finish,
        })
    }
}
