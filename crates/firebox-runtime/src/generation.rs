use std::sync::Arc;
use std::time::{Duration, Instant};

use firebox_model::ModelError;
use firebox_text::{Detokenizer, StopStrings, Tokenizer};
use serde::Serialize;

use crate::lookahead::Lookahead;
use crate::{RuntimeError, Sampler, SamplerConfig, Session, Speculation};

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
    /// Goes on after a token that would end it.
    pub ignore_end: bool,
    /// The text goes on from the prompt's, so a space before its first word is kept; otherwise it begins anew.
    pub continues: bool,
    /// How tokens are chosen.
    pub sampler: SamplerConfig,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The token; absent when the text was held back from earlier ones.
    pub token: Option<u32>,
    /// Empty while a character or a stop string may still be incomplete.
    pub text: String,
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
    /// Prompt tokens per second.
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
    tokenizer: Option<Arc<Tokenizer>>,
    detokenizer: Option<Detokenizer>,
    stops: StopStrings,
    sampler: Sampler,
    config: GenerationConfig,
    /// Tokens decoded after the first, the one that ended the generation included.
    steps: usize,
    text: String,
    tokens: Vec<u32>,
    prompt_tokens: usize,
    began: Instant,
    first: Option<Duration>,
    last: Duration,
    finish: Option<Finish>,
}

impl<'s> Generation<'s> {
    /// Feeds the prompt. Without a tokenizer only tokens come out.
    pub fn begin(
        session: &'s mut Session,
        tokenizer: Option<Arc<Tokenizer>>,
        prompt: &[u32],
        config: GenerationConfig,
    ) -> Result<Self, RuntimeError> {
        if prompt.is_empty() {
            return Err(ModelError::NoTokens.into());
        }
        if session.head().is_some_and(|head| head.is_classifier()) {
            return Err(RuntimeError::Kind {
                found: "wearing a classifier",
                remedy: "it says what a text is and cannot continue it; use another head",
            });
        }
        let sampler = Sampler::new(config.sampler.clone())?;
        let before = session.tokens().len();
        let tokens = before + prompt.len();
        if let Some(context) = config.context.filter(|&context| tokens >= context) {
            return Err(RuntimeError::ContextFull { tokens: tokens + 1, context });
        }
        let began = Instant::now();
        let (logits, finish, prompt_tokens) = match session.feed(prompt) {
            Ok(logits) => (logits, None, prompt.len()),
            Err(RuntimeError::Cancelled) => {
                // Earlier turns may have gone to make room.
                let fed = session.tokens().len().saturating_sub(before);
                (Vec::new(), Some(Finish::Cancelled), fed)
            }
            Err(error) => return Err(error),
        };
        Ok(Self {
            prompt_tokens,
            ahead: Lookahead::new(session, logits),
            detokenizer: tokenizer.as_ref().map(|tokenizer| {
                if config.continues {
                    Detokenizer::continuing(tokenizer, true)
                } else {
                    Detokenizer::new(tokenizer, true)
                }
            }),
            tokenizer,
            stops: StopStrings::new(config.stop.clone()),
            sampler,
            config,
            steps: 0,
            text: String::new(),
            tokens: Vec::new(),
            began,
            first: None,
            last: Duration::ZERO,
            finish,
        })
    }

    /// The same, faster where the drafts of `speculation` are good: tokens stay what they are without it.
    pub fn with_speculation(mut self, speculation: &'s mut Speculation) -> Self {
        self.ahead.speculate(speculation);
        self
    }

    /// The next token, or nothing once the generation has ended.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, RuntimeError> {
        if self.finish.is_some() {
            return Ok(None);
        }
        let room = self.room();
        if room == 0 {
            return Ok(self.end(Finish::Length));
        }
        let token = self.ahead.choose(&mut self.sampler, room)?;
        self.last = self.began.elapsed();
        self.steps += usize::from(self.first.is_some());
        self.first.get_or_insert(self.last);
        if !self.config.ignore_end && self.is_end(token) {
            return Ok(self.end(Finish::Stop));
        }
        self.ahead.add(token);
        self.tokens.push(token);
        let text = match &mut self.detokenizer {
            Some(detokenizer) => self.stops.push(&detokenizer.push(token)),
            None => String::new(),
        };
        self.text.push_str(&text);
        if self.stops.matched().is_some() {
            self.finish = Some(Finish::Stop);
        }
        Ok(Some(Piece { token: Some(token), text }))
    }

    /// Ends the generation where it is, and hands out the text that was held back, if any was.
    pub fn cancel(&mut self) -> Option<Piece> {
        if self.finish.is_some() { None } else { self.end(Finish::Cancelled) }
    }

    /// Closes the generation: what it generated becomes part of the session.
    pub fn finish(mut self) -> Result<Summary, RuntimeError> {
        self.finish.get_or_insert(Finish::Cancelled);
        self.ahead.finish();
        let (drafted_tokens, accepted_tokens) = self.ahead.counts();
        let seconds = |duration: Duration| duration.as_secs_f64().max(f64::EPSILON);
        let first = self.first.unwrap_or_else(|| self.began.elapsed());
        let steps = self.steps;
        let decoding = self.last.saturating_sub(first);
        Ok(Summary {
            text: self.text,
            tokens: self.tokens,
            prompt_tokens: self.prompt_tokens,
            ttft_ms: first.as_secs_f64() * 1000.0,
            prefill_tps: self.prompt_tokens as f64 / seconds(first),
            decode_tps: if steps == 0 { 0.0 } else { steps as f64 / seconds(decoding) },
            drafted_tokens,
            accepted_tokens,
            finish: self.finish.unwrap_or(Finish::Cancelled),
        })
    }

    fn is_end(&self, token: u32) -> bool {
        self.config.end_tokens.contains(&token)
            || self.tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.is_eos(token))
    }

    /// How many more tokens it may come to.
    fn room(&self) -> usize {
        let asked = self.config.max_tokens.map_or(usize::MAX, |most| most.saturating_sub(self.tokens.len()));
        let fits = self.config.context.map_or(usize::MAX, |most| most.saturating_sub(self.ahead.len()));
        asked.min(fits)
    }

    /// Hands out what was held back, if anything was.
    fn end(&mut self, finish: Finish) -> Option<Piece> {
        self.finish = Some(finish);
        let mut text = match &mut self.detokenizer {
            Some(detokenizer) => self.stops.push(&detokenizer.finish()),
            None => String::new(),
        };
        text.push_str(&self.stops.finish());
        self.text.push_str(&text);
        (!text.is_empty()).then_some(Piece { token: None, text })
    }
}
