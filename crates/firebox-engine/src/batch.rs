//! The batch of a model: sequences that go through its layers together.

mod decoding;

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use firebox_cache::PAGE_TOKENS;
use firebox_memory::process::release_after_prompt;
use firebox_model::{Decoder, Passed};
use firebox_runtime::decode::PassCosts;
use firebox_runtime::session::{BatchPass, NextChunk};
use firebox_runtime::{Finish, PrefixTree, Session};

use crate::clock::Clock;
use crate::embedding_request::RunningEmbeddings;
use crate::error::EngineError;
use crate::event::Event;
use crate::in_flight::{BatchEntry, EmbeddingEntry, InFlightPass, StepResult, sessions};
use crate::pass_chunks::{Pace, PassChunks};
use crate::prefill_pacer::PrefillPacer;
use crate::recent_rows::RecentRows;
use crate::sequence::{ComputedPrompt, Need, RequestId, Sequence};
use crate::shield::{computed, shielded};

/// Prompts from this length on are cached as prefixes before their answer has ended.
const MIN_CACHED_PROMPT: usize = PAGE_TOKENS;

/// Sequences of one model that go through its layers together, layer by layer.
///
/// Decoding and prefill have passes of their own, so that between two decode steps prefill gets as long as a step takes
/// and no longer.
#[derive(Debug)]
pub(crate) struct Batch {
    decoder: Arc<Decoder>,
    prefixes: PrefixTree,
    sequences: Vec<Sequence>,
    /// Texts that are embedded: they go through the layers in passes of prompts.
    pub embeddings: RunningEmbeddings,
    decoding: Option<InFlightPass>,
    prefilling: Option<InFlightPass>,
    /// The entries of the pass that a step under way has taken from its slot.
    stepping: Option<Arc<[BatchEntry]>>,
    /// The most rows of a prefill pass since prefill last ended.
    prefill_rows: usize,
    pacer: PrefillPacer,
    /// Measured costs of decode passes, from which draft lengths are chosen.
    costs: PassCosts,
    /// How long proposing the drafts of the last decode pass took.
    drafting: Duration,
    /// Decode steps that have begun.
    decode_steps: u64,
    /// What clients have had of the passes.
    recent: RecentRows,
}

/// The sink of events.
pub(crate) type EventSink<'t> = &'t mut dyn FnMut(RequestId, Event);

impl Batch {
    pub fn new(decoder: Arc<Decoder>, prefixes: PrefixTree) -> Self {
        Self {
            decoder,
            prefixes,
            sequences: Vec::new(),
            embeddings: RunningEmbeddings::default(),
            decoding: None,
            prefilling: None,
            stepping: None,
            prefill_rows: 0,
            pacer: PrefillPacer::default(),
            costs: PassCosts::default(),
            drafting: Duration::ZERO,
            decode_steps: 0,
            recent: RecentRows::default(),
        }
    }

    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Returns the prefix cache that sequences start from.
    pub fn prefixes(&self) -> &PrefixTree {
        &self.prefixes
    }

    /// Adds a sequence; it takes part from the next pass on.
    pub fn add(&mut self, sequence: Sequence) {
        self.sequences.push(sequence);
    }

    pub fn sequences(&self) -> impl ExactSizeIterator<Item = &Sequence> {
        self.sequences.iter()
    }

    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Sequence> {
        self.sequences.iter_mut().find(|sequence| sequence.id == id)
    }

    /// Removes a sequence, unless it is in a pass.
    pub fn remove(&mut self, id: RequestId) -> Option<Sequence> {
        if self.is_in_pass(id) {
            return None;
        }
        let at = self.sequences.iter().position(|sequence| sequence.id == id)?;
        Some(self.sequences.remove(at))
    }

    /// Abandons the passes under way, that of a step that panicked included, and rolls their sequences back. Sequences
    /// that cannot be rolled back are dropped.
    pub fn abandon(&mut self) {
        let in_flight = [self.decoding.take(), self.prefilling.take()].into_iter().flatten();
        let passes: Vec<_> = in_flight.map(|one| one.entries).chain(self.stepping.take()).collect();
        for entry in passes.iter().flat_map(|entries| entries.iter()) {
            let Some(sequence) = self.get_mut(entry.id) else { continue };
            let device = sequence.session.decoder().device().clone();
            let rolled_back = shielded(&device, || {
                sequence.abandon_pass(entry.before);
                Ok(())
            });
            if rolled_back.is_err() {
                self.sequences.retain(|sequence| sequence.id != entry.id);
            }
        }
    }

