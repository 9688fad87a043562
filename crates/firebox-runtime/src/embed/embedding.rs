//! The embedding of some texts by a decoder, in chunks that share passes with other sequences.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use firebox_cache::{KvType, PAGE_TOKENS, PagePool, SequenceCache};
use firebox_model::{Decoder, Input, ModelError};

use super::{Framed, LONGEST, add_share, scale_to_one};
use crate::readout::{EmbedOptions, Readout};
use crate::session::PREFILL_CHUNK;
use crate::{Charge, Model, RuntimeError};

/// Passes whose vectors may wait for their reader, and the one that makes more.
const PASSES_OF_VECTORS: usize = 4;

/// The vector of a text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TextVector {
    /// The index of the text.
    pub text: usize,
    /// The vector.
    pub vector: Vec<f32>,
}

impl TextVector {
    /// Creates the vector of the text with this index.
    pub fn new(text: usize, vector: Vec<f32>) -> Self {
        Self { text, vector }
    }
}

/// The embedding of some texts by a decoder. Each pass takes a [chunk](EmbeddingChunk) of it, and returns the vectors of
/// the texts that end in the chunk.
///
/// The vectors are those of [`Model::embed`]: how the texts are divided into passes changes no bit.
#[derive(Debug)]
pub struct Embedding {
    decoder: Arc<Decoder>,
    pool: PagePool,
    readout: Readout,
    normalize: bool,
    /// Most rows of a pass.
    chunk: usize,
    /// Most positions of keys and values that a pass may begin.
    positions: usize,
    /// What is left of the texts, in order.
    pieces: VecDeque<Piece>,
    /// The vector so far of the first text that has pieces left.
    mean: Vec<f32>,
    texts: usize,
    tokens: usize,
    remaining: usize,
    /// Memory for the tokens, for the states of texts that are longer than a chunk, and for vectors that wait.
    #[expect(dead_code, reason = "held for its drop")]
    charge: Option<Charge>,
}

/// A text, or a part of one that is longer than the model reads.
#[derive(Debug)]
struct Piece {
    text: usize,
    tokens: Vec<u32>,
    share: f32,
    /// Whether it is the last one of its text, and whether the text has several.
    is_last: bool,
    is_part: bool,
    /// The cache of the tokens that went through the layers, and their states.
    progress: Option<(SequenceCache, Vec<Tensor<2>>)>,
}

impl Piece {
    fn done(&self) -> usize {
        self.progress.as_ref().map_or(0, |(cache, _)| cache.len())
    }
}

/// What a pass takes of an [`Embedding`]: some tokens of each of its first pieces.
#[derive(Debug)]
pub struct EmbeddingChunk {
    /// The tokens of each piece.
    tokens: Vec<Range<usize>>,
}

impl EmbeddingChunk {
    /// Returns the number of tokens.
    pub fn rows(&self) -> usize {
        self.tokens.iter().map(Range::len).sum()
    }

    /// Returns the number of pieces.
    pub fn pieces(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the tokens of each piece, and how many of the piece went before.
    pub fn parts(&self) -> impl Iterator<Item = (usize, usize)> {
        self.tokens.iter().map(|tokens| (tokens.len(), tokens.start))
    }
}

impl Model {
    /// Prepares the embedding of texts in chunks. In a model with a memory budget, it is refused if too little memory can
    /// be freed for it.
    pub fn embedding<T: AsRef<str>>(
        &self,
        texts: &[T],
        options: &EmbedOptions,
    ) -> Result<Embedding, RuntimeError> {
        let decoder = self.decoder()?;
        let tokenizer = self.tokenizer()?;
        let longest = decoder.config().max_positions.min(LONGEST);
        let readout = Readout::new(self.checkpoint(), self.modules.clone(), *options)?;
        let (mut pieces, mut tokens) = (VecDeque::new(), 0);
        for (text, said) in texts.iter().enumerate() {
            let framed = Framed::new(tokenizer, said.as_ref())?;
            tokens += framed.words.len() + framed.special();
            let parts = framed.pieces(longest);
            let count = parts.len();
            if count == 0 || parts.iter().any(|(tokens, _)| tokens.is_empty()) {
                return Err(ModelError::NoTokens.into());
            }
            pieces.extend(parts.into_iter().enumerate().map(|(at, (tokens, share))| Piece {
                text,
                tokens,
                share,
                is_last: at + 1 == count,
                is_part: count > 1,
                progress: None,
            }));
        }
        let layout = decoder.layout(KvType::F32);
        let (chunk, pool) = match self.residency() {
            Some(residency) => (residency.plan().chunk.max(1), residency.pool().with_layout(layout)),
            None => (PREFILL_CHUNK, PagePool::new(layout)),
        };
        let remaining: usize = pieces.iter().map(|piece| piece.tokens.len()).sum();
        let longest = pieces.iter().map(|piece| piece.tokens.len()).max().unwrap_or(0);
        let width = decoder.config().hidden_size;
        // States of a text that takes several passes are held until its end, and copied then.
        let states = if longest > chunk { 2 * longest * width } else { 0 };
        let vectors = self.embedding_width() * (texts.len().min(chunk) * PASSES_OF_VECTORS);
        let bytes = (size_of::<f32>() * (remaining + states + vectors)) as u64;
        Ok(Embedding {
            charge: self.pay_for(bytes)?,
            // Without a budget, pages cost nothing.
            positions: self.residency().map_or(usize::MAX, |_| self.rows_at_once()),
            decoder,
            pool,
            readout,
            normalize: options.normalize,
            chunk,
            texts: texts.len(),
            pieces,
            mean: Vec::new(),
            tokens,
            remaining,
        })
    }

