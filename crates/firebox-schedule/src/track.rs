use std::time::Duration;

use super::{Priority, ScheduleConfig, Task};

/// What a new token weighs in the average of how late tokens are. With an eighth, one token that is late by two periods
/// is forgiven, and three in a row are not.
const WEIGHT: f64 = 1.0 / 8.0;
/// One token is late by no more than this, in periods: a machine that slept is no laggard.
const LATEST: f64 = 2.0;
/// So many tokens say something about a pace.
const FEW: u32 = 4;
/// A token that is missing for longer than this, in periods, counts before it comes.
const MISSING: f64 = 2.0;
/// Periods by which a task may be ahead of its pace, beyond what keeps it from being late. Who was fast for a while would
/// else wait for as long as it was ahead when others come, and somebody who watches sees it stop.
const AHEAD: u32 = 4;
/// On-time tokens after which a laggard has its priority again: most of a second at the usual pace.
const PROBATION: u32 = 16;
/// Every relapse doubles them, so many times at most.
const MOST_DOUBLINGS: u32 = 4;

/// How a task gets on.
#[derive(Debug, Clone)]
pub(super) struct Track {
    pub task: Task,
    /// When its next token should be there; absent where nobody says.
    pub due: Option<Duration>,
    /// From one token to the next; absent where it takes what is left.
    pub period: Option<Duration>,
    /// What the lateness of its first token is measured by: the time it was given, and no less than is usual, because who
    /// has waited in a line for most of it is late by nothing that it can do.
    first_span: Option<Duration>,
    pub tokens: u64,
    lateness: f64,
    judged: u32,
    probation: Option<u32>,
    relapses: u32,
}

/// What a token meant for a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Arrival {
    pub is_first: bool,
    /// Whether there was a deadline, and it was missed.
    pub late: Option<bool>,
    /// Whether the task is no laggard any more.
    pub restored: bool,
}

impl Track {
    pub fn new(task: Task, now: Duration, config: &ScheduleConfig) -> Self {
        let usual = (task.priority >= Priority::Interactive).then_some(config.target);
        // A pace that is no number is none, and nobody has a million tokens a second.
        let pace = task.pace.or(usual).filter(|pace| pace.is_finite() && *pace > 1e-6);
        let period = pace.map(|pace| Duration::from_secs_f64(1.0 / pace.min(1e6)));
        let allowance = task.first_by.or(period.map(|period| config.first_token.max(period)));
        let due = allowance.map(|allowance| now.saturating_add(allowance));
        let first_span = allowance.map(|allowance| allowance.max(config.first_token));
        let (lateness, judged, probation, relapses) = (0.0, 0, None, 0);
        Self { task, due, period, first_span, tokens: 0, lateness, judged, probation, relapses }
    }

    pub fn is_demoted(&self) -> bool {
        self.probation.is_some()
    }

    /// What lateness is measured by.
    pub fn span(&self) -> Option<Duration> {
        if self.tokens == 0 { self.first_span } else { self.period }
    }

    /// Takes a token, of a task that is ahead of its pace from `lead` on.
    pub fn arrive(&mut self, now: Duration, slippage: f64, lead: Duration) -> Arrival {
        let late = self.due.map(|due| now > due);
        let ratio = self.overdue(now).clamp(0.0, LATEST);
        let is_first = self.tokens == 0;
        let restored = self.due.is_some() && self.judge(ratio, slippage);
        self.tokens += 1;
        // Being late does not add up: who was held up goes on at its pace and does not catch up at others' expense.
        // Having been fast with the first token is no lead.
        let from = if is_first { now } else { self.due.unwrap_or(now).max(now) };
        self.due = self.period.map(|period| {
            let farthest = now.saturating_add(lead).saturating_add(period * AHEAD);
            from.saturating_add(period).min(farthest)
        });
        Arrival { is_first, late, restored }
    }

    /// Whether it is no laggard any more.
    fn judge(&mut self, ratio: f64, slippage: f64) -> bool {
        self.lateness += (ratio - self.lateness) * WEIGHT;
        self.judged = self.judged.saturating_add(1);
        let Some(left) = &mut self.probation else { return false };
        let needed = PROBATION << self.relapses.min(MOST_DOUBLINGS);
        *left = if ratio <= slippage / 3.0 { left.saturating_sub(1) } else { needed };
        let restored = *left == 0;
        if restored {
            self.probation = None;
            self.relapses += 1;
            self.forgive();
        }
        restored
    }

    /// By how much of its span the next token is late.
    fn overdue(&self, now: Duration) -> f64 {
        let (Some(due), Some(span)) = (self.due, self.span()) else { return 0.0 };
        now.saturating_sub(due).as_secs_f64() / span.as_secs_f64().max(1e-9)
    }

    /// By how much of its period it is late, on average; what is missing for long counts as come.
    pub fn slippage(&self, now: Duration) -> f64 {
        let missing = self.overdue(now);
        let average = if self.judged >= FEW { self.lateness } else { 0.0 };
        match self.tokens {
            0 => missing,
            _ if missing > MISSING => missing.max(average),
            _ => average,
        }
    }

    pub fn demote(&mut self) {
        self.probation = Some(PROBATION << self.relapses.min(MOST_DOUBLINGS));
        self.forgive();
    }

    /// What was does not count any more.
    pub fn forgive(&mut self) {
        self.lateness = 0.0;
        self.judged = 0;
    }
}