    /// Returns whether a sequence is in a pass that has not ended.
    pub fn is_in_pass(&self, id: RequestId) -> bool {
        self.in_pass().any(|in_pass| in_pass == id)
    }

    fn in_pass(&self) -> impl Iterator<Item = RequestId> {
        let in_flight = self.decoding.iter().chain(&self.prefilling);
        in_flight.flat_map(InFlightPass::requests)
    }

    /// Returns whether a pass is under way or a sequence can go on.
    pub fn has_work(&self) -> bool {
        self.decoding.is_some()
            || self.prefilling.is_some()
            || self.sequences.iter().any(|one| !one.held || one.cancelled)
            || self.embeddings.iter().any(|one| !one.held || one.cancelled)
    }

    pub fn upcoming_layer(&self) -> usize {
        let next = |in_flight: &InFlightPass| in_flight.pass.next_layer();
        match (&self.decoding, &self.prefilling) {
            (Some(decoding), _) => next(decoding),
            (None, Some(prefilling)) if self.has_two_passes() && self.has_waiting(Need::Decode) => {
                if self.pacer.may_prefill(Some(prefilling.work())) { next(prefilling) } else { 0 }
            }
            (None, prefilling) => prefilling.as_ref().map_or(0, next),
        }
    }

    /// Returns the step that runs next on a model that streams its weights, or `None` if no more weights are needed for
    /// the pass.
    pub fn upcoming_step(&self) -> Option<usize> {
        let Some(in_flight) = &self.prefilling else { return Some(0) };
        Some(in_flight.pass.next_layer()).filter(|step| *step < in_flight.steps)
    }

    /// Runs one layer of one pass, and after the last layer chooses the next tokens.
    pub fn step(&mut self, clock: &dyn Clock, sink: EventSink<'_>) -> StepResult {
        let mut result = StepResult::default();
        let began = clock.now();
        self.complete_cancelled(clock, sink, &mut result);
        self.embeddings.yields &= !self.sequences.is_empty();
        let decoder = self.decoder.clone();
        // Passes outside the engine that came before go first.
        if self.prefilling.is_none() && decoder.streamed().is_some_and(|streamed| streamed.is_busy()) {
            return result;
        }
        let Some(need) = self.choose_pass(clock, sink, &mut result) else { return result };
        // A session outside the engine may have begun a pass since readiness was checked.
        let Some(_guard) = decoder.try_stream() else { return result };
        let Some(mut in_flight) = self.slot(need).take() else { return result };
        self.stepping = Some(in_flight.entries.clone());
        let layers = self.decoder.layers();
        let first = in_flight.pass.next_layer();
        let is_joint = !self.has_two_passes() && in_flight.is_prefill();
        let ends = first == layers;
        let done = if ends { Ok(()) } else { self.run_layer(&mut in_flight) };
        let layer = clock.now().saturating_sub(began);
        in_flight.took += layer;
        // A recorded step runs all layers at once.
        let ran = in_flight.pass.next_layer().saturating_sub(first).max(1);
        let layer = layer / ran as u32;
        match need {
            _ if is_joint => self.pacer.record_joint_layer(in_flight.prefill_work(), layer),
            // A pass over streamed weights that only decodes.
            Need::Prefill if !in_flight.is_prefill() => {
                self.pacer.record_layer(Need::Decode, in_flight.work(), layer);
            }
            need => self.pacer.record_layer(need, in_flight.work(), layer),
        }
        match done {
            Err(error) => {
                self.fail(&in_flight.entries, &in_flight.embeddings, error, sink, &mut result);
            }
            // A step for the unembedding lets the engine wait for its weights like for those of a layer.
            Ok(())
                if in_flight.pass.next_layer() < layers
                    || (!ends && in_flight.steps > layers && !self.has_two_passes()) =>
            {
                *self.slot(need) = Some(in_flight);
            }
            Ok(()) => self.finish(need, in_flight, clock, sink, &mut result),
        }
        self.stepping = None;
        result.took = Some(clock.now().saturating_sub(began));
        result
    }

