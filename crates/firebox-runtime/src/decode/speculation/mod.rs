//! Speculative decoding: drafts of the tokens that follow, and how long they should be.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use crate::decode::{OutputState, Sampler};
use crate::{RuntimeError, Session};

mod draft;
mod lookup;
mod model;
mod pace;
#[cfg(test)]
mod tests;

pub use draft::Draft;
pub use lookup::LookupDrafter;
pub use model::ModelDrafter;

use pace::Pace;

/// Tokens of a draft's branch verified in one pass at most, unless told otherwise: beyond, a pass costs more than what is still
/// likely to be accepted brings.
pub const DRAFT_TOKENS: usize = 16;

/// Branches of a draft verified in one pass at most, unless told otherwise: each costs the tokens before it once more.
pub const DRAFT_BRANCHES: usize = 3;

/// Higher grades of drafts count as this one.
const HIGHEST_GRADE: usize = 15;

/// Guesses how a sequence goes on, far more cheaply than the model that decides.
///
/// Drafts change how fast tokens come and never which: the model chooses every token itself, and a draft only saves it
/// a pass where it had guessed the choice. So a drafter may be wrong in any way it likes.
pub trait Drafter: Debug + Send {
    /// How sure it is of what it would draft for this sequence, as one of a few grades from 0 on; nothing if it has no
    /// draft. What became of drafts is remembered grade by grade, and decides whether, and for how many tokens,
    /// [`propose`](Self::propose) is called.
    fn grade(&mut self, tokens: &[u32]) -> Option<usize> {
        let _ = tokens;
        Some(0)
    }

    /// What may follow `tokens`, in branches of at most `most` tokens; nothing if it has no idea. What is more than can be
    /// verified is cut off.
    ///
    /// `tokens` is the whole sequence so far. It shows what became of the draft before, and may be another sequence
    /// altogether. `sampler` is how the model is going to choose: whoever draws from it, on a clone, draws the random
    /// numbers that the model's choices will be drawn with.
    fn propose(&mut self, tokens: &[u32], most: usize, sampler: &Sampler) -> Result<Draft, RuntimeError>;
}

/// A drafter, and how far it is worth listening to. Outlives generations: what it learns in one serves the next.
#[derive(Debug)]
pub struct Speculation {
    drafter: Box<dyn Drafter>,
    pace: Pace,
    /// The last draft, with all its branches: those that were not verified may have been right too.
    proposed: Draft,
    /// How sure the drafter was of it.
    grade: usize,
    steady: bool,
    most: usize,
    branches: usize,
}

impl Speculation {
    /// Drafts by `drafter`, as long as they have been worth it lately.
    pub fn new(drafter: impl Drafter + 'static) -> Self {
        Self {
            drafter: Box::new(drafter),
            pace: Pace::default(),
            proposed: Draft::default(),
            grade: 0,
            steady: false,
            most: DRAFT_TOKENS,
            branches: DRAFT_BRANCHES,
        }
    }

    /// The same, verifying branches of at most `most` tokens.
    pub fn with_draft_tokens(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// The same, verifying at most so many branches in one pass.
    pub fn with_draft_branches(self, branches: usize) -> Self {
        Self { branches: branches.max(1), ..self }
    }

    /// The same, drafting as much as it may whatever becomes of it: for measurements and tests.
    pub fn steady(self) -> Self {
        Self { steady: true, ..self }
    }

    /// What to verify in the next pass behind the tokens of a session, in branches of at most `most` tokens.
    pub(crate) fn draft(
        &mut self,
        session: &Session,
        most: usize,
        output: &mut OutputState,
    ) -> Result<Vec<Vec<u32>>, RuntimeError> {
        let (tokens, most) = (session.tokens(), most.min(self.most));
        self.proposed = Draft::default();
        if most == 0 {
            return Ok(Vec::new());
        }
        let Some(grade) = self.drafter.grade(tokens).map(|grade| grade.min(HIGHEST_GRADE)) else {
            return Ok(Vec::new());
        };
        let wanted = if self.steady { most } else { self.pace.draft_length(grade, most) };
        if wanted == 0 {
            return Ok(Vec::new());
        }
        self.grade = grade;
        let began = Instant::now();
        let proposed = self.drafter.propose(tokens, wanted, output.sampler())?;
        self.proposed =
            proposed.permitted(|branch| output.permitted(branch)).cut(wanted, |token| session.knows(token));
        let lengths: Vec<usize> = self.proposed.branches().iter().map(Vec::len).collect();
        self.pace.drafted(lengths.first().copied().unwrap_or(0), began.elapsed());
        let verified = if self.steady { lengths.len() } else { self.pace.branches(grade, &lengths) };
        Ok(self.proposed.branches().iter().take(verified.min(self.branches)).cloned().collect())
    }

    /// How long a pass of some rows took.
    pub(crate) fn passed(&mut self, rows: usize, took: Duration) {
        // After a refusal recurrent layers see tokens again, so that a pass may have as many rows twice; more are not
        // what drafts cost.
        if rows.div_ceil(2) <= self.branches.saturating_mul(self.most.saturating_add(1)) {
            self.pace.passed(rows, took);
        }
    }

    /// Which tokens were chosen, up to the first that was not among what was verified.
    pub(crate) fn judged(&mut self, chosen: &[u32]) {
        let gains = self.proposed.gains(chosen);
        let Some((&first, others)) = gains.split_first() else { return };
        self.pace.judged(self.grade, self.proposed.branches()[0].len(), first);
        self.pace.chosen(self.grade, others);
    }
}
