//! The decoding loop of one sequence: it chooses tokens, ends the answer, and keeps drafts in step with the choices.

use std::time::{Duration, Instant};

use crate::decode::branch::DraftBranch;
use crate::decode::repetition::ends_in_a_loop;
use crate::decode::{
    DRAFT_TOKENS, Finish, OutputState, PartialOutput, PausedGeneration, Piece, Scores, Speculation, Summary,
    Timing,
};
use crate::session::Snapshot;
use crate::telemetry::Counter;
use crate::{RuntimeError, Session};

/// The decoding state of one sequence. [`advance`](Self::advance) chooses a token from the logits at hand; when they
/// are used up, the caller runs a pass. The session is passed to every call, so that a generation can borrow it and a
/// batch own it.
///
/// Tokens are chosen from the model's own logits, one after the other, each with the sequence before it. Drafts go
/// through the layers together with the token before them, and as long as the choices turn out to be those of a draft, the
/// logits for the next one are there already. So a draft changes neither a choice nor the random numbers it is drawn with.
///
/// A chosen token is appended to the session at once. Between a pass and the choices that follow it the session also has
/// the draft tokens that were not chosen, or not yet; [`settle`](Self::settle) takes them back.
#[derive(Debug)]
pub struct DecodeState {
    output: OutputState,
    timing: Timing,
    /// A token that was chosen before a pause, and is still to be added.
    chosen: Option<u32>,
    /// The branch of the last pass that the session holds; absent where the last chosen token needs a pass.
    branch: Option<DraftBranch>,
    /// Other branches of the pass that agree with all that was chosen since.
    others: Vec<DraftBranch>,
    /// Tokens of the draft that were chosen.
    accepted: usize,
    /// The session before the last pass, if that verified a draft.
    snapshot: Option<Snapshot>,
    /// Draft tokens at the end of the session that a pass under way verifies.
    pending: usize,
    /// Accepted tokens that go through the layers again, as recurrent states went back to before a refused draft.
    replayed: usize,
    /// The draft consists of tokens that the grammar forces, and nothing was guessed.
    forced: bool,
    drafted_total: usize,
    accepted_total: usize,
}

/// The outcome of [`DecodeState::advance`].
#[derive(Debug)]
pub enum Advance {
    /// A token became part of the answer.
    Token(Piece),
    /// The answer has ended. Text that was held back comes with the first such outcome.
    Ended(Option<Piece>),
    /// The last token has to go through the layers first.
    NeedsPass,
}

impl DecodeState {
    /// Begins an answer to a prompt that has to go through the layers first.
    pub fn new(output: OutputState, timing: Timing) -> Self {
        Self {
            output,
            timing,
            chosen: None,
            branch: None,
            others: Vec::new(),
            accepted: 0,
            snapshot: None,
            pending: 0,
            replayed: 0,
            forced: false,
            drafted_total: 0,
            accepted_total: 0,
        }
    }

    /// Continues an answer that was paused. `chosen` is its next token, if that was chosen before the pause.
    pub(crate) fn resume(output: OutputState, timing: Timing, chosen: Option<u32>) -> Self {
        Self { chosen, ..Self::new(output, timing) }
    }

    /// Returns the output so far.
    pub fn output(&self) -> &OutputState {
        &self.output
    }

    pub(crate) fn output_mut(&mut self) -> &mut OutputState {
        &mut self.output
    }

    /// Returns the times of its tokens.
    pub fn timing(&mut self) -> &mut Timing {
        &mut self.timing
    }

    /// Returns how many more tokens the answer may have.
    pub(crate) fn remaining(&self, session: &Session) -> usize {
        self.output.room(self.len(session))
    }

    /// Returns how many tokens the sequence has up to the last that was chosen.
    fn len(&self, session: &Session) -> usize {
        session.tokens().len() - self.unchosen()
    }

    /// Chooses the token that follows the logits at hand, and appends it or ends the answer.
    pub fn advance(
        &mut self,
        session: &mut Session,
        speculation: Option<&mut Speculation>,
        now: impl FnOnce() -> Duration,
    ) -> Result<Advance, RuntimeError> {
        if self.output.finish().is_some() {
            return Ok(Advance::Ended(None));
        }
        if self.remaining(session) == 0 {
            return Ok(Advance::Ended(self.end(Finish::Length)));
        }
        let Some(token) = self.choose(session)? else { return Ok(Advance::NeedsPass) };
        self.timing.token(now());
        if self.output.ends_at(token) {
            return Ok(Advance::Ended(self.end(Finish::Stop)));
        }
        self.timing.generated();
        self.append(token, session, speculation);
        let mut piece = self.output.add(token);
        if self.output.has_loop_guard() && self.repeats(session) {
            piece.text.extend(self.end(Finish::Repetition).map(|rest| rest.text));
        }
        Ok(Advance::Token(piece))
    }

