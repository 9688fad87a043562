//! Intervals of tokens or time.

use std::time::Duration;

/// A number of tokens or a span of time, whichever ends first.
#[derive(Debug)]
pub(super) struct Interval {
    tokens: usize,
    time: Duration,
    passed_tokens: usize,
    passed_time: Duration,
}

impl Interval {
    pub fn new(tokens: usize, time: Duration) -> Self {
        Self { tokens, time, passed_tokens: 0, passed_time: Duration::ZERO }
    }

    /// Advances by a step. Returns whether the interval has ended; then the next one begins.
    pub fn passes(&mut self, tokens: usize, time: Duration) -> bool {
        self.passed_tokens = self.passed_tokens.saturating_add(tokens);
        self.passed_time = self.passed_time.saturating_add(time);
        let over = self.passed_tokens >= self.tokens || self.passed_time >= self.time;
        if over {
            self.restart();
        }
        over
    }

    pub fn restart(&mut self) {
        self.passed_tokens = 0;
        self.passed_time = Duration::ZERO;
    }
}
