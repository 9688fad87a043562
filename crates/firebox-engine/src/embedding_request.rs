//! Requests for vectors of texts, which share a batch's passes with its sequences.

use std::time::Duration;

use firebox_cache::SequenceCache;
use firebox_runtime::decode::Timing;
use firebox_runtime::{Embedding, EmbeddingChunk, Finish};
use firebox_schedule::{Client, Priority};

use crate::error::EngineError;
use crate::event::{EmbeddingSummary, Event};
use crate::in_flight::EmbeddingEntry;
use crate::prefill_chunks::Prompt;
use crate::prefill_pacer::{PrefillPacer, Work};
use crate::recent_rows::Standing;
use crate::sequence::RequestId;

/// A request for vectors of texts.
#[derive(Debug)]
pub(crate) struct EmbeddingRequest {
    pub id: RequestId,
    pub embedding: Embedding,
    pub client: Client,
    pub priority: Priority,
    pub timing: Timing,
    /// How long it waited in the queue before it first ran.
    pub waited: Option<Duration>,
    /// Whether a vector was returned.
    pub has_vectors: bool,
    /// When it fails unless its first vectors are out.
    pub fail_at: Option<Duration>,
    /// Whether it is paused because its events are not being read.
    pub held: bool,
    /// Whether it is to end as soon as possible.
    pub cancelled: bool,
}

impl EmbeddingRequest {
    /// Marks it as running, for the first time or again.
    pub fn start(&mut self, now: Duration) {
        if self.waited.is_none() {
            let waited = self.timing.since_begin(now);
            self.timing.waited(waited);
            self.timing.prompt(self.embedding.tokens(), 0);
            self.waited = Some(waited);
        }
        self.timing.set_running(true);
    }

    /// Returns whether its first vectors are late.
    pub fn is_late(&self, now: Duration) -> bool {
        self.fail_at.is_some_and(|fail_at| now >= fail_at) && !self.has_vectors
    }

    /// Fails the request.
    pub fn failed(self, error: EngineError) -> Event {
        self.timing.ended(None);
        Event::Failed(error.into())
    }

    /// Returns the last event.
    pub fn finished(self) -> Event {
        let finish = if self.cancelled { Finish::Cancelled } else { Finish::Stop };
        self.timing.ended(Some(finish));
        Event::Embedded(EmbeddingSummary { finish, waited: self.waited.unwrap_or_default() })
    }
}

/// The running embeddings of a batch, in order of their start.
#[derive(Debug, Default)]
pub(crate) struct RunningEmbeddings {
    requests: Vec<EmbeddingRequest>,
    /// Whether they wait because answers found no pages.
    pub yields: bool,
    /// Counts passes that have shares of them.
    passes: usize,
}

impl RunningEmbeddings {
    pub fn add(&mut self, request: EmbeddingRequest) {
        self.requests.push(request);
    }

    pub fn iter(&self) -> impl Iterator<Item = &EmbeddingRequest> {
        self.requests.iter()
    }

    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut EmbeddingRequest> {
        self.requests.iter_mut().find(|request| request.id == id)
    }

    /// Removes a request whether it is in a pass or not.
    pub fn take(&mut self, id: RequestId) -> Option<EmbeddingRequest> {
        let at = self.requests.iter().position(|request| request.id == id)?;
        Some(self.requests.remove(at))
    }

    /// Returns what the requests that may run ask of a pass, as prompts.
    pub fn prompts(
        &self,
        pacer: &PrefillPacer,
        standing: impl Fn(&Client) -> Standing,
    ) -> impl Iterator<Item = (RequestId, Prompt)> {
        self.ready().map(move |request| {
            let EmbeddingRequest { id, priority, embedding, client, .. } = request;
            let row = pacer.layer_seconds(Work::new(1, embedding.depth()));
            let tokens = embedding.remaining();
            (*id, Prompt { priority: *priority, tokens, row, standing: standing(client) })
        })
    }

    /// Returns the requests that may run.
    pub fn ready(&self) -> impl Iterator<Item = &EmbeddingRequest> {
        let ready = |request: &&EmbeddingRequest| !self.yields && !request.held && !request.cancelled;
        self.requests.iter().filter(ready)
    }

    /// Returns the caches of chunks, in order.
    pub fn caches(&mut self, entries: &[EmbeddingEntry]) -> Vec<&mut SequenceCache> {
        let chunk = |request: &EmbeddingRequest| entries.iter().find(|entry| entry.id == request.id);
        let caches = self.requests.iter_mut().filter_map(|request| {
            let EmbeddingEntry { chunk, .. } = chunk(request)?;
            Some(request.embedding.caches(chunk))
        });
        caches.flatten().collect()
    }

    /// Returns the inputs of chunks, in order.
    pub fn inputs(&self, entries: &[EmbeddingEntry]) -> Vec<firebox_model::Input<'_>> {
        let mine = self.requests.iter().filter_map(|request| {
            let entry = entries.iter().find(|entry| entry.id == request.id)?;
            Some(request.embedding.inputs(&entry.chunk))
        });
        mine.flatten().collect()
    }

    /// Gives up the pages of requests that are not in a pass. Returns whether any request has or had some.
    pub fn yield_pages(&mut self, in_pass: &[RequestId]) -> bool {
        let mut found = false;
        for request in self.requests.iter_mut().filter(|request| request.embedding.has_pages()) {
            found = true;
            if !in_pass.contains(&request.id) {
                request.embedding.release_pages();
            }
        }
        self.yields |= found;
        found
    }

    /// Returns the positions that one pass may begin for all of them.
    pub fn positions(&self) -> usize {
        self.requests.iter().map(|request| request.embedding.positions()).max().unwrap_or_default()
    }

    /// Takes `rows` tokens of a request for a pass that may begin `positions` more; nothing if these are used up.
    pub fn next_chunk(
        &mut self,
        id: RequestId,
        rows: usize,
        positions: &mut usize,
    ) -> Option<Result<EmbeddingChunk, EngineError>> {
        let chunk = self.get_mut(id)?.embedding.next_chunk(rows, positions);
        Some(chunk.map_err(EngineError::from))
            .filter(|chunk| !matches!(chunk, Ok(chunk) if chunk.rows() == 0))
    }

    /// Returns the shares of a pass so that each request comes first in turn: positions may be used up by the first.
    pub fn rotated(&mut self, mut shares: Vec<(RequestId, usize)>) -> Vec<(RequestId, usize)> {
        if !shares.is_empty() {
            let first = self.passes % shares.len();
            shares.rotate_left(first);
            self.passes += 1;
        }
        shares
    }

    /// Sorts the chunks of a pass as its inputs are.
    pub fn sort(&self, entries: &mut [EmbeddingEntry]) {
        entries.sort_by_key(|entry| self.requests.iter().position(|request| request.id == entry.id));
    }
}
