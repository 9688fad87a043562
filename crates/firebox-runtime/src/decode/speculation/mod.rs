//! Speculative decoding: drafts of the tokens that follow, and how long they should be.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use crate::decode::{OutputState, Sampler};
use crate::{RuntimeError, Session};

mod batch;
mod costs;
mod draft;
mod lookup;
mod model;
mod pace;
#[cfg(test)]
mod tests;

pub use batch::{BatchDraft, draft_together};
pub use costs::PassCosts;
pub use draft::Draft;
pub use lookup::LookupDrafter;
pub use model::ModelDrafter;

use pace::{Acceptance, Candidate, draft_lengths};

/// The default of the most tokens of a branch that are verified in one pass. More cost more than they are likely to bring.
pub const DRAFT_TOKENS: usize = 16;

/// The default of the most branches of a draft that are verified in one pass. Each repeats the tokens before it.
pub const DRAFT_BRANCHES: usize = 3;

/// The highest grade of drafts that is told apart.
const HIGHEST_GRADE: usize = 15;

/// Guesses how a sequence continues, at far less cost than the model.
///
/// Drafts change how fast tokens come, and never which tokens: the model chooses every token itself, and a draft only saves
/// passes where it guessed the choice. So a drafter may be wrong in any way.
pub trait Drafter: Debug + Send {
    /// Returns how sure it is of its draft for this sequence, as one of a few grades from 0 on; nothing if it has no draft.
    /// The outcome of drafts is remembered by grade, and decides for how many tokens [`propose`](Self::propose) is called, if
    /// at all.
    fn grade(&mut self, tokens: &[u32]) -> Option<usize> {
        let _ = tokens;
        Some(0)
    }

    /// Returns what may follow `tokens`, in branches of at most `most` tokens; nothing if it has no guess. Longer branches
    /// are cut.
    ///
    /// `tokens` is the whole sequence so far. It shows the outcome of the draft before, and may be another sequence
    /// altogether. `sampler` is the model's: a clone of it draws the random numbers of the model's next choices.
    fn propose(&mut self, tokens: &[u32], most: usize, sampler: &Sampler) -> Result<Draft, RuntimeError>;
}

/// A drafter, and how many of its tokens are worth verifying. It can serve several generations, and learns from each.
#[derive(Debug)]
pub struct Speculation {
    drafter: Box<dyn Drafter>,
    costs: PassCosts,
    acceptance: Acceptance,
    /// The last draft, with the branches that were not verified.
    proposed: Draft,
    /// The grade of the last draft.
    grade: usize,
    steady: bool,
    most: usize,
    branches: usize,
}

impl Speculation {
    /// Drafts by `drafter`, as long as its drafts make decoding faster.
    pub fn new(drafter: impl Drafter + 'static) -> Self {
        Self {
            drafter: Box::new(drafter),
            costs: PassCosts::default(),
            acceptance: Acceptance::default(),
            proposed: Draft::default(),
            grade: 0,
            steady: false,
            most: DRAFT_TOKENS,
            branches: DRAFT_BRANCHES,
        }
    }

    /// Sets the most tokens of a branch that are verified in one pass.
    pub fn with_draft_tokens(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// Sets the most branches that are verified in one pass.
    pub fn with_draft_branches(self, branches: usize) -> Self {
        Self { branches: branches.max(1), ..self }
    }

    /// Drafts as many tokens as allowed, whatever the outcome: for measurements and tests.
    pub fn steady(self) -> Self {
        Self { steady: true, ..self }
    }

    /// Returns the branches to verify in the next pass behind the tokens of a session, of at most `most` tokens each.
    pub(crate) fn draft(
        &mut self,
        session: &Session,
        most: usize,
        output: &mut OutputState,
    ) -> Result<Vec<Vec<u32>>, RuntimeError> {
        let most = most.min(self.most);
        let Some(grade) = self.grade(session.tokens(), most) else { return Ok(Vec::new()) };
        let wanted = if self.steady {
            most
        } else {
            let candidate = Candidate { acceptance: &mut self.acceptance, grade, most };
            draft_lengths(&self.costs, 1, 1, most, &mut [candidate])[0]
        };
        if wanted == 0 {
            return Ok(Vec::new());
        }
        self.propose(session, wanted, grade, output)?;
        let lengths: Vec<usize> = self.proposed().iter().map(Vec::len).collect();
        let verified =
            if self.steady { lengths.len() } else { self.acceptance.branches(&self.costs, grade, &lengths) };
        Ok(self.proposed().iter().take(verified.min(self.branches)).cloned().collect())
    }

    /// Returns how sure the drafter is of a draft behind `tokens`; nothing where it has none.
    fn grade(&mut self, tokens: &[u32], most: usize) -> Option<usize> {
        self.proposed = Draft::default();
        if most == 0 {
            return None;
        }
        self.drafter.grade(tokens).map(|grade| grade.min(HIGHEST_GRADE))
    }

    /// Has the drafter propose branches of at most `wanted` tokens behind those of a session.
    fn propose(
        &mut self,
        session: &Session,
        wanted: usize,
        grade: usize,
        output: &mut OutputState,
    ) -> Result<(), RuntimeError> {
        self.grade = grade;
        let began = Instant::now();
        let proposed = self.drafter.propose(session.tokens(), wanted, output.sampler())?;
        self.proposed = proposed
            .permitted(|branch| output.permitted(branch))
            .cut(wanted, |token| session.has_token(token));
        let first = self.proposed().first().map_or(0, Vec::len);
        self.acceptance.drafted(first, began.elapsed());
        Ok(())
    }

    /// Returns the branches of the last draft.
    fn proposed(&self) -> &[Vec<u32>] {
        self.proposed.branches()
    }

    /// Records how long a pass of some rows took.
    pub(crate) fn passed(&mut self, rows: usize, took: Duration) {
        // After a refusal recurrent layers see tokens again, so that a pass may have twice the rows of a draft. More rows
        // belong to something else.
        if rows.div_ceil(2) <= self.branches.saturating_mul(self.most.saturating_add(1)) {
            self.costs.record(rows, took);
        }
    }

    /// Records which tokens were chosen, up to the first that was not among those verified.
    pub(crate) fn judged(&mut self, chosen: &[u32]) {
        let gains = self.proposed.gains(chosen);
        let Some((&first, others)) = gains.split_first() else { return };
        self.acceptance.judged(self.grade, self.proposed()[0].len(), first);
        self.acceptance.chosen(self.grade, others);
    }
}
