//! Finds what sequences of one model begin with in common, so that it is computed once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn::tensor::DType;
use firebox_cache::{Block, PagePool, Reclaimable, RecurrentState, RecurrentStates};
use firebox_model::Decoder;

use super::blocks::{Key, Match, Tree};
use crate::{Account, Budget, Session};

/// The least number of tokens that a stop in the middle of a prompt must save other sequences.
const MIN_STOP_TOKENS: usize = 64;

/// Limits what a [`PrefixTree`] keeps.
#[derive(Debug, Clone)]
pub struct PrefixLimits {
    /// The most pages of the pool. They return to the pool as soon as a sequence needs them.
    pub pages: usize,
    /// The most bytes of recurrent states, for models that have any.
    pub state_bytes: u64,
    /// The budget that recurrent states are charged to, as [streams](Account::Streams). States that it has no room for are not
    /// kept.
    pub budget: Option<Budget>,
}

impl Default for PrefixLimits {
    fn default() -> Self {
        Self { pages: usize::MAX, state_bytes: 256 << 20, budget: None }
    }
}

/// The part of a prompt that a session got from a [`PrefixTree`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixHit {
    /// How many of the first tokens need not be fed; never all of them.
    pub tokens: usize,
    /// After how many of the tokens recurrent states would be useful that were not kept, because another sequence continued
    /// differently there: feed the tokens up to there, [insert](PrefixTree::insert) the session, and feed the rest.
    pub stop: Option<usize>,
}

/// The contents of a [`PrefixTree`], and how often they were useful.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixStats {
    /// Pages in the tree.
    pub pages: usize,
    /// Bytes of recurrent states in the tree.
    pub state_bytes: u64,
    /// Lookups.
    pub lookups: u64,
    /// Lookups that found something.
    pub hits: u64,
    /// Tokens that were looked up.
    pub lookup_tokens: u64,
    /// Tokens that were found.
    pub hit_tokens: u64,
    /// Pages that were evicted to make room.
    pub evicted: u64,
}

/// A tree of what sequences of one model began with, by their tokens. A session that begins like one of them shares its pages
/// and computes only the rest. Clones share one tree.
///
/// Sessions share only what is equal for both: model, pool, head and its generation, adapter, meaning of positions, and
/// `scope`, which separates clients that must not learn of each other. And only what was computed with nothing else in the
/// cache: nothing is kept from the first hidden or removed token on. So a session continues as if it had computed what it
/// got, on the CPU to the last bit; on accelerators as if it had been fed in chunks.
///
/// Full pages are shared. If a sequence continues differently in the middle of a page, that page is copied into the one that
/// the next token needs anyway. Before anything else makes room for a sequence, or it is refused, the pool takes its pages
/// back; models that share memory and are idle give back theirs first.
///
/// ```no_run
/// # use firebox_runtime::{Model, PagePool, PrefixLimits, PrefixTree, RuntimeError, Session, KvType};
/// # fn answer(model: &Model, prompt: &[u32]) -> Result<(), RuntimeError> {
/// let decoder = model.decoder()?;
/// let pool = PagePool::new(decoder.layout(KvType::default()));
/// let tree = PrefixTree::new(&decoder, &pool, PrefixLimits::default());
/// let mut session = Session::in_pool(decoder, &pool);
/// let hit = tree.begin(&mut session, "scope", prompt);
/// let logits = session.feed(&prompt[hit.tokens..])?;
/// tree.insert(&session, "scope");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct PrefixTree(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    decoder: Weak<Decoder>,
    pool: PagePool,
    limits: PrefixLimits,
    // Take no page while holding this lock: for a page, the pool may take one of the tree's.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    tree: Tree,
    stats: PrefixStats,
}

impl PrefixTree {
    /// Creates an empty tree for sessions of a model that take their pages from `pool`.
    pub fn new(decoder: &Arc<Decoder>, pool: &PagePool, limits: PrefixLimits) -> Self {
        let decoder = Arc::downgrade(decoder);
        let shared = Arc::new(Shared { decoder, pool: pool.clone(), limits, state: Mutex::default() });
        let weak: Weak<Shared> = Arc::downgrade(&shared);
        pool.register_reclaimable(weak);
        Self(shared)
    }

    /// Gives a session that is to be fed `tokens` what is known of them. The first of them are then part of its last turn,
    /// and the caller feeds the others.
    pub fn begin(&self, session: &mut Session, scope: &str, tokens: &[u32]) -> PrefixHit {
        let hit = self.look_up(session, scope, tokens);
        let stats = &mut self.state().stats;
        stats.lookups += 1;
        stats.hits += u64::from(hit.tokens > 0);
        stats.lookup_tokens += tokens.len() as u64;
        stats.hit_tokens += hit.tokens as u64;
        hit
    }

