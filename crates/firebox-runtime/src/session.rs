use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::Tensor;
use firebox_cache::{KvType, PagePool, RecurrentState, SequenceCache, Turn, TurnKind};
use firebox_model::{Decoder, Head, Input, ModelError, Wanted};

use crate::RuntimeError;
use crate::heads::HeadRack;
use crate::memory::release_after_prompt;
use crate::telemetry::Meters;
use crate::turns::Memory;

/// Prompts go through the layers in pieces of this many tokens: large enough that the weights are read
/// rarely, small enough that the attention scores of a piece stay small beside them.
pub(crate) const PREFILL_CHUNK: usize = 512;

/// One sequence of tokens and what the model remembers of it.
///
/// A clone is a branch of the sequence: it shares what is remembered and goes on by itself, without a key or a value
/// being copied.
#[derive(Debug, Clone)]
pub struct Session {
    pub(crate) decoder: Arc<Decoder>,
    pub(crate) cache: SequenceCache,
    /// Those beyond the length of the cache go through the layers with the next feed.
    pub(crate) tokens: Vec<u32>,
    /// Turns that the cache has lost; their tokens are still there, and go through the layers with the next feed.
    pub(crate) lost: Vec<Turn>,
    /// Tokens of the last turn of the cache that were lost with it, and are not there again.
    pub(crate) finding: usize,
    pub(crate) memory: Memory,
    /// How long the cached tokens were said to become: what their positions mean depends on it.
    pub(crate) encoded_length: usize,
    pub(crate) expected_length: usize,
    pub(crate) chunk: usize,
    cancel: Option<Arc<AtomicBool>>,
    pub(crate) head: Option<Arc<Head>>,
    pub(crate) rack: Option<HeadRack>,
    /// The name of the head that was wished for last.
    pub(crate) worn: Option<Arc<str>>,
    /// The head that the cached layers behind the split are of; none where they are of several or unfinished.
    pub(crate) filled_by: Option<Arc<str>>,
    meters: Arc<Meters>,
}

/// What the model's own last layers are called, where heads have names.
pub const OWN_HEAD: &str = "0";

/// A place in a sequence that it can go back to without computing again what came before.
#[derive(Debug, Clone)]
pub(crate) struct Mark {
    /// Tokens that had been through the layers.
    len: usize,
    /// What their positions meant.
    epoch: usize,
    /// What its recurrent layers held, by layer.
    states: Vec<Option<RecurrentState>>,
}

impl Session {
    /// A sequence that has not begun.
    pub fn new(decoder: Arc<Decoder>) -> Self {
        let pool = PagePool::new(decoder.layout(KvType::default()));
        Self::in_pool(decoder, &pool)
    }

    /// The same, with pages from a pool that several sequences of one model share.
    ///
    /// # Panics
    /// If the pool was made for a model of other layers.
    pub fn in_pool(decoder: Arc<Decoder>, pool: &PagePool) -> Self {
        let layout = decoder.layout(pool.layout().kv_dtype);
        let blocks = decoder.layers();
        assert_eq!(pool.layout().layers.get(..blocks), layout.layers.get(..blocks), "a pool of this model");
        // The model may have got its first head since the pool was made.
        let pool =
            if pool.layout().layers == layout.layers { pool.clone() } else { pool.with_layout(layout) };
        Self {
            cache: SequenceCache::new(&pool),
            decoder,
            tokens: Vec::new(),
            lost: Vec::new(),
            finding: 0,
            memory: Memory::default(),
            encoded_length: 0,
            expected_length: 0,
            chunk: PREFILL_CHUNK,
            cancel: None,
            head: None,
            rack: None,
            worn: None,
            filled_by: Some(OWN_HEAD.into()),
            meters: Arc::default(),
        }
    }

    /// The same, counting in these numbers from now on.
    pub fn with_meters(self, meters: Arc<Meters>) -> Self {
        Self { meters, ..self }
    }

    /// What it has counted.
    pub fn meters(&self) -> &Arc<Meters> {
        &self.meters
    }

