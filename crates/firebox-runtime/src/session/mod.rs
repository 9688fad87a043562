//! Sessions: a sequence of tokens, the cache that a model has of it, and its head.
//!
//! A prompt takes this way, and every call in it is in `feed`:
//!
//! ```text
//! feed / feed_each_row          tokens in, logits out
//! └─ feed_rows                  cuts the tokens into chunks
//!    ├─ reserve                 makes the cache ready for the tokens
//!    │  ├─ rebuild              brings the cached tokens up to date
//!    │  │  ├─ refresh_epoch     drops the cache if its positions mean something else, and calls replay_head
//!    │  │  └─ recompute_uncached  runs tokens through the layers whose cache was dropped
//!    │  └─ evict_turns          removes old turns that leave no room
//!    └─ forward                 one chunk: Decoder::forward_together, which loops over Pass::step
//! ```
//!
//! `replay` holds what makes a cache whole again, `turns` what a session remembers turn by turn, `fork` how it goes back
//! and branches, `heads` how it changes its head, `batch_pass` how several sessions go through the layers together, and
//! `save` its file.

mod batch_pass;
mod feed;
mod fork;
mod heads;
mod open;
#[cfg(any(test, feature = "fuzzing"))]
mod operations;
mod replay;
pub(crate) mod save;
pub(crate) mod turns;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use firebox_cache::{KvType, PagePool, SequenceCache, Turn};
use firebox_model::{Decoder, Head, ModelError};

use crate::RuntimeError;
use crate::heads::pool::HeadPool;
use crate::residency::Residency;
use crate::telemetry::Meters;
pub use batch_pass::BatchPass;
pub use feed::PREFILL_CHUNK;
pub(crate) use fork::Snapshot;
pub use fork::{BranchId, BranchInfo, Branches};
pub use heads::{FetchedHead, HeadSelection, Likelihood, OWN_HEAD, ROUTER, Router};
#[cfg(feature = "fuzzing")]
pub use operations::check_session_operations;
pub use replay::NextChunk;
pub use save::{SessionFile, SessionSummary};
use turns::Retention;

/// A sequence of tokens and the model's cache of it.
///
/// A clone is a branch of the sequence: the two share the cached keys and values, none are copied, and each continues on its
/// own.
#[derive(Debug, Clone)]
pub struct Session {
    pub(crate) decoder: Arc<Decoder>,
    pub(crate) cache: SequenceCache,
    /// Accepted tokens. Those beyond the length of the cache go through the layers with the next feed.
    pub(crate) tokens: Vec<u32>,
    /// Turns without cached keys and values. Their tokens are in `tokens`, after the cached ones, and go through the layers
    /// again with the next feed.
    pub(crate) uncached_turns: Vec<Turn>,
    /// Tokens of the cache's last turn that are still to be recomputed.
    pub(crate) recomputing: usize,
    pub(crate) retention: Retention,
    /// The length that the sequence was expected to reach when its tokens were cached. It decides what positions mean.
    pub(crate) encoded_length: usize,
    pub(crate) expected_length: usize,
    pub(crate) chunk: usize,
    cancel: Option<Arc<AtomicBool>>,
    pub(crate) head: Option<Arc<Head>>,
    pub(crate) head_pool: Option<HeadPool>,
    /// The name of the head that was requested last.
    pub(crate) requested_head: Option<Arc<str>>,
    /// The head that computed the cached layers behind the split, or `None` if several did or one did not finish.
    pub(crate) cached_head: Option<Arc<str>>,
    meters: Arc<Meters>,
    /// What logits of many rows are charged to.
    residency: Option<Arc<Residency>>,
}

impl Session {
    /// Creates an empty session.
    pub fn new(decoder: Arc<Decoder>) -> Self {
        let pool = PagePool::new(decoder.layout(KvType::default()));
        Self::in_pool(decoder, &pool)
    }

    /// Creates an empty session with pages from a pool that several sessions of one model share.
    ///
    /// # Panics
    /// If the pool was made for a model with other layers.
    pub fn in_pool(decoder: Arc<Decoder>, pool: &PagePool) -> Self {
        let layout = decoder.layout(pool.layout().kv_dtype);
        let blocks = decoder.layers();
        assert_eq!(pool.layout().layers.get(..blocks), layout.layers.get(..blocks), "a pool of this model");
        // The model may have got its first head after the pool was made.
        let pool =
            if pool.layout().layers == layout.layers { pool.clone() } else { pool.with_layout(layout) };
        Self {
            cache: SequenceCache::new(&pool),
            decoder,
            tokens: Vec::new(),
            uncached_turns: Vec::new(),
            recomputing: 0,
            retention: Retention::default(),
            encoded_length: 0,
            expected_length: 0,
            chunk: PREFILL_CHUNK,
            cancel: None,
            head: None,
            head_pool: None,
            requested_head: None,
            cached_head: Some(OWN_HEAD.into()),
            meters: Arc::default(),
            residency: None,
        }
    }

