//! What sequences of one model begin with, found again by itself.

mod tree;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn::tensor::DType;
use firebox_cache::{Block, PagePool, Reclaimable, RecurrentState, RecurrentStates};
use firebox_model::Decoder;

use crate::{Account, Budget, Session};
use tree::{Key, Match, Tree};

/// Tokens that are worth a stop in the middle of a prompt, for recurrent states that others can go on from.
const WORTH_A_STOP: usize = 64;

/// How much is kept of what sequences began with.
#[derive(Debug, Clone)]
pub struct PrefixLimits {
    /// Pages of the pool at most. They go back to it as soon as somebody needs them.
    pub pages: usize,
    /// Bytes of recurrent states at most, where the model has any.
    pub state_bytes: u64,
    /// What recurrent states are charged to, as [streams](Account::Streams): none are kept that it has no room for.
    pub budget: Option<Budget>,
}

impl Default for PrefixLimits {
    fn default() -> Self {
        Self { pages: usize::MAX, state_bytes: 256 << 20, budget: None }
    }
}

/// What a session has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Begun {
    /// How many of the tokens need not be fed: the first ones, and never all.
    pub tokens: usize,
    /// Behind how many of the tokens recurrent states would be of use that nobody has kept, since another sequence went
    /// on differently there: feed up to there, [keep](PrefixTree::keep) the session, and feed the rest.
    pub stop: Option<usize>,
}

/// What a tree has, and what it was good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixStats {
    /// Pages that it has.
    pub pages: usize,
    /// Bytes of recurrent states that it has.
    pub state_bytes: u64,
    /// How often a session was begun.
    pub asked: u64,
    /// How often anything was found.
    pub found: u64,
    /// Tokens that sessions were begun with.
    pub asked_tokens: u64,
    /// How many of these had not to be computed.
    pub found_tokens: u64,
    /// Pages that went to make room.
    pub evicted: u64,
}

/// What sequences of one model began with, by their tokens: a session that begins like one of them shares its pages and
/// computes only the rest. Clones are the same tree.
///
/// Only what means the same is shared: with the same model, pool, head and generation, adapter, meaning of positions, and
/// the same `scope`, which tells those apart who must not notice each other. And only what was computed
/// with nothing else there: behind the first token that is hidden or gone, nothing is kept. So a session
/// goes on as if it had computed what it got, on the CPU to the last bit; on accelerators as if it had been fed in pieces.
///
/// Full pages are shared. Where a sequence goes another way in the middle of a page, that page is copied, into the one that
/// the next token needs anyway. The pool gets pages back before anybody else gives up anything or is refused, and before
/// that those of models that nobody asks anything, where they share their memory.
///
/// ```no_run
/// # use firebox_runtime::{Model, PagePool, PrefixLimits, PrefixTree, RuntimeError, Session, KvType};
/// # fn answer(model: &Model, prompt: &[u32]) -> Result<(), RuntimeError> {
/// let decoder = model.decoder()?;
/// let pool = PagePool::new(decoder.layout(KvType::default()));
/// let tree = PrefixTree::new(&decoder, &pool, PrefixLimits::default());
/// let mut session = Session::in_pool(decoder, &pool);
/// let begun = tree.begin(&mut session, "tenant", prompt);
/// let logits = session.feed(&prompt[begun.tokens..])?;
/// tree.keep(&session, "tenant");
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
    // Whoever holds it takes no page, because for a page the pool may ask for one of these.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    tree: Tree,
    stats: PrefixStats,
}

impl PrefixTree {
    /// A tree for sessions of a model that take their pages from `pool`, with nothing in it.
    pub fn new(decoder: &Arc<Decoder>, pool: &PagePool, limits: PrefixLimits) -> Self {
        let decoder = Arc::downgrade(decoder);
        let shared = Arc::new(Shared { decoder, pool: pool.clone(), limits, state: Mutex::default() });
        let weak: Weak<Shared> = Arc::downgrade(&shared);
        pool.register_reclaimable(weak);
        Self(shared)
    }

