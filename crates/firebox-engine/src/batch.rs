//! The batch of a model: sequences that go through its layers together.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firebox_cache::{CacheError, PAGE_TOKENS};
use firebox_memory::process::release_after_prompt;
use firebox_model::{Decoder, ModelError, Passed};
use firebox_runtime::decode::{BatchDraft, PassCosts, draft_together};
use firebox_runtime::session::{BatchPass, NextChunk};
use firebox_runtime::{Finish, PrefixTree, RuntimeError, Session};

use crate::clock::Clock;
use crate::event::Event;
use crate::prefill_chunks::{Prompt, Room, prefill_chunks};
use crate::prefill_pacer::{PrefillPacer, Work};
use crate::sequence::{Need, RequestId, Sequence};
use crate::shield::{computed, shielded};

/// Prompts from this length on are cached as prefixes before their answer has ended.
const WORTH_KEEPING: usize = PAGE_TOKENS;

/// Sequences of one model that go through its layers together, layer by layer.
///
/// Decoding and prefill have passes of their own, so that between two decode steps prefill gets as long as a step takes
/// and no longer.
#[derive(Debug)]
pub(crate) struct Batch {
    decoder: Arc<Decoder>,
    prefixes: PrefixTree,
    sequences: Vec<Sequence>,
    answering: Option<InFlightPass>,
    feeding: Option<InFlightPass>,
    /// The most rows of a prefill pass since prefill last ended.
    fed: usize,
    pacer: PrefillPacer,
    /// Measured costs of decode passes, from which draft lengths are chosen.
    costs: PassCosts,
    /// How long proposing the drafts of the last decode pass took.
    drafting: Duration,
}

/// A pass under way.
#[derive(Debug)]
struct InFlightPass {
    pass: BatchPass,
    members: Vec<BatchEntry>,
    /// Steps of the pass: the blocks from the first on, then the unembedding.
    steps: usize,
    took: Duration,
}

impl InFlightPass {
    fn rows(&self) -> usize {
        self.members.iter().map(|member| member.tokens).sum()
    }

    fn work(&self) -> Work {
        self.members.iter().map(|member| Work::of(member.tokens, member.before)).sum()
    }
}

#[derive(Debug)]
struct BatchEntry {
    id: RequestId,
    tokens: usize,
    /// Tokens in its cache before the pass.
    before: usize,
    /// Whether the pass covers all tokens of the sequence, so that logits are needed.
    asks: bool,
    /// Whether it is prefill: a prompt, or evicted tokens that are recomputed.
    feeds: bool,
    /// Draft tokens at its end.
    drafted: usize,
}

impl BatchEntry {
    /// Returns after how many of its last tokens logits are needed.
    fn logits(&self) -> usize {
        if self.asks { 1 + self.drafted } else { 0 }
    }
}

/// The result of one step.
#[derive(Debug, Default)]
pub(crate) struct Stepped {
    /// How long the layer took; `None` if none ran.
    pub took: Option<Duration>,
    /// The request of each token that was chosen.
    pub tokens: Vec<RequestId>,
    /// Requests that have ended.
    pub left: Vec<RequestId>,
    /// Sequences that found the page pool exhausted.
    pub starved: Vec<RequestId>,
}

/// The sink of events.
pub(crate) type EventSink<'t> = &'t mut dyn FnMut(RequestId, Event);

