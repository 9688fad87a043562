use burn::tensor::Tensor;
use firebox_cache::SequenceCache;

use crate::decoder::indices;
use crate::rows::{Input, Rows};
use crate::{Decoder, ModelError};

/// A forward pass as a value: it can stop between any two layers and go on later.
///
/// Every way of running a model, whole, streamed, interleaved or swapped, is a loop over [`Pass::step`].
#[derive(Debug, Clone)]
pub struct Pass {
    rows: Rows,
    hidden: Tensor<2>,
    next_layer: usize,
}

/// Which rows of a finished pass are turned into logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The last token of each input.
    Last,
    /// Every token.
    All,
}

impl Pass {
    /// Looks up the embeddings of some tokens of one or several sequences.
    pub fn begin(model: &Decoder, inputs: &[Input<'_>]) -> Result<Self, ModelError> {
        let vocab_size = model.config().vocab_size;
        if inputs.iter().any(|input| input.tokens.is_empty()) {
            return Err(ModelError::NoTokens);
        }
        let tokens: Vec<u32> = inputs.iter().flat_map(|input| input.tokens).copied().collect();
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab_size) {
            return Err(ModelError::Token { token, vocab_size });
        }
        if tokens.is_empty() {
            return Err(ModelError::NoTokens);
        }
        Ok(Self {
            rows: Rows::new(model.config(), inputs, model.device()),
            hidden: model.embed(&tokens)?,
            next_layer: 0,
        })
    }

    /// The layer that [`step`](Self::step) runs next; the number of layers once all have run.
    pub fn next_layer(&self) -> usize {
        self.next_layer
    }

    /// The hidden state before the next layer, `[rows, hidden_size]`.
    pub fn hidden(&self) -> &Tensor<2> {
        &self.hidden
    }

    /// Runs exactly one layer. `caches` are those of the inputs, in order, each at its input's position.
    ///
    /// After an error a cache may hold what only some layers have seen: clear it, or rewind it.
    pub fn step(&mut self, model: &Decoder, caches: &mut [&mut SequenceCache]) -> Result<(), ModelError> {
        let layer = self.next_layer;
        let positions_fit =
            self.rows.groups.iter().zip(&*caches).all(|(group, cache)| group.position == cache.position());
        if layer >= model.layers() || caches.len() != self.rows.groups.len() || !positions_fit {
            return Err(ModelError::Step { layer, layers: model.layers() });
        }
        if layer == 0 {
            for (group, cache) in self.rows.groups.iter().zip(&mut *caches) {
                cache.reserve(group.rows.len())?;
            }
        }
        let hidden = self.hidden.clone();
        self.hidden = model.block(layer)?.forward(hidden, &self.rows, layer, caches)?;
        self.next_layer += 1;
        if self.next_layer == model.layers() {
            for cache in caches {
                cache.advance();
            }
        }
        Ok(())
    }

    /// Final norm and unembedding: `[wanted rows, vocab_size]`.
    pub fn logits(self, model: &Decoder, wanted: Wanted) -> Result<Tensor<2>, ModelError> {
        let hidden = match wanted {
            Wanted::All => self.hidden,
            Wanted::Last => {
                let ends = self.rows.groups.iter().filter(|group| !group.rows.is_empty());
                let last: Vec<u32> = ends.map(|group| group.rows.end as u32 - 1).collect();
                self.hidden.select(0, indices(&last, model.device()))
            }
        };
        model.unembed(hidden)
    }
}
