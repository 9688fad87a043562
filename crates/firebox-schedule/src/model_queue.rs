//! The tasks of a model and its claim to the machine.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::task_progress::TaskProgress;
use super::{Priority, TaskId};

/// A model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ModelId(pub(crate) u32);

/// The weight of a new step in the average step time.
const STEP_WEIGHT: f64 = 0.25;

/// The reason to run a model, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// It has waited for its share.
    Share,
    /// A deadline is near.
    Due(Reverse<Priority>),
    /// It takes what is left.
    Spare(Reverse<Priority>),
    /// It is ahead of its pace.
    Ahead,
}

/// The claim of a model to the machine. The smallest is the most urgent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim {
    pub rank: Rank,
    /// A deadline, or the time since when it has waited.
    pub at: Duration,
    /// Breaks ties.
    pub then: Duration,
}

/// A model with its tasks.
#[derive(Debug)]
pub(super) struct ModelQueue {
    pub name: String,
    pub tasks: BTreeMap<TaskId, TaskProgress>,
    /// The time since when it could have run; `None` while it has nothing to do.
    pub waits_since: Option<Duration>,
    pub last_ran: Duration,
    /// The time it ran since the last token.
    spent: Duration,
    /// The average time of a token.
    step: Option<f64>,
}

impl ModelQueue {
    pub fn new(name: &str) -> Self {
        let (waits_since, last_ran, spent) = (None, Duration::ZERO, Duration::ZERO);
        Self { name: name.to_owned(), tasks: BTreeMap::new(), waits_since, last_ran, spent, step: None }
    }

    pub fn ran(&mut self, now: Duration, took: Duration) {
        self.spent = self.spent.saturating_add(took);
        self.last_ran = now;
        self.waits_since = Some(now);
    }

    /// Takes the time since the last token as a step. The tokens of a batch come together, and the first of them counts.
    /// Prompts tell nothing about a step.
    pub fn stepped(&mut self, is_prompt: bool) {
        let spent = std::mem::take(&mut self.spent).as_secs_f64();
        if spent > 0.0 && !is_prompt {
            let step = self.step.get_or_insert(spent);
            *step += (spent - *step) * STEP_WEIGHT;
        }
    }

    /// Returns the expected time of the next token, or the time it has taken already.
    pub fn step_time(&self) -> Duration {
        Duration::from_secs_f64(self.step.unwrap_or(0.0)).max(self.spent)
    }

    /// Returns the share of the machine that one token per `span` takes.
    pub fn demand(&self, span: Duration) -> f64 {
        self.step_time().as_secs_f64() / span.as_secs_f64().max(1e-9)
    }

    /// Returns the best claim of its tasks. A task whose deadline is farther away than `lead` is ahead of its pace.
    pub fn claim(&self, now: Duration, lead: Duration) -> Option<Claim> {
        let soon = now.saturating_add(lead);
        let near = soon.saturating_add(self.step_time());
        self.tasks.values().map(|track| self.claim_of(track, soon, near)).min()
    }

    fn claim_of(&self, track: &TaskProgress, soon: Duration, near: Duration) -> Claim {
        let claim = |rank, at| Claim { rank, at, then: at };
        let spare = |priority| claim(Rank::Spare(Reverse(priority)), self.last_ran);
        let due_rank = Rank::Due(Reverse(track.task.priority));
        if track.is_demoted() {
            return spare(Priority::Background);
        }
        match track.due {
            // The length of a prompt is unknown, so that a first token is never early. A long one misses its deadline sooner
            // or later, and clients that read another answer should not notice.
            Some(due) if track.tokens == 0 => Claim { rank: due_rank, at: due.max(soon), then: due },
            Some(due) if due <= near => claim(due_rank, due),
            Some(due) => claim(Rank::Ahead, due),
            None => spare(track.task.priority),
        }
    }
}
