//! A pass of several sessions, layer by layer.

use firebox_cache::SequenceCache;
use firebox_model::{Decoder, Input, Pass};

use super::{NextChunk, Session};
use crate::RuntimeError;
use crate::readback::read_floats;

/// A pass over one chunk of each of several sessions, which go through the layers together. The caller runs it layer by
/// layer, with the same sessions in the same order every time.
///
/// If it fails or is abandoned, every session takes back [what the pass left](Session::undo_pass).
#[derive(Debug)]
pub struct BatchPass(Pass);

impl BatchPass {
    /// Begins a pass over [chunks](Session::next_chunk) that have [their pages](Session::reserve_pages). `has_logits` says
    /// whether it ends with logits.
    pub fn begin(
        decoder: &Decoder,
        chunks: &[(&Session, &NextChunk)],
        has_logits: bool,
    ) -> Result<Self, RuntimeError> {
        let inputs: Vec<Input<'_>> =
            chunks.iter().map(|(session, chunk)| session.chunk_input(chunk)).collect();
        Ok(Self(decoder.begin_pass(&inputs, has_logits)?))
    }

    /// Returns the layer that runs next.
    pub fn next_layer(&self) -> usize {
        self.0.next_layer()
    }

    /// Runs one layer.
    pub fn step(&mut self, decoder: &Decoder, sessions: &mut [&mut Session]) -> Result<(), RuntimeError> {
        let mut caches: Vec<&mut SequenceCache> =
            sessions.iter_mut().map(|session| &mut session.cache).collect();
        Ok(self.0.step(decoder, &mut caches)?)
    }

    /// Ends the pass, and returns the logits after the last `counts[i]` tokens of the chunk of session `i`.
    pub fn logits(self, decoder: &Decoder, counts: &[usize]) -> Result<Vec<f32>, RuntimeError> {
        read_floats(self.0.last_logits(decoder, counts)?)
    }
}
