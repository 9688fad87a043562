use burn::tensor::{Int, Tensor, TensorData};
use firebox_cache::SequenceCache;

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
        let tokens: Vec<i32> = inputs
            .iter()
            .flat_map(|input| input.tokens)
            .map(|&token| match i32::try_from(token) {
                Ok(index) if (token as usize) < vocab_size => Ok(index),
                _ => Err(ModelError::Token { token, vocab_size }),
            })
            .collect::<Result<_, _>>()?;
        if tokens.is_empty() {
            return Err(ModelError::NoTokens);
        }
        let count = tokens.len();
        let device = model.device();
        let tokens = Tensor::<1, Int>::from_data(TensorData::new(tokens, [count]), device);
        Ok(Self {
            rows: Rows::new(model.config(), inputs, device),
            hidden: model.embed(tokens),
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
        self.hidden = model.block(layer).forward(hidden, &self.rows, layer, caches)?;
        self.next_layer += 1;
        if self.next_layer == model.layers() {
            for cache in caches {
                cache.advance();
            }
        }
        Ok(())
    }

    /// Final norm and unembedding: `[wanted rows, vocab_size]`.
    pub fn logits(self, model: &Decoder, wanted: Wanted) -> Tensor<2> {
        let hidden = match wanted {
            Wanted::All => self.hidden,
            Wanted::Last => {
                let last: Vec<i32> = self
                    .rows
                    .groups
                    .iter()
                    .filter(|group| !group.rows.is_empty())
                    .map(|group| group.rows.end as i32 - 1)
                    .collect();
                let count = last.len();
                let last = Tensor::<1, Int>::from_data(TensorData::new(last, [count]), model.device());
                self.hidden.select(0, last)
            }
        };
        model.unembed(hidden)
    }
}