    /// The same, keeping keys and values as `kept`. What has been fed is fed again with the next tokens.
    pub fn with_kv_type(mut self, kept: KvType) -> Self {
        let kept = self.decoder.layout(kept).kv_dtype;
        if kept != self.cache.pool().layout().kv_dtype {
            self.lose();
            self.cache = self.cache.restarted_in(&self.cache.pool().with_kv_dtype(kept));
        }
        self
    }

    /// The same, feeding at most `chunk` tokens through the layers at a time.
    pub fn with_chunk(self, chunk: usize) -> Self {
        Self { chunk: chunk.max(1), ..self }
    }

    /// The same, knowing that the sequence will have at least `length` tokens: position schemes that depend on the
    /// length of a sequence then mean the same from its first token on.
    pub fn with_expected_length(self, length: usize) -> Self {
        Self { expected_length: length, ..self }
    }

    /// The same, giving up between two pieces of a long feed once `cancel` is set. What was fed by then stays fed.
    pub fn with_cancel(self, cancel: Arc<AtomicBool>) -> Self {
        Self { cancel: Some(cancel), ..self }
    }

    /// From the next token on, the last layers are those of this head; none means the model's own. The trunk's part of
    /// what is remembered stays; the head's is made from what the trunk has left, with the next feed.
    pub fn set_head(&mut self, head: Option<Arc<Head>>) {
        self.head = head;
    }

    /// The heads it can choose from.
    pub fn heads(&self) -> Option<&HeadRack> {
        self.rack.as_ref()
    }

    /// The same, choosing among the heads of a rack.
    pub fn with_heads(self, rack: HeadRack) -> Self {
        Self { rack: Some(rack), ..self }
    }

    /// What its last layers are.
    pub fn head(&self) -> Option<&Arc<Head>> {
        self.head.as_ref()
    }

    pub(crate) fn head_id(&self) -> Arc<str> {
        self.head.as_ref().map_or_else(|| OWN_HEAD.into(), |head| head.id().clone())
    }

    /// Every token that is remembered, or has been accepted and goes through the layers next.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// What the model remembers of them.
    pub fn cache(&self) -> &SequenceCache {
        &self.cache
    }

    /// Bytes its keys and values take.
    pub fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Refuses a prompt that no answer can follow.
    pub(crate) fn expect_answer(&self, prompt: usize, context: Option<usize>) -> Result<(), RuntimeError> {
        self.expect_room_for_answer(prompt, context)?;
        self.expect_words()
    }

    /// Refuses to continue text with a head that cannot.
    pub(crate) fn expect_words(&self) -> Result<(), RuntimeError> {
        if self.head().is_some_and(|head| head.is_classifier()) {
            return Err(RuntimeError::Kind {
                found: "wearing a classifier",
                remedy: "it says what a text is and cannot continue it; use another head",
            });
        }
        Ok(())
    }

    /// Refuses a prompt that no answer can follow, whatever head is worn.
    pub(crate) fn expect_room_for_answer(
        &self,
        prompt: usize,
        context: Option<usize>,
    ) -> Result<(), RuntimeError> {
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

    /// Refuses tokens that the model does not have.
    pub(crate) fn expect_known(&self, tokens: &[u32]) -> Result<(), RuntimeError> {
        let vocab_size = self.decoder.config().vocab_size;
        match tokens.iter().find(|token| !self.knows(**token)) {
            Some(&token) => Err(ModelError::Token { token, vocab_size }.into()),
            None => Ok(()),
        }
    }

    /// Feeds at least one token and returns the logits after the last.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<Vec<f32>, RuntimeError> {
        let mut last = Vec::new();
        self.feed_each(tokens, Wanted::Last, |logits| last = logits.to_vec())?;
        release_after_prompt(tokens.len().min(self.chunk));
        Ok(last)
    }

    /// Feeds at least one token and hands out the logits after each, in pieces of several rows.
    pub fn feed_each_row(&mut self, tokens: &[u32], took: impl FnMut(&[f32])) -> Result<(), RuntimeError> {
        self.feed_each(tokens, Wanted::All, took)
    }

