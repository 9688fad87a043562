//! A pass of several sessions, layer by layer.

use std::ops::Range;

use burn::tensor::Tensor;
use firebox_cache::SequenceCache;
use firebox_kernels::likeliest;
use firebox_model::{Decoder, Input, Pass};

use super::{NextChunk, Session};
use crate::RuntimeError;
use crate::decode::Scores;
use crate::readback::read_floats;

/// A pass over one chunk of each of several sessions, and over [texts](crate::Embedding) that are embedded, which go
/// through the layers together. The caller runs it layer by layer, with the same sessions and caches in the same order
/// every time.
///
/// If it fails or is abandoned, every session takes back [what the pass left](Session::undo_pass).
#[derive(Debug)]
pub struct BatchPass {
    pass: Pass,
    /// The inputs that are texts; they follow the sessions.
    texts: Range<usize>,
    /// How many of the likeliest tokens suffice for all sessions.
    most: Option<usize>,
}

impl BatchPass {
    /// Begins a pass over [chunks](Session::next_chunk) that have [their pages](Session::reserve_pages), and over texts.
    /// `has_logits` says whether it ends with logits, and `most` how many of the likeliest tokens suffice instead, if they do for
    /// all sessions.
    pub fn begin(
        decoder: &Decoder,
        chunks: &[(&Session, &NextChunk)],
        texts: Vec<Input<'_>>,
        has_logits: bool,
        most: Option<usize>,
    ) -> Result<Self, RuntimeError> {
        let mut inputs: Vec<Input<'_>> =
            chunks.iter().map(|(session, chunk)| session.chunk_input(chunk)).collect();
        inputs.extend(texts);
        let texts = chunks.len()..inputs.len();
        let pass = match texts.is_empty() {
            true => decoder.begin_pass(&inputs, has_logits)?,
            false => decoder.begin_pass_with_states(&inputs, has_logits)?,
        };
        let most = most.filter(|_| has_logits && likeliest::supports(decoder.device()));
        let pass = match most {
            Some(most) => pass.with_likeliest(most),
            None => pass,
        };
        Ok(Self { pass, texts, most })
    }

    /// Returns the layer that runs next.
    pub fn next_layer(&self) -> usize {
        self.pass.next_layer()
    }

    /// Runs one layer. `texts` are the caches of the texts.
    pub fn step(
        &mut self,
        decoder: &Decoder,
        sessions: &mut [&mut Session],
        texts: &mut [&mut SequenceCache],
    ) -> Result<(), RuntimeError> {
        let sessions = sessions.iter_mut().map(|session| &mut session.cache);
        let mut caches: Vec<&mut SequenceCache> =
            sessions.chain(texts.iter_mut().map(|cache| &mut **cache)).collect();
        Ok(self.pass.step(decoder, &mut caches)?)
    }

    /// Returns the states of each text after all layers.
    pub fn states(&self, decoder: &Decoder) -> Vec<Tensor<2>> {
        self.pass.states(decoder, self.texts.clone())
    }

    /// Ends the pass, and returns the scores after the last `counts[i]` tokens of the chunk of session `i`, for sessions whose
    /// count is not 0. Where the likeliest tokens suffice, counts are 1.
    pub fn scores(self, decoder: &Decoder, counts: &[usize]) -> Result<Vec<Scores>, RuntimeError> {
        if self.most.is_some() {
            let wanted: Vec<bool> = counts.iter().map(|count| *count > 0).collect();
            let likeliest = self.pass.likeliest(decoder, &wanted)?;
            return Ok(likeliest.into_iter().map(Scores::Likeliest).collect());
        }
        let logits = read_floats(self.pass.last_logits(decoder, counts)?)?;
        let vocab = logits.len() / counts.iter().sum::<usize>();
        let mut rest = &logits[..];
        let scores = counts.iter().filter(|count| **count > 0).map(|count| {
            let (mine, others) = rest.split_at(count * vocab);
            rest = others;
            Scores::Logits(mine.to_vec())
        });
        Ok(scores.collect())
    }
}
