use std::sync::Arc;

use super::{SequenceCache, States};
use crate::page::{PAGE, Page};
use crate::run::{Run, Source};

/// What is remembered of up to [`PAGE`] tokens that sequences begin with, in a page that nobody writes to any more.
#[derive(Debug, Clone)]
pub struct Block {
    page: Arc<Page>,
    tokens: usize,
}

impl Block {
    /// How many tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether nobody else reads it, so that its page goes back to the pool when it is dropped.
    pub fn is_alone(&self) -> bool {
        Arc::strong_count(&self.page) == 1
    }
}

impl SequenceCache {
    /// How many first tokens are remembered as every sequence remembers them that begins with them, to the last bit: nothing
    /// that is hidden or forgotten now was there, and they lie in pages as they come.
    pub fn unaltered(&self) -> usize {
        let mut regular = 0;
        for (index, run) in self.runs.iter().enumerate() {
            let in_page = matches!(run.source, Source::Page(_));
            if !in_page || run.position != index * PAGE || run.slots.start != 0 {
                break;
            }
            regular += run.len();
            if run.len() < PAGE {
                break;
            }
        }
        self.unaltered.min(regular)
    }

    /// Whether all tokens are remembered so, and those to come will be.
    pub fn is_unaltered(&self) -> bool {
        self.goes_on_unaltered() && self.unaltered() == self.len
    }

    pub(super) fn goes_on_unaltered(&self) -> bool {
        let hides = || self.turns().any(|turn| turn.hidden.is_some());
        self.unaltered == self.len && self.position == self.len && !self.mixed && !hides()
    }

    /// The whole blocks among its first [unaltered](Self::unaltered) tokens, which it shares with whoever gets them.
    pub fn blocks(&self) -> Vec<Block> {
        let whole = self.unaltered() / PAGE;
        let pages = self.runs.iter().take(whole).filter_map(|run| match &run.source {
            Source::Page(page) => Some(page),
            Source::Mapped(_) => None,
        });
        pages
            .map(|page| {
                page.keep();
                Block { page: page.clone(), tokens: PAGE }
            })
            .collect()
    }

    /// What of its unaltered tokens comes behind whole blocks: a copy, as the sequence goes on in its own page. Nothing
    /// where there is none, or no page for which nobody would have to give up anything.
    pub fn last_block(&self) -> Option<Block> {
        let unaltered = self.unaltered();
        let tokens = unaltered % PAGE;
        if tokens == 0 {
            return None;
        }
        let run = self.runs.get(unaltered / PAGE)?;
        let Source::Page(from) = &run.source else { return None };
        let page = self.pool.take_idle(tokens)?;
        page.copy(from);
        page.claim(0, tokens);
        page.keep();
        Some(Block { page, tokens })
    }

    /// Places among its unaltered tokens that recurrent layers can go on from, with the states they had there.
    pub fn resting_places(&self) -> Vec<(usize, Arc<States>)> {
        if !self.pool.layout().is_recurrent() {
            return Vec::new();
        }
        let unaltered = self.unaltered();
        let mut at = 0;
        let mut places = Vec::new();
        for entry in self.turns.iter() {
            // What was forgotten right before a turn is still in the states before it.
            if let Some(before) = entry.before.as_ref().filter(|_| 0 < at && at < unaltered) {
                places.push((at, before.clone()));
            }
            at += entry.turn.tokens;
        }
        if self.len > 0 && self.is_unaltered() {
            places.push((self.len, Arc::new(self.states.clone())));
        }
        places
    }

    /// Goes on as if its first `tokens` were those of `blocks`, of which it remembers fewer, and all of these in the same
    /// way. `states` are those of recurrent layers behind them. What it did not remember before belongs to its last turn.
    /// Of a block that is not used as a whole it gets a copy; where there is no page for that, it does without. Returns how
    /// many tokens it remembers now.
    ///
    /// # Panics
    /// If what it remembers was [altered](Self::unaltered).
    pub fn begin_with(&mut self, blocks: &[Block], tokens: usize, states: Option<Arc<States>>) -> usize {
        self.give_up_pass();
        assert!(self.is_unaltered(), "what is remembered was not altered");
        let mut runs = Vec::with_capacity(blocks.len());
        let mut held = 0;
        for Block { page, tokens: room } in blocks {
            let wanted = (tokens - held).min(*room);
            if wanted == PAGE {
                runs.push(Run::new(Source::Page(page.clone()), 0..PAGE, held));
            } else if wanted > 0 {
                match self.copied_page(page, &(0..wanted)) {
                    Ok(page) => runs.push(Run::new(Source::Page(page), 0..wanted, held)),
                    Err(_) => break,
                }
            }
            held += wanted;
        }
        // Recurrent states are those behind all of them.
        if held <= self.len || (states.is_some() && held < tokens) {
            return self.len;
        }
        let added = held - self.len;
        self.count(added);
        if let Some(states) = states {
            self.states = Arc::unwrap_or_clone(states);
        }
        self.runs = Arc::new(runs);
        (self.position, self.unaltered) = (held, held);
        held
    }
}