    /// Returns whether decode and prefill passes can be under way at once. Layers that are streamed from disk are read
    /// for one pass at a time.
    fn has_two_passes(&self) -> bool {
        self.decoder.streamed().is_none()
    }

    fn slot(&mut self, need: Need) -> &mut Option<InFlightPass> {
        match need {
            Need::Decode => &mut self.decoding,
            Need::Prefill => &mut self.prefilling,
        }
    }

    /// Chooses the pass that gets the next layer, and begins it if necessary.
    fn choose_pass(
        &mut self,
        clock: &dyn Clock,
        sink: EventSink<'_>,
        result: &mut StepResult,
    ) -> Option<Need> {
        if self.decoding.is_some() {
            return Some(Need::Decode);
        }
        if !self.has_two_passes() {
            if self.prefilling.is_none() {
                let decodes_alone = self.has_waiting(Need::Decode) && self.pacer.measures_decoding();
                let needs = if decodes_alone { &[Need::Decode][..] } else { &[Need::Decode, Need::Prefill] };
                self.prefilling = self.begin(needs, clock, sink, result);
            }
            return self.prefilling.is_some().then_some(Need::Prefill);
        }
        let decodes = self.has_waiting(Need::Decode);
        let prefills = self.prefilling.is_some() || self.has_waiting(Need::Prefill);
        let work = self.prefilling.as_ref().map(InFlightPass::work);
        let order = match (decodes, prefills) {
            (true, true) if self.pacer.may_prefill(work) => [Need::Prefill, Need::Decode],
            _ => [Need::Decode, Need::Prefill],
        };
        order.into_iter().find(|&need| {
            if self.slot(need).is_none() {
                *self.slot(need) = self.begin(&[need], clock, sink, result);
            }
            self.slot(need).is_some()
        })
    }

    fn has_waiting(&self, need: Need) -> bool {
        let texts = || self.embeddings.ready().any(|one| !self.is_in_pass(one.id));
        self.sequences.iter().any(|one| !one.held && one.need() == need && !self.is_in_pass(one.id))
            || (need == Need::Prefill && texts())
    }

    /// Begins a pass of all sequences with one of these needs.
    fn begin(
        &mut self,
        needs: &[Need],
        clock: &dyn Clock,
        sink: EventSink<'_>,
        result: &mut StepResult,
    ) -> Option<InFlightPass> {
        let now = clock.now();
        let decoding = if needs.contains(&Need::Decode) { self.decoding(now) } else { Vec::new() };
        self.draft(&decoding);
        let in_pass: Vec<RequestId> = self.in_pass().collect();
        let decodes = self.sequences.iter().filter(|one| decoding.contains(&one.id));
        let rows = decodes.map(|one| one.session.uncached_tokens()).sum();
        let (layers, step) = (self.decoder.layers(), self.costs.seconds(rows));
        let PassChunks { lengths, texts } = PassChunks::new(
            needs,
            &self.sequences,
            &self.embeddings,
            &in_pass,
            &decoding,
            Pace { pacer: &self.pacer, layers, step },
            |client| self.standing(client, now),
        );
        let mut chunks: Vec<(usize, NextChunk)> = Vec::new();
        let mut failed = Vec::new();
        let mut order: Vec<usize> = (0..lengths.len()).filter(|&at| lengths[at] > 0).collect();
        order.sort_by_key(|&at| std::cmp::Reverse(self.sequences[at].priority));
        for at in order {
            let id = self.sequences[at].id;
            match self.sequences[at].next_chunk(lengths[at]) {
                Ok(chunk) => chunks.push((at, chunk)),
                Err(error) if error.is_pool_exhausted() => result.starved.push(id),
                Err(error) => failed.push((id, error)),
            }
        }
        chunks.sort_by_key(|(at, _)| *at);
        // Failed sequences are removed below, which shifts the indices of those after them.
        for (at, _) in &mut chunks {
            *at -=
                failed.iter().filter(|(id, _)| self.sequences[..*at].iter().any(|one| one.id == *id)).count();
        }
        for (id, error) in failed {
            self.drop_failed(id, error, sink, result);
        }
        let (mut embeddings, mut positions) = (Vec::new(), self.embeddings.positions());
        for (id, rows) in self.embeddings.rotated(texts) {
            match self.embeddings.next_chunk(id, rows, &mut positions) {
                Some(Ok(chunk)) => embeddings.push(EmbeddingEntry { id, chunk }),
                // Answers free pages when they end.
                Some(Err(error)) if error.is_pool_exhausted() && !self.sequences.is_empty() => {}
                Some(Err(error)) if error.is_pool_exhausted() => result.starved.push(id),
                Some(Err(error)) => self.drop_failed(id, error, sink, result),
                None => {}
            }
        }
        if result.starved.is_empty() {
            self.embeddings.yields = false;
        }
        self.embeddings.sort(&mut embeddings);
        self.begin_with(chunks, embeddings, clock, sink, result)
    }

