//! Embeds texts as vectors, and ranks documents by how well they answer a query.

mod charge;
mod embedding;
mod framed;
mod rerank;
#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use firebox_model::{Encoder, EncoderInput, ModelError, Network};

pub use embedding::{Embedding, EmbeddingChunk, TextVector};
pub(crate) use framed::Framed;
pub use rerank::Ranked;

use crate::readout::{EmbedOptions, Readout};
use crate::{Model, RuntimeError};

/// The most rows in a pass. More take memory and gain nothing; models with little memory take fewer.
const ROWS: usize = 1024;

/// The most tokens of a text that go through a decoder as a whole. Decoders with longer contexts are trained on less,
/// and the cost of attention grows with the square of the length.
const LONGEST: usize = 8192;

impl Model {
    /// Returns a vector for each text: from a sentence encoder, or from the states after a decoder's last layer.
    ///
    /// A text that is longer than the model can read is split, and its vector is the mean of its pieces, weighted by
    /// their tokens. In a model with a memory budget, a text is refused if too little memory can be freed for it.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use firebox_runtime::{EmbedOptions, Model, device};
    /// let model = Model::open("models/all-MiniLM-L6-v2", &device("cpu")?)?;
    /// let vectors = model.embed(&["a cat", "a kitten"], &EmbedOptions::default())?;
    /// let cosine: f32 = vectors[0].iter().zip(&vectors[1]).map(|(a, b)| a * b).sum();
    /// # Ok(()) }
    /// ```
    pub fn embed<T: AsRef<str>>(
        &self,
        texts: &[T],
        options: &EmbedOptions,
    ) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let longest = match self.network() {
            Network::Encoder(encoder) => encoder.config().max_positions,
            Network::Decoder(decoder) => decoder.config().max_positions.min(LONGEST),
        };
        let tokenizer = self.tokenizer()?;
        let framed = texts.iter().map(|text| Framed::new(tokenizer, text.as_ref()));
        let framed = framed.collect::<Result<Vec<_>, _>>()?;
        let mut vectors = self.embed_framed(&framed, longest, options)?;
        for (vector, text) in vectors.iter_mut().zip(&framed) {
            if vector.is_empty() {
                return Err(ModelError::NoTokens.into());
            }
            // The mean of unit vectors is shorter than one.
            if options.normalize && text.words.len() + text.special() > longest {
                scale_to_one(vector);
            }
        }
        Ok(vectors)
    }

    /// Returns the vector of a text given as all of its tokens, special ones included: pooled as the checkpoint recommends,
    /// and of length one.
    pub fn embed_tokens(&self, tokens: &[u32]) -> Result<Vec<f32>, RuntimeError> {
        let text = [Framed::unframed(tokens)];
        let vector = self.embed_framed(&text, tokens.len(), &EmbedOptions::default())?.pop();
        vector.filter(|vector| !vector.is_empty()).ok_or_else(|| ModelError::NoTokens.into())
    }

    /// Embeds texts given as tokens, in pieces of at most `longest`.
    pub(crate) fn embed_framed(
        &self,
        texts: &[Framed],
        longest: usize,
        options: &EmbedOptions,
    ) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let readout = Readout::new(self.checkpoint(), self.modules.clone(), *options)?;
        // The text that each piece belongs to, and its share.
        let mut owners = Vec::new();
        let mut pieces = Vec::new();
        for (at, text) in texts.iter().enumerate() {
            for (piece, share) in text.pieces(longest) {
                owners.push((at, share));
                pieces.push(piece);
            }
        }
        let mut means = vec![Vec::new(); texts.len()];
        let mut owners = owners.into_iter();
        for batch in batches(&pieces, self.rows_at_once(), |piece| self.rows_of(piece.len())) {
            let batch: Vec<&[u32]> = batch.iter().map(Vec::as_slice).collect();
            let _paid = self.pay_for_pass(batch.iter().map(|piece| piece.len()))?;
            for states in self.states(&batch)? {
                let vector = readout.vector(states)?;
                let Some((at, share)) = owners.next() else { break };
                add_share(&mut means[at], &vector, share);
            }
        }
        Ok(means)
    }

    fn states(&self, texts: &[&[u32]]) -> Result<Vec<Tensor<2>>, RuntimeError> {
        match self.network() {
            Network::Decoder(decoder) => Ok(decoder.states(texts)?),
            Network::Encoder(encoder) => Ok(encoded(encoder, texts)?),
        }
    }
}

fn encoded(encoder: &Encoder, texts: &[&[u32]]) -> Result<Vec<Tensor<2>>, ModelError> {
    let inputs: Vec<_> = texts.iter().map(|tokens| EncoderInput::new(tokens)).collect();
    let states = encoder.forward_together(&inputs)?;
    let mut row = 0;
    let of = |tokens: &&[u32]| {
        row += tokens.len();
        states.clone().narrow(0, row - tokens.len(), tokens.len())
    };
    Ok(texts.iter().map(of).collect())
}

/// Splits items into batches of at most `most` rows, or one longer item.
fn batches<T>(all: &[T], most: usize, length: impl Fn(&T) -> usize) -> Vec<&[T]> {
    let mut batches = Vec::new();
    let (mut begin, mut rows) = (0, 0);
    for (at, one) in all.iter().enumerate() {
        if at > begin && rows + length(one) > most {
            batches.push(&all[begin..at]);
            (begin, rows) = (at, 0);
        }
        rows += length(one);
    }
    if begin < all.len() {
        batches.push(&all[begin..]);
    }
    batches
}

/// Adds a piece's share to a text's vector.
pub(crate) fn add_share(mean: &mut Vec<f32>, vector: &[f32], share: f32) {
    mean.resize(vector.len(), 0.0);
    mean.iter_mut().zip(vector).for_each(|(mean, element)| *mean += share * element);
}

/// Scales a vector to length one. A zero vector stays zero.
fn scale_to_one(vector: &mut [f32]) {
    let length = vector.iter().map(|element| element * element).sum::<f32>().sqrt().max(1e-12);
    vector.iter_mut().for_each(|element| *element /= length);
}