    /// Returns the number of elements of the vectors of texts, if none are left out.
    pub fn embedding_width(&self) -> usize {
        self.modules.width()
    }
}

impl Embedding {
    /// Returns the decoder that computes it.
    pub fn decoder(&self) -> &Arc<Decoder> {
        &self.decoder
    }

    /// Returns the number of texts.
    pub fn texts(&self) -> usize {
        self.texts
    }

    /// Returns the tokens of all texts.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the tokens that have not been through the layers.
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Returns the most rows that it may have in a pass.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Returns how many tokens of the first piece went through the layers.
    pub fn depth(&self) -> usize {
        self.pieces.front().map_or(0, Piece::done)
    }

    /// Returns the most positions of keys and values that one pass may begin, over all embeddings in it.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Takes the next tokens, at most `rows`, and reserves pages for them, of `positions` that the pass has left. It is empty
    /// or shorter if these are used up or pages run out, and an error if there are no pages at all.
    pub fn next_chunk(&mut self, rows: usize, positions: &mut usize) -> Result<EmbeddingChunk, RuntimeError> {
        let mut rows = rows.min(self.chunk);
        // Texts are longer than what a pass may begin where memory is short.
        let is_first = *positions >= self.positions;
        let mut tokens = Vec::new();
        for piece in &mut self.pieces {
            let done = piece.done();
            let count = rows.min(piece.tokens.len() - done);
            // A page is charged as a whole, however short its text is.
            let pages = (done + count).div_ceil(PAGE_TOKENS) - done.div_ceil(PAGE_TOKENS);
            let more = pages * PAGE_TOKENS;
            let may_exceed = is_first && tokens.is_empty();
            if count == 0 || (more > *positions && !may_exceed) {
                break;
            }
            let (cache, _) =
                piece.progress.get_or_insert_with(|| (SequenceCache::new(&self.pool), Vec::new()));
            match cache.reserve(count) {
                Ok(()) => {}
                Err(error) if may_exceed => return Err(error.into()),
                Err(_) => break,
            }
            tokens.push(done..done + count);
            rows -= count;
            *positions = positions.saturating_sub(more);
        }
        Ok(EmbeddingChunk { tokens })
    }

    /// Returns the inputs of a pass over a chunk.
    pub fn inputs<'e>(&'e self, chunk: &EmbeddingChunk) -> Vec<Input<'e>> {
        let pieces = self.pieces.iter().zip(&chunk.tokens);
        let input = |(piece, tokens): (&'e Piece, &Range<usize>)| {
            Input::new(&piece.tokens[tokens.clone()], tokens.start, piece.tokens.len())
        };
        pieces.map(input).collect()
    }

    /// Returns the caches of a chunk's pieces, in the order of its inputs.
    pub fn caches<'e>(&'e mut self, chunk: &EmbeddingChunk) -> impl Iterator<Item = &'e mut SequenceCache> {
        let pieces = self.pieces.iter_mut().take(chunk.pieces());
        pieces.filter_map(|piece| piece.progress.as_mut().map(|(cache, _)| cache))
    }

    /// Takes the states that a pass over a chunk ended with, one tensor a piece, and returns the vectors of the texts that
    /// are complete.
    pub fn finish_chunk(
        &mut self,
        chunk: &EmbeddingChunk,
        states: Vec<Tensor<2>>,
    ) -> Result<Vec<TextVector>, RuntimeError> {
        self.remaining -= chunk.rows();
        for ((piece, tokens), states) in self.pieces.iter_mut().zip(&chunk.tokens).zip(states) {
            let Some((_, before)) = &mut piece.progress else { continue };
            debug_assert!(tokens.len() == states.dims()[0], "the states of these tokens");
            before.push(states);
        }
        let mut vectors = Vec::new();
        while self.pieces.front().is_some_and(|piece| piece.done() == piece.tokens.len()) {
            let Some(piece) = self.pieces.pop_front() else { break };
            let Some((_, mut states)) = piece.progress else { break };
            let states = if states.len() == 1 { states.remove(0) } else { Tensor::cat(states, 0) };
            let vector = self.readout.vector(states)?;
            add_share(&mut self.mean, &vector, piece.share);
            if piece.is_last {
                let mut vector = std::mem::take(&mut self.mean);
                // The mean of unit vectors is shorter than one.
                if self.normalize && piece.is_part {
                    scale_to_one(&mut vector);
                }
                vectors.push(TextVector { text: piece.text, vector });
            }
        }
        self.free_pages();
        Ok(vectors)
    }

    /// Gives up the pages of pieces that are not complete; they begin again with the next chunk.
    pub fn release_pages(&mut self) {
        for piece in self.pieces.iter_mut().filter(|piece| piece.progress.is_some()) {
            self.remaining += piece.done();
            piece.progress = None;
        }
        self.free_pages();
    }

    /// Frees pages that no piece uses, where memory has a budget: they stay charged, and would evict weights.
    fn free_pages(&self) {
        if self.positions < usize::MAX {
            self.pool.shrink();
        }
    }

    /// Returns whether giving up pages frees any.
    pub fn has_pages(&self) -> bool {
        self.pieces.front().is_some_and(|piece| piece.progress.is_some())
    }
}
