//! What a session has lost of what it remembered, and how that comes back.

use std::ops::Range;

use firebox_cache::Turn;
use firebox_model::Input;

use crate::{RuntimeError, Session};

/// Tokens of a sequence that a pass takes next.
#[derive(Debug, Clone)]
pub(crate) struct Due {
    pub tokens: Range<usize>,
    /// How long the sequence is known to become.
    pub length: usize,
}

impl Session {
    /// Whether what it remembers comes out the same when it is computed again, to the last bit: nothing was ever forgotten,
    /// hidden or shown again that later tokens have seen, or not.
    pub(crate) fn can_lose(&self) -> bool {
        self.cache.is_pristine()
    }

    /// Empties the cache. What was visible stays to be found again.
    pub(crate) fn lose(&mut self) {
        self.lose_but(0);
    }

    /// The same where the last turn has not got so many of the tokens that the cache has seen.
    fn lose_but(&mut self, tokens: usize) {
        let mut turns: Vec<Turn> = self.cache.turns().cloned().collect();
        if let Some(turn) = turns.last_mut() {
            turn.tokens += std::mem::take(&mut self.finding);
            turn.tokens -= tokens;
        }
        turns.retain(|turn| turn.hidden.is_none());
        self.lost.splice(0..0, turns);
        let mut visible = self.cache.visible();
        self.tokens.retain(|_| visible.next().unwrap_or(true));
        drop(visible);
        self.cache.clear();
    }

    /// All turns that are remembered, in order, those included that are computed again before the next token.
    pub fn all_turns(&self) -> impl Iterator<Item = &Turn> {
        self.cache.turns().chain(&self.lost)
    }

    /// Whether the cache lacks turns that were lost.
    pub(crate) fn has_lost(&self) -> bool {
        self.finding > 0 || !self.lost.is_empty()
    }

    /// Takes what was lost through the layers again.
    pub(crate) fn find(&mut self, length: usize) -> Result<(), RuntimeError> {
        let mut pieces = 0;
        while let Some(piece) = self.next_lost(self.chunk) {
            self.check_cancelled(pieces)?;
            pieces += 1;
            let piece = self.tokens[piece].to_vec();
            self.encode(&piece, length)?;
            self.found(piece.len());
        }
        Ok(())
    }

    /// The next tokens of what was lost, at most `most` and all of one turn, which is the cache's last from then on.
    fn next_lost(&mut self, most: usize) -> Option<Range<usize>> {
        let start = self.cache.len();
        while self.finding == 0 {
            if self.lost.is_empty() {
                return None;
            }
            let turn = self.lost.remove(0);
            // The sequence may have gone back behind a turn, or into it, before it was lost.
            let left = turn.tokens.min(self.behind());
            if turn.tokens == 0 || left > 0 {
                self.cache.resume_turn(turn);
            }
            self.finding = left;
        }
        Some(start..start + self.finding.min(most))
    }

    /// Some of what was lost, or of what came after it, has been through the layers.
    pub(crate) fn found(&mut self, tokens: usize) {
        self.finding -= self.finding.min(tokens);
    }

    /// The next of the accepted tokens that go through the layers, at most `most`, with what is remembered brought to
    /// mean what it means for them. A pass takes them that somebody else runs.
    pub(crate) fn due(&mut self, most: usize) -> Result<Due, RuntimeError> {
        let mut length = self.align(0)?;
        let mut lost = self.next_lost(most);
        if lost.is_none() {
            self.go_on_with_a_turn();
            if self.make_room(self.behind())? {
                length = self.align(0)?;
                lost = self.next_lost(most);
            }
        }
        let next = || self.cache.len()..self.tokens.len().min(self.cache.len().saturating_add(most));
        Ok(Due { tokens: lost.unwrap_or_else(next), length })
    }

    /// Those tokens, for a pass.
    pub(crate) fn input<'s>(&'s self, due: &Due) -> Input<'s> {
        let head = self.head();
        Input { head, ..Input::new(&self.tokens[due.tokens.clone()], self.cache.position(), due.length) }
    }

    /// Forgets what a pass that failed has left in the cache, which had `before` tokens.
    pub(crate) fn forget_pass(&mut self, before: usize) {
        let added = self.cache.len() - before;
        if added == 0 {
            if !self.cache.abort_pass() {
                // Some layers have seen the tokens and others not.
                self.lose();
            }
            return;
        }
        // All layers have seen the tokens, and the logits could not be computed.
        let turn = self.cache.turns().last().cloned();
        if !self.cache.rewind(before) {
            self.lose_but(added);
        } else if let Some(turn) =
            turn.filter(|turn| self.cache.turns().last().is_none_or(|last| last.id != turn.id))
        {
            // It had no tokens yet.
            self.cache.resume_turn(Turn { tokens: 0, ..turn });
        }
    }
}