    /// Returns whether the answer has not ended and only repeats itself.
    fn repeats(&self, session: &Session) -> bool {
        let sequence = &session.tokens()[..self.len(session)];
        let answer = &sequence[sequence.len().saturating_sub(self.output.count())..];
        self.output.finish().is_none() && ends_in_a_loop(answer)
    }

    /// Ends the answer where it is, and returns the text that was held back.
    pub fn end(&mut self, finish: Finish) -> Option<Piece> {
        self.output.end(finish)
    }

    /// Returns the next token without adding it; nothing where the sequence needs a pass first.
    fn choose(&mut self, session: &Session) -> Result<Option<u32>, RuntimeError> {
        if let Some(token) = self.chosen.take() {
            return Ok(Some(token));
        }
        let Some(branch) = &self.branch else { return Ok(None) };
        let chosen = &session.tokens()[..self.len(session)];
        self.output.choose(branch.scores_after(self.accepted), chosen).map(Some)
    }

    fn append(&mut self, token: u32, session: &mut Session, speculation: Option<&mut Speculation>) {
        let accepted = self.accepted;
        let agrees = |branch: &DraftBranch| branch.draft.get(accepted) == Some(&token);
        self.others.retain(agrees);
        if let Some(branch) = self.branch.as_mut().filter(|branch| !agrees(branch) && !self.others.is_empty())
        {
            let mut other = self.others.remove(0);
            session.change_branch(&mut other, branch.draft.len());
            *branch = other;
        }
        if self.branch.as_ref().is_some_and(agrees) {
            self.accepted += 1;
            self.accepted_total += 1;
            session.meters().add(Counter::AcceptedTokens, 1);
            return;
        }
        // Without a snapshot the pass verified no draft.
        if let (Some(speculation), Some(branch), Some(_), false) =
            (speculation, &self.branch, &self.snapshot, self.forced)
        {
            speculation.judged(&[&branch.draft[..accepted], &[token]].concat());
        }
        self.settle(session);
        session.append(token);
        self.replayed = session.uncached_tokens();
    }

    /// Takes the accepted tokens of the session through the layers, with drafts of what follows them.
    pub(crate) fn forward(
        &mut self,
        session: &mut Session,
        mut speculation: Option<&mut Speculation>,
    ) -> Result<(), RuntimeError> {
        let drafts = self.propose(session, speculation.as_deref_mut())?;
        let snapshot = (!drafts.is_empty()).then(|| session.snapshot());
        let behind = session.uncached_tokens();
        let began = Instant::now();
        let branches = session.forward_drafts(drafts, self.output.candidates())?;
        let (count, drafted) = self.receive(session, branches, snapshot);
        if let Some(speculation) = speculation {
            speculation.passed(count * behind + drafted, began.elapsed());
        }
        Ok(())
    }

    /// Takes the outcome of a pass over the accepted tokens and branches of a draft, of which the session holds the first.
    /// Returns how many branches there are, and how many draft tokens they have together.
    pub(crate) fn receive(
        &mut self,
        session: &Session,
        branches: Vec<DraftBranch>,
        snapshot: Option<Snapshot>,
    ) -> (usize, usize) {
        let (count, drafted) = (branches.len(), branches.iter().map(|branch| branch.draft.len()).sum());
        let mut branches = branches.into_iter();
        self.branch = branches.next();
        self.others = branches.collect();
        self.accepted = 0;
        self.snapshot = snapshot;
        self.drafted_total += drafted;
        if drafted > 0 {
            session.meters().add(Counter::DraftedTokens, drafted as u64);
        }
        (count, drafted)
    }

    /// Returns true where the next pass takes the last chosen token and no prompt, and so may verify a draft.
    pub fn is_decoding(&self, session: &Session) -> bool {
        !session.needs_recompute() && session.uncached_tokens() - self.pending <= self.replayed.max(1)
    }

    /// Appends a draft to the session, for a pass that takes all accepted tokens and the draft.
    pub(crate) fn begin_draft(&mut self, session: &mut Session, draft: &[u32], forced: bool) {
        self.snapshot = Some(session.snapshot());
        draft.iter().for_each(|&token| session.append(token));
        (self.pending, self.forced) = (draft.len(), forced);
    }