    /// Gives up the pages of texts that are in no pass, for answers that found none. They take none before these had another
    /// chance. Returns whether texts have or had any.
    pub fn yield_pages(&mut self, starved: &[RequestId]) -> bool {
        let in_pass: Vec<RequestId> = self.in_pass().collect();
        let answers = self.sequences.iter().any(|sequence| starved.contains(&sequence.id));
        answers && self.embeddings.yield_pages(&in_pass)
    }

    /// Begins a pass over these chunks, each with the index of its sequence, and over chunks of texts.
    fn begin_with(
        &mut self,
        chunks: Vec<(usize, NextChunk)>,
        embeddings: Vec<EmbeddingEntry>,
        clock: &dyn Clock,
        sink: EventSink<'_>,
        result: &mut StepResult,
    ) -> Option<InFlightPass> {
        if chunks.is_empty() && embeddings.is_empty() {
            return None;
        }
        let prefilled: Vec<RequestId> =
            self.sequences.iter().filter(|one| one.need() == Need::Prefill).map(|one| one.id).collect();
        let entries = chunks.iter().map(|(at, chunk)| {
            let sequence = &self.sequences[*at];
            let Sequence { id, session, state, .. } = sequence;
            let needs_logits = chunk.tokens.end == session.tokens().len();
            let (tokens, before, drafted) = (chunk.tokens.len(), session.cache().len(), state.pending());
            BatchEntry { id: *id, tokens, before, needs_logits, is_prefill: prefilled.contains(id), drafted }
        });
        let entries: Arc<[BatchEntry]> = entries.collect();
        let inputs: Vec<(&Session, &NextChunk)> =
            chunks.iter().map(|(at, chunk)| (&self.sequences[*at].session, chunk)).collect();
        let has_logits = entries.iter().any(|entry| entry.needs_logits);
        // The likeliest tokens suffice for all sequences or are of no use.
        let choosing = chunks.iter().zip(&*entries).filter(|(_, entry)| entry.needs_logits);
        let candidates = choosing.map(|((at, _), _)| self.sequences[*at].state.candidates());
        let most = candidates.reduce(|one, other| Some(one?.max(other?))).flatten();
        let has_heads = embeddings.is_empty() && inputs.iter().all(|(session, _)| session.head().is_some());
        let trunk = self.decoder.split().filter(|_| has_heads);
        let steps = trunk.unwrap_or(self.decoder.layers() + usize::from(has_logits));
        let decoder = self.decoder.clone();
        let texts = self.embeddings.inputs(&embeddings);
        match computed(&decoder, || Ok(BatchPass::begin(&decoder, &inputs, texts, has_logits, most)?)) {
            Ok(pass) => {
                let (began, took) = (clock.now(), Duration::ZERO);
                let turn = decoder.begin_turn();
                Some(InFlightPass { pass, entries, embeddings, steps, began, took, turn })
            }
            Err(error) => {
                self.fail(&entries, &embeddings, error, sink, result);
                None
            }
        }
    }

    fn run_layer(&mut self, in_flight: &mut InFlightPass) -> Result<(), EngineError> {
        let decoder = self.decoder.clone();
        let InFlightPass { pass, entries, embeddings, .. } = in_flight;
        let mut sessions = sessions(&mut self.sequences, entries);
        let mut texts = self.embeddings.caches(embeddings);
        computed(&decoder, || Ok(pass.step(&decoder, &mut sessions, &mut texts)?))
    }

