//! The progress of a task against its deadlines.

use std::time::Duration;

use super::{Priority, ScheduleConfig, Task};

/// The weight of a new token in the average lateness. With an eighth, one token that is two periods late is forgiven, and
/// three in a row are not.
const TOKEN_WEIGHT: f64 = 1.0 / 8.0;
/// The most lateness of one token, in periods: a machine that was suspended makes no laggard.
const MAX_PERIODS_LATE: f64 = 2.0;
/// Tokens after which the average means something.
const MIN_TOKENS: u32 = 4;
/// A token that is missing for longer than this, in periods, counts before it comes.
const MISSING_PERIODS: f64 = 2.0;
/// Periods by which a task may be ahead of its pace, beyond what keeps it from being late. A task that was fast would
/// otherwise wait for as long as it was ahead when others come, which its reader would see.
const MAX_PERIODS_AHEAD: u32 = 4;
/// On-time tokens after which a demoted task gets its priority back: most of a second at the default pace.
const PROBATION_TOKENS: u32 = 16;
/// Every relapse doubles them, up to this many times.
const MAX_DOUBLINGS: u32 = 4;

/// The progress of a task.
#[derive(Debug, Clone)]
pub(super) struct TaskProgress {
    pub task: Task,
    /// The deadline of its next token, if it has one.
    pub due: Option<Duration>,
    /// The time between two tokens; `None` if it takes what is left.
    pub period: Option<Duration>,
    /// The unit of the first token's lateness: the time it was given, and no less than the default, because a task cannot
    /// help being late when it has waited in a queue for most of that time.
    first_span: Option<Duration>,
    pub tokens: u64,
    lateness: f64,
    judged: u32,
    probation: Option<u32>,
    relapses: u32,
}

/// The effect of a token on a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Arrival {
    pub is_first: bool,
    /// Whether a deadline was missed; `None` if there was none.
    pub late: Option<bool>,
    /// Whether the task got its priority back.
    pub restored: bool,
}

impl TaskProgress {
    pub fn new(task: Task, now: Duration, config: &ScheduleConfig) -> Self {
        let usual = (task.priority >= Priority::Interactive).then_some(config.target);
        // A pace that is not a number counts as none, and none is above a million tokens per second.
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

    /// Returns the unit of its lateness.
    pub fn span(&self) -> Option<Duration> {
        if self.tokens == 0 { self.first_span } else { self.period }
    }

    /// Records a token, of a task that is ahead of its pace from `lead` on.
    pub fn arrive(&mut self, now: Duration, slippage: f64, lead: Duration) -> Arrival {
        let late = self.due.map(|due| now > due);
        let ratio = self.overdue(now).clamp(0.0, MAX_PERIODS_LATE);
        let is_first = self.tokens == 0;
        let restored = self.due.is_some() && self.judge(ratio, slippage);
        self.tokens += 1;
        // Lateness does not add up: a task that was blocked continues at its pace and does not catch up at the expense of
        // others. A fast first token gives no lead.
        let from = if is_first { now } else { self.due.unwrap_or(now).max(now) };
        self.due = self.period.map(|period| {
            let farthest = now.saturating_add(lead).saturating_add(period * MAX_PERIODS_AHEAD);
            from.saturating_add(period).min(farthest)
        });
        Arrival { is_first, late, restored }
    }

    /// Updates the average lateness. Returns whether the task gets its priority back.
    fn judge(&mut self, ratio: f64, slippage: f64) -> bool {
        self.lateness += (ratio - self.lateness) * TOKEN_WEIGHT;
        self.judged = self.judged.saturating_add(1);
        let Some(left) = &mut self.probation else { return false };
        let needed = PROBATION_TOKENS << self.relapses.min(MAX_DOUBLINGS);
        *left = if ratio <= slippage / 3.0 { left.saturating_sub(1) } else { needed };
        let restored = *left == 0;
        if restored {
            self.probation = None;
            self.relapses += 1;
            self.forgive();
        }
        restored
    }

    /// Returns the lateness of the next token in units of its span.
    fn overdue(&self, now: Duration) -> f64 {
        let (Some(due), Some(span)) = (self.due, self.span()) else { return 0.0 };
        now.saturating_sub(due).as_secs_f64() / span.as_secs_f64().max(1e-9)
    }

    /// Returns the average lateness in periods; a token that is missing for long counts already.
    pub fn slippage(&self, now: Duration) -> f64 {
        let missing = self.overdue(now);
        let average = if self.judged >= MIN_TOKENS { self.lateness } else { 0.0 };
        match self.tokens {
            0 => missing,
            _ if missing > MISSING_PERIODS => missing.max(average),
            _ => average,
        }
    }

    pub fn demote(&mut self) {
        self.probation = Some(PROBATION_TOKENS << self.relapses.min(MAX_DOUBLINGS));
        self.forgive();
    }

    /// Forgets the past lateness.
    pub fn forgive(&mut self) {
        self.lateness = 0.0;
        self.judged = 0;
    }
}
