use std::time::Instant;

use crate::session::Mark;
use crate::{RuntimeError, Sampler, Session, Speculation};

/// A session that may be some draft tokens ahead of the tokens that were chosen.
///
/// Tokens are chosen from the model's own logits, one after the other, each with the sequence before it. Draft tokens
/// go through the layers together with the token before them, and as long as the choices turn out to be the draft, the
/// logits for the next one are there already. So a draft cannot change a choice, nor what it is drawn with.
#[derive(Debug)]
pub(crate) struct Lookahead<'s> {
    session: &'s mut Session,
    speculation: Option<&'s mut Speculation>,
    /// Chosen, and fed at the next step only: the last token of an answer need not go through the layers.
    pending: Option<u32>,
    /// Went through the layers in the last pass, before anything was known of them.
    draft: Vec<u32>,
    /// How many of these were chosen by now.
    accepted: usize,
    /// Before the last pass.
    mark: Option<Mark>,
    /// After the token before the draft, and after each of the draft.
    logits: Vec<f32>,
    drafted_in_all: usize,
    accepted_in_all: usize,
}

impl<'s> Lookahead<'s> {
    /// A session that was just fed, and the logits that came of it.
    pub fn new(session: &'s mut Session, logits: Vec<f32>) -> Self {
        Self {
            session,
            speculation: None,
            pending: None,
            draft: Vec::new(),
            accepted: 0,
            mark: None,
            logits,
            drafted_in_all: 0,
            accepted_in_all: 0,
        }
    }

    /// Goes ahead by drafts from now on.
    pub fn speculate(&mut self, speculation: &'s mut Speculation) {
        self.speculation = Some(speculation);
    }

    /// How many tokens the sequence has, up to the last that was chosen.
    pub fn len(&self) -> usize {
        self.session.tokens().len() - self.unchosen() + usize::from(self.pending.is_some())
    }

    /// How many tokens were drafted, and how many of them were chosen.
    pub fn counts(&self) -> (usize, usize) {
        (self.drafted_in_all, self.accepted_in_all)
    }

    /// Chooses the next token, without adding it. At most `room` more tokens are wanted.
    pub fn choose(&mut self, sampler: &mut Sampler, room: usize) -> Result<u32, RuntimeError> {
        if let Some(token) = self.pending {
            self.pass(token, room, sampler)?;
            self.pending = None;
        }
        let width = self.logits.len() / (1 + self.draft.len());
        let logits = &self.logits[self.accepted * width..][..width];
        let tokens = self.session.tokens();
        Ok(sampler.sample(logits, &tokens[..tokens.len() - self.unchosen()]))
    }

    /// Adds the token that was chosen.
    pub fn add(&mut self, token: u32) {
        if self.draft.get(self.accepted) == Some(&token) {
            self.accepted += 1;
            self.accepted_in_all += 1;
            return;
        }
        self.judge(self.draft.len());
        self.settle();
        self.pending = Some(token);
    }

    /// Leaves the session with all that was chosen and nothing else.
    pub fn finish(&mut self) {
        self.settle();
        if let Some(token) = self.pending.take() {
            self.session.append(token);
        }
    }

    /// Takes a token through the layers, and a draft of what follows it.
    fn pass(&mut self, token: u32, room: usize, sampler: &Sampler) -> Result<(), RuntimeError> {
        let before = self.session.tokens().len();
        self.draft.clear();
        self.accepted = 0;
        if let Some(speculation) = &mut self.speculation {
            let most = self.session.draft_room(room.saturating_sub(1));
            // A drafter sees the token too, which the session knows only after it was fed.
            self.session.append(token);
            let draft = speculation.draft(self.session.tokens(), most, sampler);
            self.session.rewind(before);
            self.draft = draft?;
            let known = self.draft.iter().take_while(|&&token| self.session.knows(token)).count();
            self.draft.truncate(known);
        }
        let began = Instant::now();
        let rows = self.session.behind() + 1 + self.draft.len();
        let fed = if self.draft.is_empty() {
            self.session.feed(&[token]).map(|logits| self.logits = logits)
        } else {
            self.mark = Some(self.session.mark());
            self.logits.clear();
            let tokens: Vec<u32> = [token].iter().chain(&self.draft).copied().collect();
            self.session.feed_each_row(&tokens, |rows| self.logits.extend_from_slice(rows))
        };
        if let Err(error) = fed {
            self.draft.clear();
            self.session.rewind(before);
            return Err(error);
        }
        self.drafted_in_all += self.draft.len();
        if let Some(speculation) = &mut self.speculation {
            speculation.passed(rows, began.elapsed());
        }
        Ok(())
    }

    /// Draft tokens in the session that were not chosen, or not yet.
    fn unchosen(&self) -> usize {
        self.draft.len() - self.accepted
    }

    fn judge(&mut self, judged: usize) {
        if let Some(speculation) = &mut self.speculation {
            speculation.judged(judged, self.accepted);
        }
    }

    /// Takes back what was not chosen.
    fn settle(&mut self) {
        let len = self.session.tokens().len() - self.unchosen();
        match self.mark.take() {
            Some(mark) => self.session.rewind_to(&mark, len),
            None => self.session.rewind(len),
        }
        self.draft.clear();
        self.accepted = 0;
    }
}

impl Drop for Lookahead<'_> {
    fn drop(&mut self) {
        self.settle();
    }
}