    /// Lets a session that is about to be fed `tokens` begin with what is known of them. It has then been fed the first
    /// of them, as part of its last turn, and the others are left to be fed.
    pub fn begin(&self, session: &mut Session, scope: &str, tokens: &[u32]) -> Begun {
        let begun = self.begun(session, scope, tokens);
        let stats = &mut self.state().stats;
        stats.asked += 1;
        stats.found += u64::from(begun.tokens > 0);
        stats.asked_tokens += tokens.len() as u64;
        stats.found_tokens += begun.tokens as u64;
        begun
    }

    fn begun(&self, session: &mut Session, scope: &str, tokens: &[u32]) -> Begun {
        let Some((length, epoch)) = session.may_begin_with(tokens.len()).filter(|_| self.fits(session))
        else {
            return Begun::default();
        };
        let before = session.tokens.len();
        let all = [&session.tokens, tokens].concat();
        let key = Key { scope: scope.into(), head: session.head_id(), epoch };
        // The last token is fed whatever is known: its logits are what it is all about.
        let Match { blocks, known, place } = self.state().tree.find(&key, &all[..all.len() - 1]);
        let is_recurrent = self.0.pool.layout().is_recurrent();
        let (found, states) = match place {
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
        let begun = has.max(had).saturating_sub(before);
        let stop = known.saturating_sub(before);
        Begun {
            tokens: begun,
            stop: (is_recurrent && known >= has + WORTH_A_STOP && stop < tokens.len()).then_some(stop),
        }
    }

    /// Keeps what a session has computed so far, as far as it is what others would compute as well. Of use
    /// at the end of a prompt, at the end of an answer, and wherever [`begin`](Self::begin) says; it costs a lookup, and a
    /// copy of the last page if that is not full.
    pub fn keep(&self, session: &Session, scope: &str) {
        let pristine_len = session.cache.pristine_len();
        let Some(head) = session.filled_by.clone().filter(|_| pristine_len > 0 && self.fits(session)) else {
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
            let charged = || match &self.0.limits.budget {
                Some(budget) => budget.charge(Account::Streams, bytes).ok().map(Some),
                None => Some(None),
            };
            state.tree.insert_place(&key, &tokens[..at], states, bytes, charged);
        }
        while state.tree.state_bytes() > self.0.limits.state_bytes && state.tree.evict_place() {}
        while state.tree.pages() > self.0.limits.pages {
            state.stats.evicted += state.tree.evict(|_| true) as u64;
        }
    }

    /// Lets go of everything.
    pub fn clear(&self) {
        self.state().tree = Tree::default();
    }

    /// What it has, and what it was good for.
    pub fn stats(&self) -> PrefixStats {
        let state = self.state();
        PrefixStats { pages: state.tree.pages(), state_bytes: state.tree.state_bytes(), ..state.stats }
    }

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
        let gone = state.tree.evict(Block::is_alone);
        state.stats.evicted += gone as u64;
        gone > 0
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
    /// Whether it goes on as any sequence of its tokens does and has room for so many more. Returns how long it is then,
    /// and what positions mean then.
    fn may_begin_with(&self, added: usize) -> Option<(usize, usize)> {
        let length = self.expected_length.max(self.cache.position() + self.behind() + added);
        let epoch = self.decoder.config().position_epoch(length);
        let goes_on =
            self.cache.is_empty() || (self.filled_by == Some(self.head_id()) && self.epoch() == epoch);
        let has_blocks = self.head().is_none_or(|head| head.has_blocks());
        let layers = self.decoder.layout(self.cache.pool().layout().kv_dtype).layers;
        let begins = added > 0
            && !self.has_lost()
            && self.cache.is_pristine()
            && goes_on
            && has_blocks
            && layers == self.cache.pool().layout().layers
            && self.behind() + added <= self.room_left();
        begins.then_some((length, epoch))
    }

    /// See [`adopt_prefix`](firebox_cache::SequenceCache::adopt_prefix).
    fn adopt_prefix(
        &mut self,
        blocks: &[Block],
        tokens: usize,
        states: Option<Arc<RecurrentStates>>,
        length: usize,
    ) -> usize {
        self.go_on_with_a_turn();
        let has = self.cache.adopt_prefix(blocks, tokens, states);
        self.encoded_length = length;
        self.filled_by = Some(self.head_id());
        has
    }
}

#[cfg(test)]
mod tests;
