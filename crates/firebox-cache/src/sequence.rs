//! The cache of one sequence: its runs of positions, its turns and its recurrent states.

use std::ops::Range;
use std::sync::Arc;

use crate::error::CacheError;
use crate::kv_run::{KvRun, Source};
use crate::layer_kv::LayerKv;
use crate::layout::{LayerLayout, Layout};
use crate::pool::PagePool;
use crate::recurrent_state::RecurrentState;
use crate::turn::{HiddenReason, Role, Turn, TurnId, TurnKind};

mod branch;
mod compact;
mod layer;
mod outline;
mod page_table;
mod pages;
mod prefix;
mod replay;

pub use layer::{AttentionCache, LayerCache, TransientKv};
pub use outline::{Outline, SlotRange};
pub use page_table::PageTable;
pub use prefix::Block;
pub use replay::Replay;

/// The cache of one sequence, layer by layer.
///
/// A clone is a branch: it shares all pages, is cheap to make, and continues independently.
///
/// Tokens are counted from the first one in the cache. Positions differ from that count once tokens were evicted: their
/// positions stay unused until [`compact_positions`](Self::compact_positions) closes the gaps.
#[derive(Debug, Clone)]
pub struct SequenceCache {
    pool: PagePool,
    /// All cached positions in order, followed by those reserved for the pass under way.
    runs: Arc<Vec<KvRun>>,
    turns: Arc<Vec<Entry>>,
    /// Recurrent states by layer.
    states: RecurrentStates,
    len: usize,
    position: usize,
    /// Tokens of the pass under way.
    pending: usize,
    next_turn: u64,
    /// The length of the prefix that was computed as if nothing evicted or hidden had ever been there.
    pristine: usize,
    /// Whether recurrent states have absorbed tokens that are no longer in the cache.
    states_tainted: bool,
}

/// Recurrent states by layer.
pub type RecurrentStates = Vec<Option<RecurrentState>>;

/// A turn, and the states to rewind to.
#[derive(Debug, Clone)]
struct Entry {
    turn: Turn,
    /// Recurrent states before its first token, if the model has any.
    before: Option<Arc<RecurrentStates>>,
}

impl SequenceCache {
    /// Creates an empty cache.
    pub fn new(pool: &PagePool) -> Self {
        Self {
            runs: Arc::default(),
            turns: Arc::default(),
            states: fresh_states(pool.layout()),
            len: 0,
            position: 0,
            pending: 0,
            next_turn: 0,
            pristine: 0,
            states_tainted: false,
            pool: pool.clone(),
        }
    }

    /// The pool that its pages come from.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// The number of tokens in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it holds no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The position of the next token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The positions of the cached tokens, in order.
    pub fn positions(&self) -> impl Iterator<Item = Range<usize>> {
        self.runs.iter().map(|run| run.position..run.end())
    }

    /// Bytes of the pages it refers to, shared ones included.
    pub fn bytes(&self) -> usize {
        let pages = self.runs.iter().filter_map(|run| match &run.source {
            Source::Page(page) => Some((Arc::as_ptr(page), page.bytes())),
            Source::Mapped(_) => None,
        });
        let mut pages: Vec<_> = pages.collect();
        pages.sort_unstable();
        pages.dedup_by_key(|(page, _)| *page);
        pages.into_iter().map(|(_, bytes)| bytes).sum()
    }

    /// Its turns, in order. Tokens added before any turn was begun belong to an implicit first turn.
    pub fn turns(&self) -> impl ExactSizeIterator<Item = &Turn> {
        self.turns.iter().map(|entry| &entry.turn)
    }

    /// The token range of a turn.
    pub fn tokens_of(&self, turn: TurnId) -> Result<Range<usize>, CacheError> {
        let mut start = 0;
        for held in self.turns() {
            if held.id == turn {
                return Ok(start..start + held.tokens);
            }
            start += held.tokens;
        }
        Err(CacheError::NoSuchTurn { turn })
    }

    /// For each token in order, whether later tokens attend to it.
    pub fn visible(&self) -> impl Iterator<Item = bool> {
        self.turns().flat_map(|turn| std::iter::repeat_n(turn.hidden.is_none(), turn.tokens))
    }

    /// Begins a turn; the next tokens belong to it.
    pub fn begin_turn(&mut self, kind: TurnKind, roles: Vec<Role>) -> TurnId {
        let id = TurnId(self.next_turn);
        self.resume_turn(Turn::new(id, kind, roles));
        id
    }