impl Batch {
    pub fn new(decoder: Arc<Decoder>, prefixes: PrefixTree) -> Self {
        Self {
            decoder,
            prefixes,
            sequences: Vec::new(),
            answering: None,
            feeding: None,
            fed: 0,
            pacer: PrefillPacer::default(),
            costs: PassCosts::default(),
            drafting: Duration::ZERO,
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
    pub fn join(&mut self, sequence: Sequence) {
        self.sequences.push(sequence);
    }

    pub fn sequences(&self) -> impl ExactSizeIterator<Item = &Sequence> {
        self.sequences.iter()
    }

    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Sequence> {
        self.sequences.iter_mut().find(|sequence| sequence.id == id)
    }

    /// Removes a sequence, unless it is in a pass.
    pub fn leave(&mut self, id: RequestId) -> Option<Sequence> {
        if self.is_passing(id) {
            return None;
        }
        let at = self.sequences.iter().position(|sequence| sequence.id == id)?;
        Some(self.sequences.remove(at))
    }

    /// Abandons the passes under way and rolls their sequences back.
    pub fn abandon(&mut self) {
        for running in [self.answering.take(), self.feeding.take()].into_iter().flatten() {
            for member in running.members {
                if let Some(sequence) = self.get_mut(member.id) {
                    sequence.abandon_pass(member.before);
                }
            }
        }
    }

    /// Returns whether a sequence is in a pass that has not ended.
    pub fn is_passing(&self, id: RequestId) -> bool {
        self.passing().any(|passing| passing == id)
    }

    fn passing(&self) -> impl Iterator<Item = RequestId> {
        let running = self.answering.iter().chain(&self.feeding);
        running.flat_map(|running| &running.members).map(|member| member.id)
    }

    /// Returns whether a pass is under way or a sequence can go on.
    pub fn has_work(&self) -> bool {
        self.answering.is_some()
            || self.feeding.is_some()
            || self.sequences.iter().any(|one| !one.held || one.cancelled)
    }

    pub fn upcoming_layer(&self) -> usize {
        let next = |running: &InFlightPass| running.pass.next_layer();
        match (&self.answering, &self.feeding) {
            (Some(answering), _) => next(answering),
            (None, Some(feeding)) if self.parts() && self.wants(Need::Step) => {
                if self.pacer.may_feed(Some(feeding.work())) { next(feeding) } else { 0 }
            }
            (None, feeding) => feeding.as_ref().map_or(0, next),
        }
    }

    /// Returns the step that runs next on a model that streams its weights, or `None` if no more weights are needed for
    /// the pass.
    pub fn upcoming_step(&self) -> Option<usize> {
        let Some(running) = &self.feeding else { return Some(0) };
        Some(running.pass.next_layer()).filter(|step| *step < running.steps)
    }

    /// Runs one layer of one pass, and after the last layer chooses the next tokens.
    pub fn step(&mut self, clock: &dyn Clock, sink: EventSink<'_>) -> Stepped {
        let mut stepped = Stepped::default();
        let began = clock.now();
        self.complete_cancelled(clock, sink, &mut stepped);
        let Some(need) = self.choose(sink, &mut stepped) else { return stepped };
        let decoder = self.decoder.clone();
        // A session outside the engine may have begun a pass since readiness was checked.
        let Some(_turn) = decoder.try_stream() else { return stepped };
        let Some(mut running) = self.slot(need).take() else { return stepped };
        let layers = self.decoder.layers();
        let ends = running.pass.next_layer() == layers;
        let done = if ends { Ok(()) } else { self.run_layer(&mut running) };
        let layer = clock.now().saturating_sub(began);
        running.took += layer;
        self.pacer.layer(need, running.work(), layer);
        match done {
            Err(error) => self.fail(&running.members, error, sink, &mut stepped),
            // A step for the unembedding lets the engine wait for its weights like for those of a layer.
            Ok(())
                if running.pass.next_layer() < layers
                    || (!ends && running.steps > layers && !self.parts()) =>
            {
                *self.slot(need) = Some(running);
            }
            Ok(()) => self.finish(need, running, clock, sink, &mut stepped),
        }
        stepped.took = Some(clock.now().saturating_sub(began));
        stepped
    }

    /// Returns whether decode and prefill passes can be under way at once. Layers that are streamed from disk are read
    /// for one pass at a time.
    fn parts(&self) -> bool {
        self.decoder.streamed().is_none()
    }

    fn slot(&mut self, need: Need) -> &mut Option<InFlightPass> {
        match need {
            Need::Step => &mut self.answering,
            Need::Feed => &mut self.feeding,
        }
    }

    /// Chooses the pass that gets the next layer, and begins it if necessary.
    fn choose(&mut self, sink: EventSink<'_>, stepped: &mut Stepped) -> Option<Need> {
        if self.answering.is_some() {
            return Some(Need::Step);
        }
        if !self.parts() {
            if self.feeding.is_none() {
                self.feeding = self.begin(&[Need::Step, Need::Feed], sink, stepped);
            }
            return self.feeding.is_some().then_some(Need::Feed);
        }
        let steps = self.wants(Need::Step);
        let feeds = self.feeding.is_some() || self.wants(Need::Feed);
        let work = self.feeding.as_ref().map(InFlightPass::work);
        let order = match (steps, feeds) {
            (true, true) if self.pacer.may_feed(work) => [Need::Feed, Need::Step],
            _ => [Need::Step, Need::Feed],
        };
        order.into_iter().find(|&need| {
            if self.slot(need).is_none() {
                *self.slot(need) = self.begin(&[need], sink, stepped);
            }
            self.slot(need).is_some()
        })
    }

    fn wants(&self, need: Need) -> bool {
        self.sequences.iter().any(|one| !one.held && one.need() == need && !self.is_passing(one.id))
    }

    /// Begins a pass of all sequences with one of these needs.
    fn begin(&mut self, needs: &[Need], sink: EventSink<'_>, stepped: &mut Stepped) -> Option<InFlightPass> {
        if needs.contains(&Need::Step) {
            self.draft();
        }
        let takes = self.takes(needs);
        let mut dues: Vec<(usize, NextChunk)> = Vec::new();
        let mut failed = Vec::new();
        let mut order: Vec<usize> = (0..takes.len()).filter(|&at| takes[at] > 0).collect();
        order.sort_by_key(|&at| std::cmp::Reverse(self.sequences[at].priority));
        for at in order {
            let id = self.sequences[at].id;
            let Sequence { session, state, .. } = &mut self.sequences[at];
            let due = shielded(self.decoder.device(), || {
                let due = session.next_chunk(takes[at])?;
                let Err(error) = session.reserve_pages(&due) else { return Ok(due) };
                if state.pending() == 0 {
                    return Err(error);
                }
                // There may be room without the draft.
                state.cancel_draft(session);
                let due = session.next_chunk(session.uncached_tokens())?;
                session.reserve_pages(&due)?;
                Ok(due)
            });
            if due.is_err() {
                state.cancel_draft(session);
            }
            match due {
                Ok(due) => dues.push((at, due)),
                Err(
                    RuntimeError::Cache(CacheError::PoolExhausted { .. })
                    | RuntimeError::Model(ModelError::Cache(CacheError::PoolExhausted { .. })),
                ) => stepped.starved.push(id),
                Err(error) => failed.push((id, error)),
            }
        }
        dues.sort_by_key(|(at, _)| *at);
        // Failed sequences are removed below, which shifts the indices of those after them.
        for (at, _) in &mut dues {
            *at -=
                failed.iter().filter(|(id, _)| self.sequences[..*at].iter().any(|one| one.id == *id)).count();
        }
        for (id, error) in failed {
            self.drop_failed(id, error, sink, stepped);
        }
        self.over(dues, sink, stepped)
    }

    /// Drafts tokens for the sequences of the next decode pass.
    fn draft(&mut self) {
        let passing: Vec<RequestId> = self.passing().collect();
        let drafting = |one: &&mut Sequence| {
            !one.held && one.need() == Need::Step && !passing.contains(&one.id) && !one.cancelled
        };
        let mut sequences: Vec<&mut Sequence> = self.sequences.iter_mut().filter(drafting).collect();
        let Some(room) = sequences.iter().map(|one| one.session.chunk()).min() else { return };
        let began = Instant::now();
        let drafted = shielded(self.decoder.device(), || {
            let mut batch: Vec<BatchDraft<'_>> = sequences
                .iter_mut()
                .map(|one| {
                    let Sequence { state, session, speculation, .. } = &mut **one;
                    BatchDraft { state, session, speculation }
                })
                .collect();
            draft_together(&self.costs, room, &mut batch);
            Ok(())
        });
        if drafted.is_err() {
            // Decoding goes on without drafts; if the device is lost, the next pass reports it.
            sequences.iter_mut().for_each(|one| one.speculation = None);
        }
        self.drafting = began.elapsed();
    }

    /// Returns how many tokens of every sequence a pass takes.
    fn takes(&self, needs: &[Need]) -> Vec<usize> {
        let joins = |one: &Sequence| !one.held && needs.contains(&one.need()) && !self.is_passing(one.id);
        let (mut takes, mut most) = (vec![0; self.sequences.len()], usize::MAX);
        let (mut fed, mut prompts) = (Vec::new(), Vec::new());
        for (at, one) in self.sequences.iter().enumerate().filter(|(_, one)| joins(one)) {
            if one.need() == Need::Step {
                takes[at] = one.session.uncached_tokens();
                continue;
            }
            let Sequence { session, priority, stop, .. } = one;
            most = most.min(session.chunk());
            let before = session.cache().len();
            // A pass stops where recurrent states are to be cached for other requests.
            let stop = stop.and_then(|stop| stop.checked_sub(before)).filter(|left| *left > 0);
            let tokens = stop.map_or(session.uncached_tokens(), |left| left.min(session.uncached_tokens()));
            prompts.push(Prompt { priority: *priority, tokens, row: self.pacer.takes(Work::of(1, before)) });
            fed.push(at);
        }
        let room = self.room(needs, &prompts).at_most(most);
        for (at, tokens) in fed.into_iter().zip(prefill_chunks(room, &prompts)) {
            takes[at] = tokens;
        }
        takes
    }

    /// Returns how much of the prompts a pass takes.
    fn room(&self, needs: &[Need], prompts: &[Prompt]) -> Room {
        let row = prompts.iter().map(|prompt| prompt.row).fold(0.0, f64::max);
        let answering = self.sequences.iter().any(|one| !one.held && one.need() == Need::Step);
        match needs {
            // With several prompts, one may begin to decode while the pass of the others goes on.
            [Need::Feed] if answering || prompts.len() > 1 => self.pacer.beside(row),
            [Need::Feed] => self.pacer.alone(self.decoder.layers(), row),
            // Weights that are streamed are read once for the whole pass.
            _ => Room::ALL,
        }
    }

    fn over(
        &mut self,
        dues: Vec<(usize, NextChunk)>,
        sink: EventSink<'_>,
        stepped: &mut Stepped,
    ) -> Option<InFlightPass> {
        if dues.is_empty() {
            return None;
        }
        let feeding: Vec<RequestId> =
            self.sequences.iter().filter(|one| one.need() == Need::Feed).map(|one| one.id).collect();
        let members = dues.iter().map(|(at, due)| {
            let sequence = &self.sequences[*at];
            let Sequence { id, session, state, .. } = sequence;
            let asks = due.tokens.end == session.tokens().len();
            let (tokens, before, drafted) = (due.tokens.len(), session.cache().len(), state.pending());
            BatchEntry { id: *id, tokens, before, asks, feeds: feeding.contains(id), drafted }
        });
        let members: Vec<BatchEntry> = members.collect();
        let chunks: Vec<(&Session, &NextChunk)> =
            dues.iter().map(|(at, due)| (&self.sequences[*at].session, due)).collect();
        let asked = members.iter().any(|member| member.asks);
        let trunk =
            self.decoder.split().filter(|_| chunks.iter().all(|(session, _)| session.head().is_some()));
        let steps = trunk.unwrap_or(self.decoder.layers() + usize::from(asked));
        let decoder = self.decoder.clone();
        match computed(&decoder, || BatchPass::begin(&decoder, &chunks, asked)) {
            Ok(pass) => Some(InFlightPass { pass, members, steps, took: Duration::ZERO }),
            Err(error) => {
                self.fail(&members, error, sink, stepped);
                None
            }
        }
    }

    fn run_layer(&mut self, running: &mut InFlightPass) -> Result<(), RuntimeError> {
        let decoder = self.decoder.clone();
        let mut sessions = self.sessions(&running.members);
        computed(&decoder, || running.pass.step(&decoder, &mut sessions))
    }

    /// Returns the sessions of members, which are in the order of the sequences.
    fn sessions(&mut self, members: &[BatchEntry]) -> Vec<&mut Session> {
        let mut members = members.iter().peekable();
        let sequences = self.sequences.iter_mut();
        let mine = sequences.filter(|one| members.next_if(|member| member.id == one.id).is_some());
        mine.map(|one| &mut one.session).collect()
    }

    /// Ends a pass: caches prefixes, chooses tokens and removes sequences that have ended.
    fn finish(
        &mut self,
        need: Need,
        running: InFlightPass,
        clock: &dyn Clock,
        sink: EventSink<'_>,
        stepped: &mut Stepped,
    ) {
        let rows = running.rows();
        let InFlightPass { pass, members, took, .. } = running;
        let feeds = members.iter().any(|member| member.feeds);
        if feeds && members.iter().any(|member| member.tokens > 1) {
            self.fed = self.fed.max(rows);
        }
        let began = clock.now();
        let mut keep = Vec::new();
        for member in &members {
            if let Some(sequence) = self.get_mut(member.id) {
                sequence.session.recomputed(member.tokens);
                let fed = member.feeds
                    && member.asks
                    && member.tokens > 1
                    && sequence.session.cache().len() >= WORTH_KEEPING;
                if fed || sequence.stop == Some(sequence.session.cache().len()) {
                    keep.push(member.id);
                }
            }
        }
        for sequence in self.sequences.iter().filter(|sequence| keep.contains(&sequence.id)) {
            sequence.keep(&self.prefixes);
        }
        let counts: Vec<usize> = members.iter().map(BatchEntry::logits).collect();
        let asked = counts.iter().sum();
        let passed = Passed { sequences: members.len(), rows, logits: asked };
        if asked == 0 {
            return self.pass_ends(need, passed, took);
        }
        let decoder = self.decoder.clone();
        let logits = match computed(&decoder, || pass.logits(&decoder, &counts)) {
            Ok(logits) => logits,
            Err(error) => return self.fail(&members, error, sink, stepped),
        };
        let now = clock.now();
        let took = took + now.saturating_sub(began);
        self.pass_ends(need, passed, took);
        if !feeds {
            self.costs.record(rows, took.saturating_sub(self.drafting));
        }
        let vocab = logits.len() / asked;
        let mut rest = &logits[..];
        for member in members.iter().filter(|member| member.asks) {
            let (logits, others) = rest.split_at(member.logits() * vocab);
            rest = others;
            let Some(sequence) = self.get_mut(member.id) else { continue };
            if sequence.is_late(now) {
                continue;
            }
            let mut chosen = 0;
            let mut events = |event| {
                chosen += usize::from(matches!(&event, Event::Piece(piece) if piece.token.is_some()));
                sink(member.id, event);
            };
            let advanced = sequence.advance(logits.to_vec(), now, &mut events);
            match advanced {
                Err(error) => self.drop_failed(member.id, error, sink, stepped),
                Ok(ended) => {
                    // A token that ends the answer counts, although it is no part of it.
                    stepped.tokens.extend(std::iter::repeat_n(member.id, chosen.max(1)));
                    if ended {
                        self.complete(member.id, now, sink, stepped);
                    }
                }
            }
        }
        if self.feeding.is_none() && !self.wants(Need::Feed) {
            release_after_prompt(mem::take(&mut self.fed));
        }
    }

    fn pass_ends(&mut self, need: Need, passed: Passed, took: Duration) {
        self.pacer.pass(need, took);
        self.decoder.end_pass(passed, took);
    }

    fn complete(&mut self, id: RequestId, now: Duration, sink: EventSink<'_>, stepped: &mut Stepped) {
        if let Some(sequence) = self.leave(id) {
            sequence.keep(&self.prefixes);
            sink(id, sequence.finished(now));
            stepped.left.push(id);
        }
    }

    fn complete_cancelled(&mut self, clock: &dyn Clock, sink: EventSink<'_>, stepped: &mut Stepped) {
        let cancelled = |one: &&Sequence| one.cancelled && !self.is_passing(one.id);
        let cancelled: Vec<RequestId> = self.sequences.iter().filter(cancelled).map(|one| one.id).collect();
        for id in cancelled {
            if let Some(sequence) = self.get_mut(id)
                && sequence.output().finish() != Some(Finish::Cancelled)
                && let Some(event) = sequence.cancel()
            {
                sink(id, event);
            }
            self.complete(id, clock.now(), sink, stepped);
        }
    }

    fn fail(
        &mut self,
        members: &[BatchEntry],
        error: RuntimeError,
        sink: EventSink<'_>,
        stepped: &mut Stepped,
    ) {
        let source = Arc::new(error);
        for member in members {
            if let Some(sequence) = self.get_mut(member.id) {
                sequence.abandon_pass(member.before);
            }
            self.drop_failed(member.id, RuntimeError::Together { source: source.clone() }, sink, stepped);
        }
    }

    fn drop_failed(
        &mut self,
        id: RequestId,
        error: RuntimeError,
        sink: EventSink<'_>,
        stepped: &mut Stepped,
    ) {
        if let Some(at) = self.sequences.iter().position(|sequence| sequence.id == id) {
            sink(id, self.sequences.remove(at).failed(error));
        }
        stepped.left.push(id);
    }
}
