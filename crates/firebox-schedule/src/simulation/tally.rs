//! Counts during a simulation.

use std::time::Duration;

use crate::Priority;

/// Counts during a simulation.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub classes: [ClassTally; Priority::ALL.len()],
    pub asked: f64,
    pub busy: Duration,
    pub busy_at_tick: Duration,
    pub waiting: Duration,
    pub ready_at_once: u64,
    pub changes: u64,
    pub pinned_deadlines: u64,
    pub unexcused: u64,
    pub violations: u64,
    pub examples: Vec<String>,
}

/// Counts of one priority.
#[derive(Debug, Default)]
pub(super) struct ClassTally {
    pub arrived: u64,
    pub done: u64,
    pub refused: u64,
    pub first_tokens: Vec<Duration>,
}
