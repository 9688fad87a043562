use std::time::Instant;

use crate::answer::Answer;
use crate::session::Mark;
use crate::telemetry::Counter;
use crate::way::Way;
use crate::{DRAFT_TOKENS, RuntimeError, Session, Speculation};

/// A session that may be some draft tokens ahead of the tokens that were chosen.
///
/// Tokens are chosen from the model's own logits, one after the other, each with the sequence before it. Drafts go
/// through the layers together with the token before them, and as long as the choices turn out to be one of the drafts,
/// the logits for the next one are there already. So a draft cannot change a choice, nor what it is drawn with.
#[derive(Debug)]
pub(crate) struct Lookahead<'s> {
    session: &'s mut Session,
    speculation: Option<&'s mut Speculation>,
    /// Chosen by somebody else, and not added.
    chosen: Option<u32>,
    /// Chosen, and fed at the next step only: the last token of an answer need not go through the layers.
    pending: Option<u32>,
    /// The one that the session went in the last pass, before anything was known of it.
    way: Way,
    /// Those that branches went, and that agree with all that was chosen by now.
    others: Vec<Way>,
    /// How many tokens of the draft were chosen by now.
    accepted: usize,
    /// Before the last pass.
    mark: Option<Mark>,
    /// Whether its draft was nobody's guess, but all that the grammar permits.
    forced: bool,
    drafted_in_all: usize,
    accepted_in_all: usize,
}

impl<'s> Lookahead<'s> {
    /// A session that was just fed, and the logits that came of it.
    pub fn new(session: &'s mut Session, logits: Vec<f32>) -> Self {
        Self {
            session,
            speculation: None,
            chosen: None,
            pending: None,
            way: Way::straight(logits),
            others: Vec::new(),
            accepted: 0,
            mark: None,
            forced: false,
            drafted_in_all: 0,
            accepted_in_all: 0,
        }
    }

    /// A session that was left with all that was chosen, and the token that was chosen next.
    pub fn resume(session: &'s mut Session, chosen: Option<u32>) -> Self {
        let pending = match chosen {
            None if session.behind() > 0 => session.tokens().last().copied(),
            _ => None,
        };
        if pending.is_some() {
            session.rewind(session.tokens().len() - 1);
        }
        let mut ahead = Self::new(session, Vec::new());
        (ahead.chosen, ahead.pending) = (chosen, pending);
        ahead
    }

    /// Whether the last token that was added has not been through the layers.
    pub fn has_pending(&self) -> bool {
        self.pending.is_some()
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
    pub fn choose(&mut self, answer: &mut Answer, room: usize) -> Result<u32, RuntimeError> {
        if let Some(token) = self.chosen.take() {
            return Ok(token);
        }
        if let Some(token) = self.pending {
            self.pass(token, room, answer)?;
            self.pending = None;
        }
        let tokens = self.session.tokens();
        let chosen = &tokens[..tokens.len() - self.unchosen()];
        answer.choose(self.way.logits_after(self.accepted), chosen)
    }

    /// Adds the token that was chosen.
    pub fn add(&mut self, token: u32) {
        let agrees = |way: &Way| way.draft.get(self.accepted) == Some(&token);
        self.others.retain(agrees);
        if !agrees(&self.way) && !self.others.is_empty() {
            let mut way = self.others.remove(0);
            self.session.change_ways(&mut way, self.way.draft.len());
            self.way = way;
        }
        if self.way.draft.get(self.accepted) == Some(&token) {
            self.accepted += 1;
            self.accepted_in_all += 1;
            self.session.meters().add(Counter::AcceptedTokens, 1);
            return;
        }
        // Without a mark nothing was drafted for this pass.
        if let (Some(speculation), Some(_), false) = (&mut self.speculation, &self.mark, self.forced) {
            speculation.judged(&[&self.way.draft[..self.accepted], &[token]].concat());
        }
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

    /// Takes a token through the layers, and drafts of what follows it.
    fn pass(&mut self, token: u32, room: usize, answer: &mut Answer) -> Result<(), RuntimeError> {
        let before = self.session.tokens().len();
        let most = self.session.draft_room(room.saturating_sub(1));
        let mut drafts = self.forced_draft(answer, most);
        self.forced = !drafts.is_empty();
        if let Some(speculation) = self.speculation.as_mut().filter(|_| !self.forced) {
            // A drafter sees the token too, which the session knows only after it was fed.
            self.session.append(token);
            let drafted = speculation.draft(self.session, most, answer);
            self.session.rewind(before);
            drafts = drafted?;
        }
        self.mark = (!drafts.is_empty()).then(|| self.session.mark());
        let chosen = self.session.behind() + 1;
        let began = Instant::now();
        let mut ways = match self.session.go_ways(token, drafts) {
            Ok(ways) => ways.into_iter(),
            Err(error) => {
                self.session.rewind(before);
                return Err(error);
            }
        };
        self.way = ways.next().unwrap_or_default();
        self.others = ways.collect();
        let ways = std::iter::once(&self.way).chain(&self.others);
        let drafted: usize = ways.map(|way| way.draft.len()).sum();
        self.drafted_in_all += drafted;
        self.session.meters().add(Counter::DraftedTokens, drafted as u64);
        if let Some(speculation) = &mut self.speculation {
            speculation.passed((1 + self.others.len()) * chosen + drafted, began.elapsed());
        }
        Ok(())
    }

    /// What a grammar makes certain needs nobody to guess it.
    fn forced_draft(&self, answer: &mut Answer, most: usize) -> Vec<Vec<u32>> {
        let mut forced = answer.forced();
        let known = forced.iter().take_while(|token| self.session.knows(**token)).count();
        forced.truncate(known.min(most).min(DRAFT_TOKENS));
        if forced.is_empty() { Vec::new() } else { vec![forced] }
    }

    /// Draft tokens in the session that were not chosen, or not yet.
    fn unchosen(&self) -> usize {
        self.way.draft.len() - self.accepted
    }

    /// Takes back what was not chosen.
    fn settle(&mut self) {
        // What branches hold goes first, so that the session is alone in its pages.
        self.others.clear();
        let len = self.session.tokens().len() - self.unchosen();
        match self.mark.take() {
            Some(mark) => self.session.rewind_to(&mark, len),
            None => self.session.rewind(len),
        }
        self.way = Way::default();
        self.accepted = 0;
    }
}

impl Drop for Lookahead<'_> {
    fn drop(&mut self) {
        self.settle();
    }
}
