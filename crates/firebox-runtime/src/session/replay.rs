//! Makes a session's cache whole again: recomputes turns whose keys and values were dropped, and replays another head over the
//! trunk's states.

use std::ops::Range;

use firebox_cache::{Turn, TurnKind};
use firebox_model::Input;

use super::Session;
use crate::RuntimeError;

/// The tokens of a sequence that the next pass takes.
#[derive(Debug, Clone)]
pub struct NextChunk {
    /// Their range in the sequence.
    pub tokens: Range<usize>,
    /// The length that the sequence is expected to reach.
    pub length: usize,
}

impl Session {
    /// Recomputes all visible tokens, as if no others had ever been there. Hidden turns are removed.
    pub fn recompute(&mut self) -> Result<(), RuntimeError> {
        self.drop_cache();
        self.rebuild(0).map(drop)
    }

    /// Returns whether recomputing the cache would give the same bits: no token was removed, hidden or shown after later
    /// tokens were computed with or without it.
    pub fn is_reproducible(&self) -> bool {
        self.cache.is_pristine()
    }

    /// Empties the cache. Visible turns stay, to be recomputed with the next feed; hidden ones are removed.
    pub fn drop_cache(&mut self) {
        self.drop_cache_after_failure(0);
    }

    /// Empties the cache, whose last turn has got `failed` tokens from a pass that failed.
    fn drop_cache_after_failure(&mut self, failed: usize) {
        let mut turns: Vec<Turn> = self.cache.turns().cloned().collect();
        if let Some(turn) = turns.last_mut() {
            turn.tokens += std::mem::take(&mut self.recomputing);
            turn.tokens -= failed;
        }
        turns.retain(|turn| turn.hidden.is_none());
        self.uncached_turns.splice(0..0, turns);
        let mut visible = self.cache.visible();
        self.tokens.retain(|_| visible.next().unwrap_or(true));
        drop(visible);
        self.cache.clear();
    }

    /// Returns all turns in order, those included whose cache was dropped.
    pub fn all_turns(&self) -> impl Iterator<Item = &Turn> {
        self.cache.turns().chain(&self.uncached_turns)
    }

    /// Returns whether turns are without a cache.
    pub(crate) fn needs_recompute(&self) -> bool {
        self.recomputing > 0 || !self.uncached_turns.is_empty()
    }

    /// Runs turns without a cache through the layers.
    pub(super) fn recompute_uncached(&mut self, length: usize) -> Result<(), RuntimeError> {
        let mut chunks = 0;
        while let Some(chunk) = self.next_to_recompute(self.chunk) {
            self.check_cancelled(chunks)?;
            chunks += 1;
            let chunk = self.tokens[chunk].to_vec();
            self.encode(&chunk, length)?;
            self.recomputed(chunk.len());
        }
        Ok(())
    }

    /// Returns the next tokens of turns without a cache: at most `most`, all of one turn, which becomes the cache's last turn.
    fn next_to_recompute(&mut self, most: usize) -> Option<Range<usize>> {
        let start = self.cache.len();
        while self.recomputing == 0 {
            if self.uncached_turns.is_empty() {
                return None;
            }
            let turn = self.uncached_turns.remove(0);
            // The sequence may have been rewound to before the turn, or into it.
            let left = turn.tokens.min(self.uncached_tokens());
            if turn.tokens == 0 || left > 0 {
                self.cache.resume_turn(turn);
            }
            self.recomputing = left;
        }
        Some(start..start + self.recomputing.min(most))
    }

    /// Notes that `tokens` went through the layers, whether of turns without a cache or after them.
    pub fn recomputed(&mut self, tokens: usize) {
        self.recomputing -= self.recomputing.min(tokens);
    }

    /// Prepares the next of the accepted tokens, at most `most`, for a pass that the caller runs: the cache is up to date for
    /// them, and turns that leave no room are evicted. The pass needs [pages](Self::reserve_pages) for it.
    pub fn next_chunk(&mut self, most: usize) -> Result<NextChunk, RuntimeError> {
        let mut length = self.refresh_epoch(0)?;
        let mut recompute = self.next_to_recompute(most);
        if recompute.is_none() {
            self.begin_turn_if_closed();
            if self.evict_turns(self.uncached_tokens())? {
                length = self.refresh_epoch(0)?;
                recompute = self.next_to_recompute(most);
            }
        }
        let next = || self.cache.len()..self.tokens.len().min(self.cache.len().saturating_add(most));
        Ok(NextChunk { tokens: recompute.unwrap_or_else(next), length })
    }

    /// Reserves the pages that a pass over a chunk fills.
    pub fn reserve_pages(&mut self, chunk: &NextChunk) -> Result<(), RuntimeError> {
        Ok(self.cache.reserve(chunk.tokens.len())?)
    }

    /// Returns the input of a pass over a chunk.
    pub(super) fn chunk_input<'s>(&'s self, chunk: &NextChunk) -> Input<'s> {
        let head = self.head();
        Input { head, ..Input::new(&self.tokens[chunk.tokens.clone()], self.cache.position(), chunk.length) }
    }

    /// Removes from the cache what a failed pass left there. Before the pass it had `before` tokens.
    pub fn undo_pass(&mut self, before: usize) {
        let added = self.cache.len() - before;
        if added == 0 {
            if !self.cache.abort_pass() {
                // Some layers have computed the tokens and others have not.
                self.drop_cache();
            }
            return;
        }
        // All layers have computed the tokens, and the logits failed.
        let turn = self.cache.turns().last().cloned();
        if !self.cache.rewind(before) {
            self.drop_cache_after_failure(added);
        } else if let Some(turn) =
            turn.filter(|turn| self.cache.turns().last().is_none_or(|last| last.id != turn.id))
        {
            // The turn had no tokens before the pass.
            self.cache.resume_turn(Turn { tokens: 0, ..turn });
        }
    }

    /// Recomputes the cached layers behind the split with the session's head, if another head computed them. The trunk does
    /// not run.
    pub(super) fn replay_head(&mut self, length: usize) -> Result<(), RuntimeError> {
        let id = self.head_id();
        if self.cached_head.as_ref() == Some(&id) {
            return Ok(());
        }
        let has_blocks = self.head.as_ref().is_none_or(|head| head.has_blocks());
        let layers = self.decoder.layout(self.cache.pool().layout().kv_dtype).layers;
        if layers != self.cache.pool().layout().layers {
            // The cache has no states of the trunk yet.
            self.drop_cache();
            let layout = self.decoder.layout(self.cache.pool().layout().kv_dtype);
            self.cache = self.cache.restarted_in(&self.cache.pool().with_layout(layout));
        }
        if !has_blocks {
            // The head caches nothing.
            self.cached_head = None;
            return Ok(());
        }
        if !self.cache.is_empty() {
            let chunks = self.decoder.begin_replay(&mut self.cache, self.chunk)?;
            self.cached_head = None;
            let head = self.head.as_ref();
            self.decoder.replay(head, &self.tokens, length, chunks, &mut self.cache)?;
        }
        self.cached_head = Some(id);
        Ok(())
    }

    /// Begins a turn if the last one takes no more tokens: facts and hidden turns do not.
    pub(crate) fn begin_turn_if_closed(&mut self) {
        let is_closed = |turn: &Turn| turn.kind == TurnKind::Fact || turn.hidden.is_some();
        if self.cache.turns().last().is_some_and(is_closed) {
            self.cache.begin_turn(TurnKind::Turn, Vec::new());
        }
    }
}