    /// Counts in these meters from now on.
    pub fn with_meters(self, meters: Arc<Meters>) -> Self {
        Self { meters, ..self }
    }

    /// Returns the meters that it counts in.
    pub fn meters(&self) -> &Arc<Meters> {
        &self.meters
    }

    /// Stores keys and values as `kv_type`. Tokens that are cached as another type go through the layers again with the next
    /// feed.
    pub fn with_kv_type(mut self, kv_type: KvType) -> Self {
        let kv_type = self.decoder.layout(kv_type).kv_dtype;
        if kv_type != self.cache.pool().layout().kv_dtype {
            self.drop_cache();
            self.cache = self.cache.restarted_in(&self.cache.pool().with_kv_dtype(kv_type));
        }
        self
    }

    /// Feeds at most `chunk` tokens through the layers at a time.
    pub fn with_chunk(self, chunk: usize) -> Self {
        Self { chunk: chunk.max(1), ..self }
    }

    /// Expects the sequence to reach at least `length` tokens. Position schemes that depend on the length of a sequence then
    /// mean the same from its first token on.
    pub fn with_expected_length(self, length: usize) -> Self {
        Self { expected_length: length, ..self }
    }

    /// Stops a long feed between two chunks once `cancel` is set. Chunks that went through the layers stay cached.
    pub fn with_cancel(self, cancel: Arc<AtomicBool>) -> Self {
        Self { cancel: Some(cancel), ..self }
    }

    /// Returns the decoder that computes its tokens.
    pub fn decoder(&self) -> &Arc<Decoder> {
        &self.decoder
    }

    /// Returns the most tokens that go through the layers at a time.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Returns the accepted tokens: those that are cached, and those that go through the layers with the next feed.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the cache of its tokens.
    pub fn cache(&self) -> &SequenceCache {
        &self.cache
    }

    /// Returns the bytes of its keys and values.
    pub fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Returns the number of accepted tokens that have not been through the layers.
    pub fn uncached_tokens(&self) -> usize {
        self.tokens.len() - self.cache.len()
    }

    /// Removes all tokens and turns.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.uncached_turns.clear();
        self.recomputing = 0;
        self.cache.clear();
    }

    /// Refuses a prompt that the head cannot continue, or that leaves no room for an answer.
    pub(crate) fn check_prompt(&self, prompt: usize, context: Option<usize>) -> Result<(), RuntimeError> {
        self.check_prompt_fits(prompt, context)?;
        self.check_generates()
    }

    /// Refuses to continue text with a classifier.
    pub fn check_generates(&self) -> Result<(), RuntimeError> {
        if self.head().is_some_and(|head| head.is_classifier()) {
            return Err(RuntimeError::Kind {
                found: "a classifier head",
                remedy: "it labels texts and cannot continue them; use another head",
            });
        }
        Ok(())
    }

    /// Refuses an empty prompt, and one that leaves no room for an answer in the context.
    pub fn check_prompt_fits(&self, prompt: usize, context: Option<usize>) -> Result<(), RuntimeError> {
        if prompt == 0 {
            return Err(ModelError::NoTokens.into());
        }
        let tokens = self.tokens().len() + prompt;
        match context {
            Some(context) if tokens >= context => {
                Err(RuntimeError::ContextFull { tokens: tokens + 1, context })
            }
            _ => Ok(()),
        }
    }

    /// Refuses tokens that are not in the model's vocabulary.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), RuntimeError> {
        let vocab_size = self.decoder.config().vocab_size;
        match tokens.iter().find(|token| !self.has_token(**token)) {
            Some(&token) => Err(ModelError::Token { token, vocab_size }.into()),
            None => Ok(()),
        }
    }

    /// Returns whether a token is in the model's vocabulary.
    pub(crate) fn has_token(&self, token: u32) -> bool {
        (token as usize) < self.decoder.config().vocab_size
    }
}

#[cfg(test)]
mod tests;
