//! Passes under way, and the results of their steps.

use std::sync::Arc;
use std::time::Duration;

use firebox_model::StreamTurn;
use firebox_runtime::session::BatchPass;
use firebox_runtime::{EmbeddingChunk, Session};

use crate::prefill_pacer::Work;
use crate::sequence::{ComputedPrompt, RequestId, Sequence};

/// A pass under way.
#[derive(Debug)]
pub(crate) struct InFlightPass {
    pub pass: BatchPass,
    pub entries: Arc<[BatchEntry]>,
    /// Chunks of texts that are embedded, in the order of the pass's inputs behind those of the entries.
    pub embeddings: Vec<EmbeddingEntry>,
    /// Steps of the pass: the blocks from the first on, then the unembedding.
    pub steps: usize,
    /// When it began, and how long its layers took.
    pub began: Duration,
    pub took: Duration,
    /// Other threads' passes over the same streamed weights wait for its end.
    #[expect(dead_code, reason = "held for its drop")]
    pub turn: StreamTurn,
}

impl InFlightPass {
    /// Returns the requests that are in it.
    pub fn requests(&self) -> impl Iterator<Item = RequestId> {
        let embeddings = self.embeddings.iter().map(|entry| entry.id);
        self.entries.iter().map(|entry| entry.id).chain(embeddings)
    }

    pub fn rows(&self) -> usize {
        let embedded = self.embeddings.iter().map(|entry| entry.chunk.rows());
        self.entries.iter().map(|entry| entry.tokens).chain(embedded).sum()
    }

    /// Returns the number of rows of each request.
    pub fn rows_by_request(&self) -> impl Iterator<Item = (RequestId, usize)> {
        let embedded = self.embeddings.iter().map(|entry| (entry.id, entry.chunk.rows()));
        self.entries.iter().map(|entry| (entry.id, entry.tokens)).chain(embedded)
    }

    /// Returns the number of sequences, each text counted as one.
    pub fn sequences(&self) -> usize {
        self.entries.len() + self.embeddings.iter().map(|entry| entry.chunk.pieces()).sum::<usize>()
    }

    /// Returns the work of a layer for all rows.
    pub fn work(&self) -> Work {
        self.work_of(|_| true)
    }

    /// Returns the work of a layer for rows of prompts and texts.
    pub fn prefill_work(&self) -> Work {
        self.work_of(|entry| entry.is_prefill)
    }

    fn work_of(&self, counts: impl Fn(&BatchEntry) -> bool) -> Work {
        let sequences = self.entries.iter().filter(|entry| counts(entry));
        let sequences = sequences.map(|entry| (entry.tokens, entry.before));
        let embedded = self.embeddings.iter().flat_map(|entry| entry.chunk.parts());
        sequences.chain(embedded).map(|(tokens, before)| Work::new(tokens, before)).sum()
    }

    /// Returns whether it has rows of prompts or texts.
    pub fn is_prefill(&self) -> bool {
        !self.embeddings.is_empty() || self.entries.iter().any(|entry| entry.is_prefill)
    }
}

/// A chunk of an embedding in a pass.
#[derive(Debug)]
pub(crate) struct EmbeddingEntry {
    pub id: RequestId,
    pub chunk: EmbeddingChunk,
}

/// A chunk of a sequence in a pass.
#[derive(Debug)]
pub(crate) struct BatchEntry {
    pub id: RequestId,
    pub tokens: usize,
    /// Tokens in its cache before the pass.
    pub before: usize,
    /// Whether the pass covers all tokens of the sequence, so that logits are needed.
    pub needs_logits: bool,
    /// Whether it is prefill: a prompt, or evicted tokens that are recomputed.
    pub is_prefill: bool,
    /// Draft tokens at its end.
    pub drafted: usize,
}

impl BatchEntry {
    /// Returns after how many of its last tokens logits are needed.
    pub fn logits(&self) -> usize {
        if self.needs_logits { 1 + self.drafted } else { 0 }
    }
}

/// The result of one step.
#[derive(Debug, Default)]
pub(crate) struct StepResult {
    /// How long the layer took; `None` if none ran.
    pub took: Option<Duration>,
    /// The request of each token that was chosen.
    pub tokens: Vec<RequestId>,
    /// How many rows of each request a pass has computed that ended.
    pub rows: Vec<(RequestId, usize)>,
    /// Prompts that other choices of their requests wait for.
    pub prompts: Vec<ComputedPrompt>,
    /// Requests that have ended.
    pub ended: Vec<RequestId>,
    /// Sequences that found the page pool exhausted.
    pub starved: Vec<RequestId>,
}

/// Returns the sessions of these entries, which have the order of the sequences.
pub(crate) fn sessions<'s>(sequences: &'s mut [Sequence], entries: &[BatchEntry]) -> Vec<&'s mut Session> {
    let mut entries = entries.iter().peekable();
    let mine = sequences.iter_mut().filter(|one| entries.next_if(|entry| entry.id == one.id).is_some());
    mine.map(|one| &mut one.session).collect()
}