    /// Begins a turn with the id and attributes of an earlier one, without its tokens.
    pub fn resume_turn(&mut self, turn: Turn) {
        let before = self.pool.layout().is_recurrent().then(|| Arc::new(self.states.clone()));
        self.next_turn = self.next_turn.max(turn.id.0 + 1);
        let turns = Arc::make_mut(&mut self.turns);
        turns.retain(|entry| entry.turn.tokens > 0);
        turns.push(Entry { turn: Turn { tokens: 0, ..turn }, before });
    }

    /// Exempts a turn from eviction, or revokes that.
    pub fn pin(&mut self, turn: TurnId, pinned: bool) -> Result<(), CacheError> {
        self.turn(turn)?.pinned = pinned;
        Ok(())
    }

    /// Sets the relevance of a turn to the current topic.
    pub fn set_relevance(&mut self, turn: TurnId, relevance: f32) -> Result<(), CacheError> {
        self.turn(turn)?.relevance = relevance;
        Ok(())
    }

    /// Hides a turn from later tokens, or shows it again.
    pub fn hide(&mut self, turn: TurnId, hidden: Option<HiddenReason>) -> Result<(), CacheError> {
        let held = self.turn(turn)?;
        if held.hidden != hidden {
            held.hidden = hidden;
            self.refresh_visibility();
        }
        Ok(())
    }

    /// Evicts a turn. Returns its token range.
    pub fn evict_turn(&mut self, turn: TurnId) -> Result<Range<usize>, CacheError> {
        let tokens = self.tokens_of(turn)?;
        self.evict(tokens.clone());
        Arc::make_mut(&mut self.turns).retain(|entry| entry.turn.id != turn);
        Ok(tokens)
    }

    /// Evicts tokens. The rest keeps its positions, and recurrent states keep what they absorbed.
    pub fn evict(&mut self, tokens: Range<usize>) {
        self.discard_pass();
        let tokens = tokens.start.min(self.len)..tokens.end.min(self.len);
        if tokens.is_empty() {
            return;
        }
        let (mut runs, mut at) = (Vec::with_capacity(self.runs.len() + 1), 0);
        for run in self.runs.iter() {
            let (from, to) = (at, at + run.len());
            let start = tokens.start.clamp(from, to) - from;
            let end = tokens.end.clamp(from, to) - from;
            let parts = [0..start, end..run.len()];
            runs.extend(parts.into_iter().filter(|part| !part.is_empty()).map(|part| run.part(part)));
            at = to;
        }
        self.runs = Arc::new(runs);
        let mut at = 0;
        Arc::make_mut(&mut self.turns).retain_mut(|entry| {
            let held = at..at + entry.turn.tokens;
            at = held.end;
            let lost = tokens.end.min(held.end).saturating_sub(tokens.start.max(held.start));
            entry.turn.tokens -= lost;
            entry.turn.tokens > 0 || held.is_empty()
        });
        self.len -= tokens.len();
        self.pristine = self.pristine.min(tokens.start);
        self.states_tainted |= self.pool.layout().is_recurrent();
        self.refresh_visibility();
    }

    /// Truncates to the first `len` tokens. Returns whether that was possible: with recurrent layers, a sequence can only be
    /// rewound to the beginning of a turn. Positions continue from the new end.
    pub fn rewind(&mut self, len: usize) -> bool {
        let whole = self.abort_pass();
        if len == 0 {
            self.clear();
            return true;
        }
        if len > self.len || (len == self.len && !whole) {
            return false;
        }
        if len == self.len {
            return true;
        }
        if self.pool.layout().is_recurrent() {
            let mut start = 0;
            let mut starts = self.turns.iter().map(|entry| {
                start += entry.turn.tokens;
                (start - entry.turn.tokens, entry)
            });
            let before = starts.find(|(start, entry)| *start == len && entry.turn.tokens > 0);
            match before.and_then(|(_, entry)| entry.before.clone()) {
                Some(before) => self.states = before.as_ref().clone(),
                None => return false,
            }
            self.states_tainted = len >= self.pristine;
        }
        self.truncate(len);
        true
    }

    /// Truncates to the first `len` tokens, if there are more, and restores the given [`states`](Self::states) of recurrent
    /// layers.
    pub fn restore_states(&mut self, len: usize, states: Vec<Option<RecurrentState>>) {
        self.discard_pass();
        self.states = states;
        if len < self.len {
            self.truncate(len);
        }
    }