    /// Takes the draft back that was appended for a pass. The pass has not run, or has failed and is still to be taken back.
    pub fn cancel_draft(&mut self, session: &mut Session) {
        session.tokens.truncate(session.tokens.len() - self.pending);
        (self.pending, self.snapshot) = (0, None);
    }

    /// Returns how many draft tokens the pass under way verifies.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Returns how many of the likeliest tokens suffice for the choice after a pass, if no other scores are needed.
    pub fn candidates(&self) -> Option<usize> {
        self.output.candidates().filter(|_| self.pending == 0)
    }

    /// Takes the scores of a pass that ended with the last chosen token and the draft that was appended for it.
    pub fn receive_scores(&mut self, session: &Session, scores: Scores) {
        let draft = session.tokens()[session.tokens().len() - self.pending..].to_vec();
        let snapshot = self.snapshot.take();
        self.pending = 0;
        self.receive(session, vec![DraftBranch::new(draft, scores)], snapshot);
    }

    /// Returns the branches of a draft to verify in the next pass.
    fn propose(
        &mut self,
        session: &Session,
        speculation: Option<&mut Speculation>,
    ) -> Result<Vec<Vec<u32>>, RuntimeError> {
        let most = self.draft_limit(session);
        let forced = self.forced_draft(session, most);
        self.forced = !forced.is_empty();
        match speculation {
            _ if self.forced => Ok(vec![forced]),
            Some(speculation) => speculation.draft(session, most, &mut self.output),
            None => Ok(Vec::new()),
        }
    }

    /// Returns how many tokens a draft may have: one token less than the answer, as the pass itself gives one.
    pub(crate) fn draft_limit(&self, session: &Session) -> usize {
        if session.needs_recompute() {
            return 0;
        }
        session.draft_room(self.remaining(session).saturating_sub(1))
    }

    /// Returns the tokens that the grammar forces next: a draft that is certain.
    pub(crate) fn forced_draft(&mut self, session: &Session, most: usize) -> Vec<u32> {
        let mut forced = self.output.forced();
        let known = forced.iter().take_while(|token| session.has_token(**token)).count();
        forced.truncate(known.min(most).min(DRAFT_TOKENS));
        forced
    }

    /// Returns how many draft tokens of the session were not chosen, or not yet.
    fn unchosen(&self) -> usize {
        self.pending + self.branch.as_ref().map_or(0, |branch| branch.draft.len() - self.accepted)
    }

    /// Takes back the draft tokens that were not chosen: the session has all that was chosen and nothing else.
    pub fn settle(&mut self, session: &mut Session) {
        // Pages that branches share go first, so that the session need not copy them.
        self.others.clear();
        let len = self.len(session);
        match self.snapshot.take() {
            Some(snapshot) => session.rewind_to(&snapshot, len),
            None => session.rewind(len),
        }
        self.branch = None;
        self.accepted = 0;
    }

    /// Stops between two tokens, and returns what it takes to continue with the same tokens, and the output so far.
    pub(crate) fn pause(
        &mut self,
        session: &mut Session,
        prompt_tokens: usize,
    ) -> Result<(PausedGeneration, PartialOutput), RuntimeError> {
        let length = self.len(session);
        let continues = self.output.finish().is_none() && self.remaining(session) > 0;
        // The logits take more memory than all else, and the token that is chosen from them a word.
        let chosen = if continues { self.choose(session)? } else { None };
        self.settle(session);
        Ok(self.output.pause(length, chosen, prompt_tokens))
    }

    /// Sums up the answer, whose text and tokens it hands out. `fed` tokens of the prompt went through the layers, after the
    /// request had waited for `waited`.
    pub fn summarize(
        &mut self,
        prompt_tokens: usize,
        fed: usize,
        waited: Duration,
        now: Duration,
    ) -> Summary {
        let finish = self.output.finish().unwrap_or(Finish::Cancelled);
        self.timing.ended(Some(finish));
        let first = self.timing.first(now);
        let prefill = first.saturating_sub(waited).as_secs_f64().max(f64::EPSILON);
        let decode_tps = self.timing.decode_tps();
        let PartialOutput { text, tokens } = self.output.take();
        Summary {
            text,
            tokens,
            prompt_tokens,
            ttft_ms: first.as_secs_f64() * 1000.0,
            prefill_tps: fed as f64 / prefill,
            decode_tps,
            drafted_tokens: self.drafted_total,
            accepted_tokens: self.accepted_total,
            finish,
        }
    }
}
