//! The way of a prompt: from tokens to logits.

use std::ops::Range;
use std::sync::atomic::Ordering;

use burn::tensor::Tensor;
use firebox_cache::SequenceCache;
use firebox_kernels::likeliest::{self, Scored};
use firebox_model::{Input, LogitRows, ModelError};

use super::Session;
use crate::RuntimeError;
use crate::decode::Scores;
use crate::memory::release_after_prompt;
use crate::readback::read_floats;

/// Tokens of a prompt that go through the layers at a time. With more, the weights are read less often; with fewer, the
/// attention scores of a chunk stay small.
pub const PREFILL_CHUNK: usize = 512;

/// What is wanted of the tokens of a feed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// Logits.
    Rows(LogitRows),
    /// So many of the likeliest tokens after the last.
    Likeliest(usize),
}

impl Session {
    /// Feeds at least one token and returns the logits after the last.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<Vec<f32>, RuntimeError> {
        let mut last = Vec::new();
        self.feed_rows(tokens, Wanted::Rows(LogitRows::Last), |scores| {
            if let Scores::Logits(logits) = scores {
                last = logits;
            }
        })?;
        release_after_prompt(tokens.len().min(self.chunk));
        Ok(last)
    }

    /// Feeds at least one token and returns the scores after the last: the likeliest `most` tokens if there is a number and the
    /// device finds them, or else all logits.
    pub(crate) fn feed_scored(
        &mut self,
        tokens: &[u32],
        most: Option<usize>,
    ) -> Result<Scores, RuntimeError> {
        let most = most.filter(|_| likeliest::supports(self.decoder.device()));
        let wanted = most.map_or(Wanted::Rows(LogitRows::Last), Wanted::Likeliest);
        let mut last = Scores::default();
        self.feed_rows(tokens, wanted, |scores| last = scores)?;
        release_after_prompt(tokens.len().min(self.chunk));
        Ok(last)
    }

    /// Feeds at least one token and passes the logits after each of them to `on_rows`, several rows at a time.
    pub fn feed_each_row(
        &mut self,
        tokens: &[u32],
        mut on_rows: impl FnMut(&[f32]),
    ) -> Result<(), RuntimeError> {
        self.feed_rows(tokens, Wanted::Rows(LogitRows::All), |scores| {
            if let Scores::Logits(logits) = scores {
                on_rows(&logits);
            }
        })
    }

    /// Accepts a token. It goes through the layers with the next feed.
    pub fn append(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Feeds tokens chunk by chunk, after those that were accepted before and have not been through the layers. Scores are
    /// computed for the fed tokens only.
    fn feed_rows(
        &mut self,
        tokens: &[u32],
        wanted: Wanted,
        mut on_rows: impl FnMut(Scores),
    ) -> Result<(), RuntimeError> {
        let wants_all = wanted == Wanted::Rows(LogitRows::All);
        if tokens.is_empty() {
            return Err(ModelError::NoTokens.into());
        }
        let length = self.reserve(tokens.len())?;
        let vocab = self.decoder.config().vocab_size;
        let mut accepted = self.uncached_tokens();
        let mut rest: Vec<u32> = self.tokens[self.cache.len()..].iter().chain(tokens).copied().collect();
        let mut chunks = 0;
        while !rest.is_empty() {
            self.check_cancelled(chunks)?;
            chunks += 1;
            let most = self.chunk.min(rest.len());
            // Logits of many rows may take more memory than all else.
            let paid = self.residency.as_ref().filter(|_| wants_all && accepted < most);
            let paid = paid.map(|residency| residency.pay_for_logits(most - accepted)).transpose()?;
            let most = paid.as_ref().map_or(most, |(fit, _)| accepted + fit);
            let chunk: Vec<u32> = rest.drain(..most).collect();
            let old = accepted.min(chunk.len());
            let without_logits = old == chunk.len() || (!wants_all && !rest.is_empty());
            let logits = match wanted {
                _ if without_logits => {
                    self.encode(&chunk, length)?;
                    None
                }
                Wanted::Likeliest(most) => {
                    let likeliest = self.forward_likeliest(&chunk, length, most)?;
                    self.tokens.extend_from_slice(&chunk[old..]);
                    on_rows(Scores::Likeliest(likeliest));
                    return Ok(());
                }
                Wanted::Rows(rows) => Some(self.forward(&[&chunk], &mut [], length, rows)?),
            };
            accepted -= old;
            self.tokens.extend_from_slice(&chunk[old..]);
            let Some(logits) = logits else { continue };
            let mut logits = read_floats(logits)?;
            if wants_all {
                logits.drain(..old * vocab);
            }
            on_rows(Scores::Logits(logits));
        }
        Ok(())
    }

    /// Makes the cache ready for `added` tokens after the accepted ones: brings it up to date, and evicts turns that leave no
    /// room. Returns the length that the sequence is expected to reach.
    pub(crate) fn reserve(&mut self, added: usize) -> Result<usize, RuntimeError> {
        let length = self.rebuild(added)?;
        self.begin_turn_if_closed();
        if self.evict_turns(self.uncached_tokens() + added)? { self.rebuild(added) } else { Ok(length) }
    }

    /// Brings the cached tokens up to date for a sequence with `added` more tokens: they have the positions and the head that
    /// the next pass needs, and turns without a cache are recomputed. Returns the length that the sequence is expected to
    /// reach.
    pub(crate) fn rebuild(&mut self, added: usize) -> Result<usize, RuntimeError> {
        let length = self.refresh_epoch(added)?;
        self.recompute_uncached(length)?;
        Ok(length)
    }

    /// Drops the cache if positions in a sequence with `added` more tokens mean something else than in the cached one, and
    /// replays the head over what stays. Turns without a cache stay without. Returns the length that the sequence is expected
    /// to reach.
    pub(super) fn refresh_epoch(&mut self, added: usize) -> Result<usize, RuntimeError> {
        let length_now = |session: &Self| {
            session.expected_length.max(session.cache.position() + session.uncached_tokens() + added)
        };
        let mut length = length_now(self);
        if self.epoch() != self.decoder.config().position_epoch(length) {
            self.drop_cache();
            // Positions begin at zero again, and hidden tokens take none.
            length = length_now(self);
        }
        self.encoded_length = length;
        self.replay_head(length)?;
        Ok(length)
    }

    /// Returns the epoch of the cached tokens: within one, equal positions mean the same.
    pub(crate) fn epoch(&self) -> usize {
        self.decoder.config().position_epoch(self.encoded_length)
    }

    /// Runs every accepted token through the layers that has not been through them.
    pub(crate) fn flush(&mut self) -> Result<(), RuntimeError> {
        self.rebuild(0)?;
        if self.uncached_tokens() > 0 {
            self.begin_turn_if_closed();
            self.evict_turns(self.uncached_tokens())?;
            let length = self.rebuild(0)?;
            self.encode_chunks(self.cache.len()..self.tokens.len(), length)?;
        }
        Ok(())
    }

    /// Adds tokens to the turn that was begun last, without logits. The session was [rebuilt](Self::rebuild) for them, and
    /// all tokens before them are cached.
    pub(super) fn append_to_turn(&mut self, tokens: &[u32]) -> Result<(), RuntimeError> {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        let done = self.encode_chunks(start..start + tokens.len(), self.encoded_length);
        if done.is_err() {
            self.rewind(start);
        }
        done
    }

    fn encode_chunks(&mut self, tokens: Range<usize>, length: usize) -> Result<(), RuntimeError> {
        for (index, start) in tokens.clone().step_by(self.chunk).enumerate() {
            self.check_cancelled(index)?;
            let chunk = self.tokens[start..tokens.end.min(start.saturating_add(self.chunk))].to_vec();
            self.encode(&chunk, length)?;
        }
        Ok(())
    }

    /// Fails once the session is cancelled. The first chunk always passes, so that a feed of a single token cannot fail.
    pub(super) fn check_cancelled(&self, chunk: usize) -> Result<(), RuntimeError> {
        match &self.cancel {
            Some(cancel) if chunk > 0 && cancel.load(Ordering::Relaxed) => Err(RuntimeError::Cancelled),
            _ => Ok(()),
        }
    }

    /// Runs tokens through the layers, and with them those of `branches`, which begin at the end of this session's cache.
    /// Returns their logits.
    pub(crate) fn forward(
        &mut self,
        tokens: &[&[u32]],
        branches: &mut [SequenceCache],
        length: usize,
        rows: LogitRows,
    ) -> Result<Tensor<2>, RuntimeError> {
        let (position, before) = (self.cache.position(), self.cache.len());
        let head = self.head.as_ref();
        let inputs: Vec<_> =
            tokens.iter().map(|tokens| Input { head, ..Input::new(tokens, position, length) }).collect();
        let mut caches: Vec<_> = std::iter::once(&mut self.cache).chain(branches).collect();
        let logits = self.decoder.forward_together(&inputs, &mut caches, rows);
        logits.map_err(|error| self.undo_after(before, error))
    }

    /// Runs tokens through the layers, and returns the likeliest `most` tokens after the last.
    fn forward_likeliest(
        &mut self,
        tokens: &[u32],
        length: usize,
        most: usize,
    ) -> Result<Vec<Scored>, RuntimeError> {
        let before = self.cache.len();
        let input = Input { head: self.head.as_ref(), ..Input::new(tokens, self.cache.position(), length) };
        let likeliest = self.decoder.forward_likeliest(&[input], &mut [&mut self.cache], most);
        let rows = likeliest.map_err(|error| self.undo_after(before, error))?;
        Ok(rows.into_iter().next().unwrap_or_default())
    }

    /// Runs tokens through the layers without logits.
    pub(super) fn encode(&mut self, tokens: &[u32], length: usize) -> Result<(), RuntimeError> {
        let before = self.cache.len();
        let input = Input { head: self.head.as_ref(), ..Input::new(tokens, self.cache.position(), length) };
        let done = self.decoder.encode(input, &mut self.cache);
        done.map_err(|error| self.undo_after(before, error))
    }

    fn undo_after(&mut self, before: usize, error: ModelError) -> RuntimeError {
        self.undo_pass(before);
        error.into()
    }
}
