use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::Tensor;
use firebox_cache::SequenceCache;
use firebox_model::{Decoder, Wanted};

use crate::RuntimeError;

/// Prompts go through the layers in pieces of this many tokens: large enough that the weights are read
/// rarely, small enough that the attention scores of a piece stay small beside them.
const PREFILL_CHUNK: usize = 512;

/// One sequence of tokens and what the model remembers of it.
#[derive(Debug, Clone)]
pub struct Session {
    decoder: Arc<Decoder>,
    cache: SequenceCache,
    tokens: Vec<u32>,
    chunk: usize,
    cancel: Option<Arc<AtomicBool>>,
}

impl Session {
    /// A sequence that has not begun.
    pub fn new(decoder: Arc<Decoder>) -> Self {
        Self { cache: decoder.cache(), decoder, tokens: Vec::new(), chunk: PREFILL_CHUNK, cancel: None }
    }

    /// The same, feeding at most `chunk` tokens through the layers at a time.
    pub fn with_chunk(self, chunk: usize) -> Self {
        Self { chunk: chunk.max(1), ..self }
    }

    /// The same, giving up between two pieces of a long feed once `cancel` is set. What was fed by then stays fed.
    pub fn with_cancel(self, cancel: Arc<AtomicBool>) -> Self {
        Self { cancel: Some(cancel), ..self }
    }

    /// Every token fed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Bytes its keys and values take.
    pub fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Feeds tokens and returns the logits after the last.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<Vec<f32>, RuntimeError> {
        let mut last = Vec::new();
        self.feed_each(tokens, Wanted::Last, |logits| last = logits)?;
        Ok(last)
    }

    /// Feeds tokens and returns the logits after each, row after row.
    pub fn feed_all(&mut self, tokens: &[u32]) -> Result<Vec<f32>, RuntimeError> {
        let mut all = Vec::new();
        self.feed_each(tokens, Wanted::All, |mut logits| all.append(&mut logits))?;
        Ok(all)
    }

    /// Goes back to the first `len` tokens.
    pub fn rewind(&mut self, len: usize) {
        if len >= self.tokens.len() {
            return;
        }
        self.tokens.truncate(len);
        if !self.cache.rewind(len) {
            // The next feed sees that the cache lacks the tokens, and computes them again.
            self.cache.clear();
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.cache.clear();
    }

    fn feed_each(
        &mut self,
        tokens: &[u32],
        wanted: Wanted,
        mut took: impl FnMut(Vec<f32>),
    ) -> Result<(), RuntimeError> {
        let length = self.tokens.len() + tokens.len();
        let epoch = |length| self.decoder.config().position_epoch(length);
        let complete = self.cache.len() == self.tokens.len();
        if !complete || (!self.tokens.is_empty() && epoch(self.tokens.len()) != epoch(length)) {
            self.encode_again(length)?;
        }
        for (index, chunk) in tokens.chunks(self.chunk).enumerate() {
            self.check_cancelled(index)?;
            let logits = self.pass(chunk, length, wanted)?;
            self.tokens.extend_from_slice(chunk);
            let logits = logits.try_into_vec_as::<f32>();
            took(logits.map_err(|error| RuntimeError::Readback { reason: error.to_string() })?);
        }
        Ok(())
    }

    /// Computes the cache of the present tokens from the beginning, as part of a sequence of `length`.
    fn encode_again(&mut self, length: usize) -> Result<(), RuntimeError> {
        self.cache.clear();
        let tokens = std::mem::take(&mut self.tokens);
        let encoded = tokens.chunks(self.chunk).enumerate().try_for_each(|(index, chunk)| {
            self.check_cancelled(index)?;
            self.pass(chunk, length, Wanted::Last).map(drop)
        });
        self.tokens = tokens;
        encoded
    }

    /// The first piece always goes through, so that a feed of a single token cannot be refused.
    fn check_cancelled(&self, index: usize) -> Result<(), RuntimeError> {
        match &self.cancel {
            Some(cancel) if index > 0 && cancel.load(Ordering::Relaxed) => Err(RuntimeError::Cancelled),
            _ => Ok(()),
        }
    }

    fn pass(&mut self, tokens: &[u32], length: usize, wanted: Wanted) -> Result<Tensor<2>, RuntimeError> {
        let logits = self.decoder.forward(tokens, length, &mut self.cache, wanted);
        if logits.is_err() {
            // Some layers may have seen the tokens and others not.
            self.cache.clear();
        }
        Ok(logits?)
    }
}
