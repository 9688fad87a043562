//! Ranks documents by how well they answer a query.

use firebox_model::{Encoder, EncoderInput, Network};

use super::{Framed, batches};
use crate::readback::read_floats;
use crate::readout::EmbedOptions;
use crate::{Model, RuntimeError};

/// A document with its score.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Ranked {
    /// Its index among the given documents.
    pub document: usize,
    /// The score: from 0 to 1 for a cross-encoder, from -1 to 1 for other models.
    pub score: f32,
}

impl Model {
    /// Ranks documents by how well they answer a query, the best first.
    ///
    /// A cross-encoder, an encoder with a classifier, reads the query and each document together. Other models
    /// compare the [vectors](Self::embed) of the two.
    pub fn rerank<T: AsRef<str>>(&self, query: &str, documents: &[T]) -> Result<Vec<Ranked>, RuntimeError> {
        let scores = match self.network() {
            Network::Encoder(encoder) if encoder.labels().is_some() => {
                self.read_together(encoder, query, documents)?
            }
            _ => {
                let options = EmbedOptions::default();
                let queries = self.embed(&[query], &options)?;
                let vectors = self.embed(documents, &options)?;
                let cosine = |vector: &Vec<f32>| vector.iter().zip(&queries[0]).map(|(a, b)| a * b).sum();
                vectors.iter().map(cosine).collect()
            }
        };
        let mut ranked: Vec<_> =
            scores.into_iter().enumerate().map(|(document, score)| Ranked { document, score }).collect();
        ranked.sort_by(|one, other| other.score.total_cmp(&one.score));
        Ok(ranked)
    }

    fn read_together<T: AsRef<str>>(
        &self,
        encoder: &Encoder,
        query: &str,
        documents: &[T],
    ) -> Result<Vec<f32>, RuntimeError> {
        let tokenizer = self.tokenizer()?;
        let query = Framed::new(tokenizer, query)?;
        let longest = encoder.config().max_positions;
        // Families that repeat the separator do not tell the texts apart by types.
        let repeats = encoder.config().classifier.as_ref().is_some_and(|config| config.repeats_separator);
        let between = if repeats { query.closing.repeat(2) } else { query.closing.clone() };
        let pair = |document: &T| {
            let document = Framed::new(tokenizer, document.as_ref())?;
            let around = query.opening.len() + between.len() + document.closing.len();
            // The query comes first. Each is cut to what fits.
            let asked = query.words.len().min(longest.saturating_sub(around + 1));
            let told = document.words.len().min(longest.saturating_sub(around + asked));
            let mut tokens = [&query.opening[..], &query.words[..asked], &between].concat();
            let second = if repeats { usize::MAX } else { tokens.len() };
            tokens.extend_from_slice(&document.words[..told]);
            tokens.extend_from_slice(&document.closing);
            Ok((tokens, second))
        };
        let pairs = documents.iter().map(pair).collect::<Result<Vec<_>, RuntimeError>>()?;
        let mut scores = Vec::with_capacity(pairs.len());
        for batch in batches(&pairs, self.rows_at_once(), |(tokens, _)| tokens.len()) {
            let _paid = self.pay_for_pass(batch.iter().map(|(tokens, _)| tokens.len()))?;
            let inputs: Vec<_> =
                batch.iter().map(|(tokens, second)| EncoderInput { tokens, second: *second }).collect();
            let Some(said) = encoder.classify(&inputs)? else { break };
            let labels = said.dims()[1];
            scores.extend(read_floats(said)?.chunks(labels).map(probability));
        }
        Ok(scores)
    }
}

/// Returns the probability of the only label, or of the last of several: rerankers are trained so.
fn probability(logits: &[f32]) -> f32 {
    let last = logits.last().copied().unwrap_or_default();
    let others: f32 = match logits.len() {
        1 => (-last).exp(),
        count => logits[..count - 1].iter().map(|logit| (logit - last).exp()).sum(),
    };
    1.0 / (1.0 + others)
}