    fn truncate(&mut self, len: usize) {
        self.position = self.position_of(len);
        self.truncate_runs(len);
        let mut left = len;
        Arc::make_mut(&mut self.turns).retain_mut(|entry| {
            let any = left > 0 && entry.turn.tokens > 0;
            entry.turn.tokens = entry.turn.tokens.min(left);
            left -= entry.turn.tokens;
            any
        });
        self.len = len;
        self.pristine = self.pristine.min(len);
    }

    /// Discards a pass that has not gone through all layers. Returns whether the cache is as it was before the pass;
    /// recurrent states are not restored.
    pub fn abort_pass(&mut self) -> bool {
        let torn = self.pending > 0 && self.pool.layout().is_recurrent();
        self.discard_pass();
        !torn
    }

    /// An empty cache with pages of another pool that continues the numbering of turns.
    pub fn restarted_in(&self, pool: &PagePool) -> Self {
        Self { next_turn: self.next_turn, ..Self::new(pool) }
    }

    /// Removes everything, turns included, and returns the pages to the pool.
    pub fn clear(&mut self) {
        self.runs = Arc::default();
        self.turns = Arc::default();
        self.states = fresh_states(self.pool.layout());
        (self.len, self.position, self.pending) = (0, 0, 0);
        (self.pristine, self.states_tainted) = (0, false);
    }

    /// Recurrent states, by layer.
    pub fn states(&self) -> &[Option<RecurrentState>] {
        &self.states
    }

    /// The stored tensors of one layer, run by run; `None` if the layer stores nothing in pages.
    pub fn stored(&self, layer: usize) -> Option<Vec<LayerKv>> {
        self.runs.iter().map(|run| run.read(layer)).collect()
    }

    /// Completes the pass: the tokens that slots were reserved for have gone through all layers.
    pub fn advance(&mut self) {
        let goes_on = self.continues_pristine();
        self.position += self.pending;
        let count = std::mem::take(&mut self.pending);
        self.add_tokens(count);
        if goes_on {
            self.pristine = self.len;
        }
    }

    fn add_tokens(&mut self, tokens: usize) {
        if self.turns.is_empty() {
            self.begin_turn(TurnKind::Turn, Vec::new());
        }
        self.len += tokens;
        if let Some(entry) = Arc::make_mut(&mut self.turns).last_mut() {
            entry.turn.tokens += tokens;
        }
    }

    fn turn(&mut self, turn: TurnId) -> Result<&mut Turn, CacheError> {
        let entry = Arc::make_mut(&mut self.turns).iter_mut().find(|entry| entry.turn.id == turn);
        entry.map(|entry| &mut entry.turn).ok_or(CacheError::NoSuchTurn { turn })
    }

    /// The position of a cached token.
    fn position_of(&self, token: usize) -> usize {
        let mut at = 0;
        for run in self.runs.iter() {
            if token < at + run.len() {
                return run.position + token - at;
            }
            at += run.len();
        }
        self.position
    }

    fn discard_pass(&mut self) {
        if self.pending > 0 {
            self.pending = 0;
            self.truncate_runs(self.len);
        }
    }

    /// Drops all runs behind the first `len` tokens.
    fn truncate_runs(&mut self, len: usize) {
        let mut left = len;
        Arc::make_mut(&mut self.runs).retain_mut(|run| {
            let kept = run.len().min(left);
            run.slots.end = run.slots.start + kept;
            left -= kept;
            kept > 0
        });
    }

    /// Recomputes which slots of every run later tokens may attend to.
    fn refresh_visibility(&mut self) {
        let hides = self.turns().any(|turn| turn.hidden.is_some());
        if !hides && !self.runs.iter().any(|run| run.hidden || run.visible.is_some()) {
            return;
        }
        let mut visible: Vec<bool> = self.visible().collect();
        visible.resize(self.len + self.pending, true);
        let mut at = 0;
        for run in Arc::make_mut(&mut self.runs) {
            let seen = &visible[at..at + run.len()];
            at += run.len();
            run.hidden = !seen.contains(&true);
            run.visible = (!run.hidden && seen.contains(&false)).then(|| seen.iter().copied().collect());
        }
    }
}

fn fresh_states(layout: &Layout) -> RecurrentStates {
    let state = |layer: &LayerLayout| matches!(layer, LayerLayout::Recurrent).then(RecurrentState::default);
    layout.layers.iter().map(state).collect()
}
