//! Prefix blocks that sequences share, and the conditions under which a prefix may be shared.

use std::sync::Arc;

use super::{RecurrentStates, SequenceCache};
use crate::kv_run::{KvRun, Source};
use crate::page::Page;
use crate::page_buffers::PAGE_TOKENS;

/// Up to [`PAGE_TOKENS`] tokens of a shared prefix, in a frozen page.
#[derive(Debug, Clone)]
pub struct Block {
    page: Arc<Page>,
    tokens: usize,
}

impl Block {
    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns whether this is the only reference to its page, so that dropping it frees the page.
    pub fn is_alone(&self) -> bool {
        Arc::strong_count(&self.page) == 1
    }
}

impl SequenceCache {
    /// The length of the prefix that is bit-equal in every sequence that begins with the same tokens: no evicted or hidden
    /// token took part in computing it, and it fills pages in order.
    pub fn pristine_len(&self) -> usize {
        let mut regular = 0;
        for (index, run) in self.runs.iter().enumerate() {
            let in_page = matches!(run.source, Source::Page(_));
            if !in_page || run.position != index * PAGE_TOKENS || run.slots.start != 0 {
                break;
            }
            regular += run.len();
            if run.len() < PAGE_TOKENS {
                break;
            }
        }
        self.pristine.min(regular)
    }

    /// Returns whether all tokens belong to the pristine prefix, and the next ones will.
    pub fn is_pristine(&self) -> bool {
        self.continues_pristine() && self.pristine_len() == self.len
    }

    pub(super) fn continues_pristine(&self) -> bool {
        let hides = || self.turns().any(|turn| turn.hidden.is_some());
        self.pristine == self.len && self.position == self.len && !self.states_tainted && !hides()
    }

    /// The full blocks of the [pristine](Self::pristine_len) prefix, whose pages are frozen and shared.
    pub fn blocks(&self) -> Vec<Block> {
        let whole = self.pristine_len() / PAGE_TOKENS;
        let pages = self.runs.iter().take(whole).filter_map(|run| match &run.source {
            Source::Page(page) => Some(page),
            Source::Mapped(_) => None,
        });
        pages
            .map(|page| {
                page.freeze();
                Block { page: page.clone(), tokens: PAGE_TOKENS }
            })
            .collect()
    }

    /// A copy of the pristine tokens behind the last full block; the sequence itself continues in its own page. `None` if
    /// there are none, or if no page is available without evicting anything.
    pub fn partial_block(&self) -> Option<Block> {
        let pristine = self.pristine_len();
        let tokens = pristine % PAGE_TOKENS;
        if tokens == 0 {
            return None;
        }
        let run = self.runs.get(pristine / PAGE_TOKENS)?;
        let Source::Page(from) = &run.source else { return None };
        let page = self.pool.take_idle(tokens)?;
        page.copy(from);
        page.claim(0, tokens);
        page.freeze();
        Some(Block { page, tokens })
    }

    /// Token counts within the pristine prefix at which recurrent states are known, with those states.
    pub fn recurrent_checkpoints(&self) -> Vec<(usize, Arc<RecurrentStates>)> {
        if !self.pool.layout().is_recurrent() {
            return Vec::new();
        }
        let pristine = self.pristine_len();
        let mut at = 0;
        let mut places = Vec::new();
        for entry in self.turns.iter() {
            // States before a turn include tokens that were evicted right before it.
            if let Some(before) = entry.before.as_ref().filter(|_| 0 < at && at < pristine) {
                places.push((at, before.clone()));
            }
            at += entry.turn.tokens;
        }
        if self.len > 0 && self.is_pristine() {
            places.push((self.len, Arc::new(self.states.clone())));
        }
        places
    }

    /// Replaces the tokens of the cache and those that follow by the first `tokens` of `blocks`, which begin with the same
    /// tokens. `states` are the recurrent states behind them. Newly adopted tokens belong to the last turn. A block that is
    /// used in part is copied; if no page is available for the copy, that block is left out. Returns the number of tokens now
    /// in the cache.
    ///
    /// # Panics
    /// If the cache is not [pristine](Self::is_pristine).
    pub fn adopt_prefix(
        &mut self,
        blocks: &[Block],
        tokens: usize,
        states: Option<Arc<RecurrentStates>>,
    ) -> usize {
        self.discard_pass();
        assert!(self.is_pristine(), "only a pristine cache adopts a prefix");
        let mut runs = Vec::with_capacity(blocks.len());
        let mut held = 0;
        for Block { page, tokens: room } in blocks {
            let wanted = (tokens - held).min(*room);
            if wanted == PAGE_TOKENS {
                runs.push(KvRun::new(Source::Page(page.clone()), 0..PAGE_TOKENS, held));
            } else if wanted > 0 {
                match self.copy_page(page, &(0..wanted)) {
                    Ok(page) => runs.push(KvRun::new(Source::Page(page), 0..wanted, held)),
                    Err(_) => break,
                }
            }
            held += wanted;
        }
        // Recurrent states are valid only behind all `tokens`.
        if held <= self.len || (states.is_some() && held < tokens) {
            return self.len;
        }
        let added = held - self.len;
        self.add_tokens(added);
        if let Some(states) = states {
            self.states = Arc::unwrap_or_clone(states);
        }
        self.runs = Arc::new(runs);
        (self.position, self.pristine) = (held, held);
        held
    }
}
