use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use super::track::Track;
use super::{Priority, TaskId};

/// What a new step weighs in the average of what steps take.
const WEIGHT: f64 = 0.25;

/// Why a lane should have the machine, the best reason first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// It has waited for its part.
    Share,
    /// A deadline comes near.
    Due(Reverse<Priority>),
    /// It takes what is left.
    Spare(Reverse<Priority>),
    /// It is ahead of its pace.
    Ahead,
}

/// What a lane can say for itself; the smallest is the most urgent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim {
    pub rank: Rank,
    /// A deadline, or since when it has waited.
    pub at: Duration,
    /// Decides between the same.
    pub then: Duration,
}

/// One model, and who waits for it.
#[derive(Debug)]
pub(super) struct Lane {
    pub name: String,
    pub tasks: BTreeMap<TaskId, Track>,
    /// Since when it could have run; absent while it has nothing to do.
    pub waits_since: Option<Duration>,
    pub last_ran: Duration,
    /// What it ran since the last token.
    spent: Duration,
    /// What a token takes.
    step: Option<f64>,
}

impl Lane {
    pub fn new(name: &str) -> Self {
        let (waits_since, last_ran, spent) = (None, Duration::ZERO, Duration::ZERO);
        Self { name: name.to_owned(), tasks: BTreeMap::new(), waits_since, last_ran, spent, step: None }
    }

    pub fn ran(&mut self, now: Duration, took: Duration) {
        self.spent = self.spent.saturating_add(took);
        self.last_ran = now;
        self.waits_since = Some(now);
    }

    /// Tokens of one batch come together; the first of them says what they took. Prompts say nothing about a step.
    pub fn stepped(&mut self, is_prompt: bool) {
        let spent = std::mem::take(&mut self.spent).as_secs_f64();
        if spent > 0.0 && !is_prompt {
            let step = self.step.get_or_insert(spent);
            *step += (spent - *step) * WEIGHT;
        }
    }

    /// What the next token is going to take, or has taken already.
    pub fn step_time(&self) -> Duration {
        Duration::from_secs_f64(self.step.unwrap_or(0.0)).max(self.spent)
    }

    /// The share of the machine that it takes to have a token every so often.
    pub fn demand(&self, span: Duration) -> f64 {
        self.step_time().as_secs_f64() / span.as_secs_f64().max(1e-9)
    }

    /// The best claim of its tasks. A task whose deadline is farther away than `lead` is ahead of its pace.
    pub fn claim(&self, now: Duration, lead: Duration) -> Option<Claim> {
        let soon = now.saturating_add(lead);
        let near = soon.saturating_add(self.step_time());
        self.tasks.values().map(|track| self.claim_of(track, soon, near)).min()
    }

    fn claim_of(&self, track: &Track, soon: Duration, near: Duration) -> Claim {
        let claim = |rank, at| Claim { rank, at, then: at };
        let spare = |priority| claim(Rank::Spare(Reverse(priority)), self.last_ran);
        let due_rank = Rank::Due(Reverse(track.task.priority));
        if track.is_demoted() {
            return spare(Priority::Background);
        }
        match track.due {
            // How long a prompt takes is not known, so that a first token is never early. A long one is late sooner or
            // later, and whoever reads along with another answer should not notice.
            Some(due) if track.tokens == 0 => Claim { rank: due_rank, at: due.max(soon), then: due },
            Some(due) if due <= near => claim(due_rank, due),
            Some(due) => claim(Rank::Ahead, due),
            None => spare(track.task.priority),
        }
    }
}
