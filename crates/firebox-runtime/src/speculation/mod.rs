use std::fmt::Debug;
use std::time::{Duration, Instant};

use crate::{RuntimeError, Sampler};

mod lookup;
mod model;
mod pace;
#[cfg(test)]
mod tests;

pub use lookup::LookupDrafter;
pub use model::ModelDrafter;

use pace::Pace;

/// Draft tokens verified in one pass at most, unless told otherwise: beyond, a pass costs more than what is still
/// likely to be accepted brings.
pub const DRAFT_TOKENS: usize = 16;

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

    /// At most `most` tokens that may follow `tokens`, none if it has no idea.
    ///
    /// `tokens` is the whole sequence so far. It shows what became of the draft before, and may be another sequence
    /// altogether. `sampler` is how the model is going to choose: whoever draws from it, on a clone, draws the random
    /// numbers that the model's choices will be drawn with.
    fn propose(&mut self, tokens: &[u32], most: usize, sampler: &Sampler) -> Result<Vec<u32>, RuntimeError>;
}

/// A drafter, and how far it is worth listening to. Outlives generations: what it learns in one serves the next.
#[derive(Debug)]
pub struct Speculation {
    drafter: Box<dyn Drafter>,
    pace: Pace,
    /// Of the last draft.
    grade: usize,
    steady: bool,
    most: usize,
}

impl Speculation {
    /// Drafts by `drafter`, as long as they have been worth it lately.
    pub fn new(drafter: impl Drafter + 'static) -> Self {
        Self {
            drafter: Box::new(drafter),
            pace: Pace::default(),
            grade: 0,
            steady: false,
            most: DRAFT_TOKENS,
        }
    }

    /// The same, verifying at most `most` draft tokens in one pass.
    pub fn with_draft_tokens(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// The same, drafting as many tokens as it may whatever becomes of them: for measurements and tests.
    pub fn steady(self) -> Self {
        Self { steady: true, ..self }
    }

    /// A draft for the next pass, of at most `most` tokens.
    pub(crate) fn draft(
        &mut self,
        tokens: &[u32],
        most: usize,
        sampler: &Sampler,
    ) -> Result<Vec<u32>, RuntimeError> {
        let most = most.min(self.most);
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
        let mut draft = self.drafter.propose(tokens, wanted, sampler)?;
        draft.truncate(wanted);
        self.pace.drafted(draft.len(), began.elapsed());
        Ok(draft)
    }

    /// How long a pass of some rows took.
    pub(crate) fn passed(&mut self, rows: usize, took: Duration) {
        // After a refusal recurrent layers see tokens again, so that a pass may have as many rows twice; more are not
        // what drafts cost.
        if rows.div_ceil(2) <= self.most.saturating_add(1) {
            self.pace.passed(rows, took);
        }
    }

    /// How much of a draft was accepted.
    pub(crate) fn judged(&mut self, drafted: usize, accepted: usize) {
        self.pace.judged(self.grade, drafted, accepted);
    }
}