    /// Adds a token whose logits nobody needs; it goes through the layers with the next feed.
    pub(crate) fn append(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Goes back to the first `len` tokens. Where the model has recurrent layers and no turn began there, what is left is
    /// computed again with the next feed; until then there are no turns, and what was hidden is forgotten.
    pub fn rewind(&mut self, len: usize) {
        self.tokens.truncate(len);
        if self.cache.len() > self.tokens.len() && !self.cache.rewind(self.tokens.len()) {
            self.lose();
        }
        self.finding = self.finding.min(self.behind());
    }

    /// This place, to go back to.
    pub(crate) fn mark(&self) -> Mark {
        Mark { len: self.cache.len(), epoch: self.epoch(), states: self.cache.states().to_vec() }
    }

    /// Goes back to the first `len` tokens, of which those up to the mark need not be computed again. Those behind it
    /// go through recurrent layers once more, with the next feed.
    pub(crate) fn rewind_to(&mut self, mark: &Mark, len: usize) {
        let recurrent = self.cache.pool().layout().is_recurrent();
        let behind = mark.len <= len && len < self.cache.len();
        if !recurrent || !behind || mark.epoch != self.epoch() {
            return self.rewind(len);
        }
        self.tokens.truncate(len);
        self.cache.restore_states(mark.len, mark.states.clone());
    }

    /// What the positions of the cached tokens mean.
    pub(crate) fn epoch(&self) -> usize {
        self.decoder.config().position_epoch(self.encoded_length)
    }

    /// Whether the model has such a token.
    pub(crate) fn knows(&self, token: u32) -> bool {
        (token as usize) < self.decoder.config().vocab_size
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.lost.clear();
        self.finding = 0;
        self.cache.clear();
    }

    /// Computes everything again that is visible, as if nothing else had ever been said: what is hidden is
    /// forgotten.
    pub fn encode_again(&mut self) -> Result<(), RuntimeError> {
        self.lose();
        self.arrange(0).map(drop)
    }

    /// Takes everything through the layers that has been accepted and has not been through them.
    pub(crate) fn settle(&mut self) -> Result<(), RuntimeError> {
        self.arrange(0)?;
        if self.behind() > 0 {
            self.go_on_with_a_turn();
            self.make_room(self.behind())?;
            let length = self.arrange(0)?;
            self.pass_all(self.cache.len()..self.tokens.len(), length)?;
        }
        Ok(())
    }

    /// Feeds tokens to the turn that was begun, whatever it is, and asks for no logits. Everything before them has been
    /// through the layers, and was [arranged](Self::arrange) for them.
    pub(crate) fn append_all(&mut self, tokens: &[u32]) -> Result<(), RuntimeError> {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        let done = self.pass_all(start..start + tokens.len(), self.encoded_length);
        if done.is_err() {
            self.rewind(start);
        }
        done
    }

    pub(crate) fn encoded_length(&self) -> usize {
        self.encoded_length
    }

    fn pass_all(&mut self, tokens: Range<usize>, length: usize) -> Result<(), RuntimeError> {
        for (index, start) in tokens.clone().step_by(self.chunk).enumerate() {
            self.check_cancelled(index)?;
            let piece = self.tokens[start..tokens.end.min(start.saturating_add(self.chunk))].to_vec();
            self.encode(&piece, length)?;
        }
        Ok(())
    }

    fn feed_each(
        &mut self,
        tokens: &[u32],
        wanted: Wanted,
        mut took: impl FnMut(&[f32]),
    ) -> Result<(), RuntimeError> {
        if tokens.is_empty() {
            return Err(ModelError::NoTokens.into());
        }
        let length = self.prepare(tokens.len())?;
        let vocab = self.decoder.config().vocab_size;
        // Tokens that were accepted before without going through the layers come first, and unasked for.
        let mut behind = self.behind();
        let mut rest: Vec<u32> = self.tokens[self.cache.len()..].iter().chain(tokens).copied().collect();
        let mut pieces = 0;
        while !rest.is_empty() {
            self.check_cancelled(pieces)?;
            pieces += 1;
            let piece: Vec<u32> = rest.drain(..self.chunk.min(rest.len())).collect();
            let old = behind.min(piece.len());
            let unasked = old == piece.len() || (wanted == Wanted::Last && !rest.is_empty());
            let logits = if unasked {
                self.encode(&piece, length)?;
                None
            } else {
                Some(self.pass(&piece, length, wanted)?)
            };
            behind -= old;
            self.tokens.extend_from_slice(&piece[old..]);
            let Some(logits) = logits else { continue };
            let logits = read(logits)?;
            took(&logits[if wanted == Wanted::All { old * vocab } else { 0 }..]);
        }
        Ok(())
    }

    /// Makes everything ready for so many tokens that follow what was accepted. Returns how long the sequence is then.
    pub(crate) fn prepare(&mut self, added: usize) -> Result<usize, RuntimeError> {
        let length = self.arrange(added)?;
        self.go_on_with_a_turn();
        if self.make_room(self.behind() + added)? { self.arrange(added) } else { Ok(length) }
    }

    /// Brings what is remembered to mean what it means once so many tokens have been added. Returns how long the
    /// sequence is then.
    pub(crate) fn arrange(&mut self, added: usize) -> Result<usize, RuntimeError> {
        let length = self.align(added)?;
        self.find(length)?;
        Ok(length)
    }

    /// The same for what the cache has, without what was lost.
    pub(crate) fn align(&mut self, added: usize) -> Result<usize, RuntimeError> {
        let length_now =
            |session: &Self| session.expected_length.max(session.cache.position() + session.behind() + added);
        let mut length = length_now(self);
        if self.epoch() != self.decoder.config().position_epoch(length) {
            self.lose();
            // Positions begin anew, and what was hidden takes none.
            length = length_now(self);
        }
        self.encoded_length = length;
        self.fill_by_head(length)?;
        Ok(length)
    }

    /// Makes what layers behind the split remember that of the head in use.
    fn fill_by_head(&mut self, length: usize) -> Result<(), RuntimeError> {
        let id = self.head_id();
        if self.filled_by.as_ref() == Some(&id) {
            return Ok(());
        }
        let has_blocks = self.head.as_ref().is_none_or(|head| head.has_blocks());
        let layers = self.decoder.layout(self.cache.pool().layout().kv_dtype).layers;
        if layers != self.cache.pool().layout().layers {
            // Nothing was kept at the split yet.
            self.lose();
            let layout = self.decoder.layout(self.cache.pool().layout().kv_dtype);
            self.cache = self.cache.restarted_in(&self.cache.pool().with_layout(layout));
        }
        if !has_blocks {
            // Its tokens leave nothing behind the split.
            self.filled_by = None;
            return Ok(());
        }
        if !self.cache.is_empty() {
            let pieces = self.decoder.begin_replay(&mut self.cache, self.chunk)?;
            self.filled_by = None;
            let head = self.head.as_ref();
            self.decoder.replay(head, &self.tokens, length, pieces, &mut self.cache)?;
        }
        self.filled_by = Some(id);
        Ok(())
    }

    /// Tokens that were accepted and have not gone through the layers.
    pub(crate) fn behind(&self) -> usize {
        self.tokens.len() - self.cache.len()
    }

    /// What comes behind a fact is no part of it, and what comes behind a hidden turn is not hidden.
    pub(crate) fn go_on_with_a_turn(&mut self) {
        let closed = |turn: &Turn| turn.kind == TurnKind::Fact || turn.hidden.is_some();
        if self.cache.turns().last().is_some_and(closed) {
            self.cache.begin_turn(TurnKind::Turn, Vec::new());
        }
    }

    /// The first piece always goes through, so that a feed of a single token cannot be refused.
    pub(crate) fn check_cancelled(&self, index: usize) -> Result<(), RuntimeError> {
        match &self.cancel {
            Some(cancel) if index > 0 && cancel.load(Ordering::Relaxed) => Err(RuntimeError::Cancelled),
            _ => Ok(()),
        }
    }

    fn pass(&mut self, tokens: &[u32], length: usize, wanted: Wanted) -> Result<Tensor<2>, RuntimeError> {
        self.pass_together(&[tokens], &mut [], length, wanted)
    }

    /// Takes tokens through the layers, and with them those of branches that are where this session is.
    pub(crate) fn pass_together(
        &mut self,
        tokens: &[&[u32]],
        branches: &mut [SequenceCache],
        length: usize,
        wanted: Wanted,
    ) -> Result<Tensor<2>, RuntimeError> {
        let (position, before) = (self.cache.position(), self.cache.len());
        let head = self.head.as_ref();
        let inputs: Vec<_> =
            tokens.iter().map(|tokens| Input { head, ..Input::new(tokens, position, length) }).collect();
        let mut caches: Vec<_> = std::iter::once(&mut self.cache).chain(branches).collect();
        let logits = self.decoder.forward_together(&inputs, &mut caches, wanted);
        logits.map_err(|error| self.undone(before, error))
    }

    pub(crate) fn encode(&mut self, tokens: &[u32], length: usize) -> Result<(), RuntimeError> {
        let before = self.cache.len();
        let input = Input { head: self.head.as_ref(), ..Input::new(tokens, self.cache.position(), length) };
        let done = self.decoder.encode(input, &mut self.cache);
        done.map_err(|error| self.undone(before, error))
    }

    fn undone(&mut self, before: usize, error: ModelError) -> RuntimeError {
        self.forget_pass(before);
        error.into()
    }
}

/// Numbers of a device, where they can be looked at.
pub(crate) fn read<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, RuntimeError> {
    tensor.try_into_vec_as::<f32>().map_err(|error| RuntimeError::Readback { reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::{Model, device};

    fn exact(decoder: &Arc<Decoder>) -> Session {
        Session::new(decoder.clone()).with_kv_type(KvType::F32)
    }

    fn decoder(fixture: &str) -> Arc<Decoder> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(fixture);
        Model::open(root, &device("cpu").unwrap()).unwrap().decoder().unwrap()
    }

    /// What a session has been through must not show: its logits are those of one that was fed its tokens.
    fn check(fixture: &str, steps: &[(u8, usize)]) {
        let decoder = decoder(fixture);
        let vocab = decoder.config().vocab_size as u32;
        let mut session = exact(&decoder).with_chunk(5);
        let mut next = 3;
        for &(kind, count) in steps {
            match kind {
                0 => session.rewind(session.tokens().len().saturating_sub(count)),
                1 => session.append(5 + count as u32 % (vocab - 5)),
                _ => {
                    let tokens: Vec<u32> = (0..=count as u32).map(|i| (next + i * 31) % vocab).collect();
                    next = (next + 7) % vocab;
                    let found = session.feed(&tokens).unwrap();
                    let fresh = exact(&decoder).feed(session.tokens()).unwrap();
                    for (found, fresh) in found.iter().zip(&fresh) {
                        assert!(
                            (found - fresh).abs() < 2e-3,
                            "{fixture}, {steps:?}: {found} instead of {fresh}"
                        );
                    }
                }
            }
        }
    }

    /// Rounding keys and values moves logits by less than it moves what they are made from.
    #[test]
    fn half_precision_keys_and_values_say_the_same() {
        let decoder = decoder("reference/llama");
        let tokens: Vec<u32> = (0..40).map(|i| 3 + i * 31 % 200).collect();
        let exact = exact(&decoder).feed(&tokens).unwrap();
        let rounded = Session::new(decoder).feed(&tokens).unwrap();
        let range = exact.iter().fold(0f32, |range, logit| range.max(logit.abs()));
        assert_ne!(exact, rounded);
        let differences = || exact.iter().zip(&rounded).map(|(exact, rounded)| (exact - rounded).abs());
        let (most, mean) =
            (differences().fold(0f32, f32::max), differences().sum::<f32>() / exact.len() as f32);
        assert!(most < range / 100.0 && mean < range / 500.0, "{most} and {mean} of {range}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn history_does_not_show(steps in prop::collection::vec((0u8..4, 0usize..24), 1..10)) {
            for fixture in ["reference/llama", "variants/mistral-window7-headdim12", "reference/qwen3_5_text"] {
                check(fixture, &steps);
            }
        }

        /// Positions there mean something else once a sequence is long, and again once it is short.
        #[test]
        fn history_does_not_show_where_positions_depend_on_length(
            steps in prop::collection::vec((0u8..4, 0usize..40), 1..10),
        ) {
            check("variants/phi3-longrope-short-to-long", &steps);
        }
    }
}