    fn look_up(&self, session: &mut Session, scope: &str, tokens: &[u32]) -> PrefixHit {
        let Some((length, epoch)) = session.can_share(tokens.len()).filter(|_| self.fits(session)) else {
            return PrefixHit::default();
        };
        let before = session.tokens.len();
        let all = [&session.tokens, tokens].concat();
        let key = Key { scope: scope.into(), head: session.head_id(), epoch };
        // The last token is always fed, for its logits.
        let Match { blocks, known, states } = self.state().tree.find(&key, &all[..all.len() - 1]);
        let is_recurrent = self.0.pool.layout().is_recurrent();
        let (found, states) = match states {
            _ if !is_recurrent => (known, None),
            Some((at, states)) => (at, Some(states)),
            None => (0, None),
        };
        let had = session.cache.len();
        let has = if found > had { session.adopt_prefix(&blocks, found, states, length) } else { had };
        if has > had {
            session.tokens = all;
            session.tokens.truncate(has.max(before));
        }
        let reused = has.max(had).saturating_sub(before);
        let stop = known.saturating_sub(before);
        PrefixHit {
            tokens: reused,
            stop: (is_recurrent && known >= has + MIN_STOP_TOKENS && stop < tokens.len()).then_some(stop),
        }
    }

    /// Keeps what a session has computed so far, up to the first token that other sessions would compute differently. Call it
    /// at the end of a prompt, at the end of an answer, and where [`begin`](Self::begin) says to stop. It costs a lookup, and
    /// a copy of the last page if that is not full.
    pub fn insert(&self, session: &Session, scope: &str) {
        let pristine_len = session.cache.pristine_len();
        let Some(head) = session.cached_head.clone().filter(|_| pristine_len > 0 && self.fits(session))
        else {
            return;
        };
        let key = Key { scope: scope.into(), head, epoch: session.epoch() };
        let tokens = &session.tokens[..pristine_len];
        let is_known = self.state().tree.covers(&key, tokens);
        let mut blocks = session.cache.blocks();
        if !is_known {
            blocks.extend(session.cache.partial_block());
        }
        let held = blocks.iter().map(Block::tokens).sum();
        let mut state = self.state();
        let tokens = if is_known { tokens } else { &tokens[..held] };
        state.tree.insert(&key, &tokens[..held], blocks);
        for (at, states) in
            session.cache.recurrent_checkpoints().into_iter().filter(|(at, _)| *at <= tokens.len())
        {
            let bytes = states_bytes(&states);
            let charge = || match &self.0.limits.budget {
                Some(budget) => budget.charge(Account::Streams, bytes).ok().map(Some),
                None => Some(None),
            };
            state.tree.insert_states(&key, &tokens[..at], states, bytes, charge);
        }
        while state.tree.state_bytes() > self.0.limits.state_bytes && state.tree.evict_states() {}
        while state.tree.pages() > self.0.limits.pages {
            state.stats.evicted += state.tree.evict(|_| true) as u64;
        }
    }

    /// Removes everything.
    pub fn clear(&self) {
        self.state().tree = Tree::default();
    }

    /// Returns its contents, and how often they were useful.
    pub fn stats(&self) -> PrefixStats {
        let state = self.state();
        PrefixStats { pages: state.tree.pages(), state_bytes: state.tree.state_bytes(), ..state.stats }
    }

    /// Returns whether a session has this tree's model and pool.
    fn fits(&self, session: &Session) -> bool {
        std::ptr::eq(self.0.decoder.as_ptr(), Arc::as_ptr(&session.decoder))
            && session.cache.pool().is(&self.0.pool)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reclaimable for Shared {
    fn reclaim_page(&self) -> bool {
        let mut state = self.state();
        let evicted = state.tree.evict(Block::is_alone);
        state.stats.evicted += evicted as u64;
        evicted > 0
    }

    fn reclaim_all(&self) {
        let mut state = self.state();
        state.stats.evicted += state.tree.pages() as u64;
        state.tree = Tree::default();
    }
}

fn states_bytes(states: &RecurrentStates) -> u64 {
    let bytes = |dtype: DType, count: usize| (dtype.size() * count) as u64;
    let of = |state: &RecurrentState| {
        let memory =
            state.memory.as_ref().map_or(0, |memory| bytes(memory.dtype(), memory.shape().num_elements()));
        let convolution = state.convolution.as_ref();
        memory + convolution.map_or(0, |inputs| bytes(inputs.dtype(), inputs.shape().num_elements()))
    };
    states.iter().flatten().map(of).sum()
}

impl Session {
    /// Returns the length and the epoch of the session with `added` more tokens, or `None` if it differs from a fresh session
    /// with its tokens, or has no room for more.
    fn can_share(&self, added: usize) -> Option<(usize, usize)> {
        let length = self.expected_length.max(self.cache.position() + self.uncached_tokens() + added);
        let epoch = self.decoder.config().position_epoch(length);
        let is_current =
            self.cache.is_empty() || (self.cached_head == Some(self.head_id()) && self.epoch() == epoch);
        let has_blocks = self.head().is_none_or(|head| head.has_blocks());
        let layers = self.decoder.layout(self.cache.pool().layout().kv_dtype).layers;
        let shares = added > 0
            && !self.needs_recompute()
            && self.cache.is_pristine()
            && is_current
            && has_blocks
            && layers == self.cache.pool().layout().layers
            && self.uncached_tokens() + added <= self.turn_room();
        shares.then_some((length, epoch))
    }

    /// Begins with blocks of the tree. See [`adopt_prefix`](firebox_cache::SequenceCache::adopt_prefix).
    fn adopt_prefix(
        &mut self,
        blocks: &[Block],
        tokens: usize,
        states: Option<Arc<RecurrentStates>>,
        length: usize,
    ) -> usize {
        self.begin_turn_if_closed();
        let has = self.cache.adopt_prefix(blocks, tokens, states);
        self.encoded_length = length;
        self.cached_head = Some(self.head_id());
        has
    }
}

#[cfg(test)]
mod tests;