    /// Ends a pass: caches prefixes, chooses tokens and removes sequences that have ended.
    fn finish(
        &mut self,
        need: Need,
        in_flight: InFlightPass,
        clock: &dyn Clock,
        sink: EventSink<'_>,
        result: &mut StepResult,
    ) {
        let (rows, sequences, is_prefill) = (in_flight.rows(), in_flight.sequences(), in_flight.is_prefill());
        result.rows.extend(in_flight.rows_by_request());
        if is_prefill && rows > sequences {
            self.prefill_rows = self.prefill_rows.max(rows);
        }
        let began = clock.now();
        self.count_rows(&in_flight, began);
        self.collect_vectors(&in_flight, sink, result);
        let InFlightPass { pass, entries, took, began: pass_began, .. } = in_flight;
        let record = |batch: &mut Self, logits: usize, took: Duration| {
            let passed = Passed { sequences, rows, logits };
            let wall = clock.now().saturating_sub(pass_began);
            match batch.has_two_passes() {
                true => batch.pacer.record_pass(need, took),
                false if is_prefill => batch.pacer.record_joint_pass(rows - entries.len()),
                false => batch.pacer.record_pass(Need::Decode, wall),
            }
            batch.decoder.end_pass(passed, took);
        };
        let mut cached = Vec::new();
        for entry in entries.iter() {
            if let Some(sequence) = self.get_mut(entry.id) {
                sequence.session.recomputed(entry.tokens);
                let is_prompt = entry.is_prefill
                    && entry.needs_logits
                    && entry.tokens > 1
                    && sequence.session.cache().len() >= MIN_CACHED_PROMPT;
                if is_prompt || sequence.prefix_end == Some(sequence.session.cache().len()) {
                    cached.push(entry.id);
                }
            }
        }
        for sequence in self.sequences.iter().filter(|sequence| cached.contains(&sequence.id)) {
            sequence.cache_prefix(&self.prefixes);
        }
        let counts: Vec<usize> = entries.iter().map(BatchEntry::logits).collect();
        let logit_rows = counts.iter().sum();
        if logit_rows == 0 {
            record(self, logit_rows, took + clock.now().saturating_sub(began));
            return self.release_after_prompts();
        }
        let decoder = self.decoder.clone();
        let scores = match computed(&decoder, || Ok(pass.scores(&decoder, &counts)?)) {
            Ok(scores) => scores,
            Err(error) => return self.fail(&entries, &[], error, sink, result),
        };
        let now = clock.now();
        let took = took + now.saturating_sub(began);
        record(self, logit_rows, took);
        if !is_prefill {
            // Reading streamed weights is a part of the cost.
            let cost = match self.has_two_passes() {
                true => took.saturating_sub(self.drafting),
                false => now.saturating_sub(pass_began),
            };
            self.costs.record(rows, cost);
        }
        for (entry, scores) in entries.iter().filter(|entry| entry.needs_logits).zip(scores) {
            let Some(sequence) = self.get_mut(entry.id) else { continue };
            if sequence.is_late(now) {
                continue;
            }
            if mem::take(&mut sequence.shares_prompt) {
                let (session, scores) = (sequence.session.clone(), Arc::new(scores.clone()));
                result.prompts.push(ComputedPrompt { id: entry.id, session, scores });
            }
            let mut chosen = 0;
            let mut events = |event| {
                chosen += usize::from(matches!(&event, Event::Piece(piece) if piece.token.is_some()));
                sink(entry.id, event);
            };
            let advanced = sequence.advance(scores, now, &mut events);
            match advanced {
                Err(error) => self.drop_failed(entry.id, error, sink, result),
                Ok(ended) => {
                    // A token that ends the answer counts, although it is no part of it.
                    result.tokens.extend(std::iter::repeat_n(entry.id, chosen.max(1)));
                    if ended {
                        self.complete(entry.id, now, sink, result);
                    }
                }
            }
        }
        self.release_after_prompts();
    }

    /// Takes the states of a pass's texts, and returns the vectors of those that are complete.
    fn collect_vectors(&mut self, in_flight: &InFlightPass, sink: EventSink<'_>, result: &mut StepResult) {
        if in_flight.embeddings.is_empty() {
            return;
        }
        let decoder = self.decoder.clone();
        let mut states = match computed(&decoder, || Ok(in_flight.pass.states(&decoder))) {
            Ok(states) => states.into_iter(),
            Err(error) => return self.fail(&[], &in_flight.embeddings, error, sink, result),
        };
        for EmbeddingEntry { id, chunk } in &in_flight.embeddings {
            let mine: Vec<_> = states.by_ref().take(chunk.pieces()).collect();
            let Some(request) = self.embeddings.get_mut(*id) else { continue };
            match computed(&decoder, || Ok(request.embedding.finish_chunk(chunk, mine)?)) {
                Err(error) => self.drop_failed(*id, error, sink, result),
                Ok(vectors) => {
                    result.tokens.push(*id);
                    request.has_vectors |= !vectors.is_empty();
                    let is_done = request.embedding.remaining() == 0;
                    if !vectors.is_empty() && !request.cancelled {
                        sink(*id, Event::Vectors(vectors));
                    }
                    if is_done {
                        self.complete_embedding(*id, sink, result);
                    }
                }
            }
        }
    }

    fn complete_embedding(&mut self, id: RequestId, sink: EventSink<'_>, result: &mut StepResult) {
        if let Some(request) = self.embeddings.take(id) {
            sink(id, request.finished());
            result.ended.push(id);
        }
    }

    /// Releases what passes of prompts and texts have left once there are no more.
    fn release_after_prompts(&mut self) {
        if self.prefilling.is_none() && !self.has_waiting(Need::Prefill) {
            release_after_prompt(mem::take(&mut self.prefill_rows));
        }
    }

    fn complete(&mut self, id: RequestId, now: Duration, sink: EventSink<'_>, result: &mut StepResult) {
        if let Some(sequence) = self.remove(id) {
            sequence.cache_prefix(&self.prefixes);
            sink(id, sequence.finished(now));
            result.ended.push(id);
        }
    }

    fn complete_cancelled(&mut self, clock: &dyn Clock, sink: EventSink<'_>, result: &mut StepResult) {
        let cancelled = |one: &&Sequence| one.cancelled && !self.is_in_pass(one.id);
        let cancelled: Vec<RequestId> = self.sequences.iter().filter(cancelled).map(|one| one.id).collect();
        for id in cancelled {
            if let Some(sequence) = self.get_mut(id)
                && sequence.output().finish() != Some(Finish::Cancelled)
                && let Some(event) = sequence.cancel()
            {
                sink(id, event);
            }
            self.complete(id, clock.now(), sink, result);
        }
        let cancelled = self.embeddings.iter().filter(|one| one.cancelled && !self.is_in_pass(one.id));
        let cancelled: Vec<RequestId> = cancelled.map(|one| one.id).collect();
        for id in cancelled {
            self.complete_embedding(id, sink, result);
        }
    }

    fn fail(
        &mut self,
        entries: &[BatchEntry],
        embeddings: &[EmbeddingEntry],
        error: EngineError,
        sink: EventSink<'_>,
        result: &mut StepResult,
    ) {
        let source = Arc::new(error);
        for EmbeddingEntry { id, .. } in embeddings {
            self.drop_failed(*id, EngineError::Together { source: source.clone() }, sink, result);
        }
        for entry in entries {
            if let Some(sequence) = self.get_mut(entry.id) {
                sequence.abandon_pass(entry.before);
            }
            self.drop_failed(entry.id, EngineError::Together { source: source.clone() }, sink, result);
        }
    }

    fn drop_failed(
        &mut self,
        id: RequestId,
        error: EngineError,
        sink: EventSink<'_>,
        result: &mut StepResult,
    ) {
        if let Some(at) = self.sequences.iter().position(|sequence| sequence.id == id) {
            sink(id, self.sequences.remove(at).failed(error));
        } else if let Some(request) = self.embeddings.take(id) {
            sink(id, request.failed(error));
        }
        result.ended.push(id);
    }
}
