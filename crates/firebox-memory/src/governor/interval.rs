use std::time::Duration;

/// So many tokens or so much time, whichever is over first.
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

    /// Goes on by a step. Whether the interval is over; if so, the next one begins.
    pub fn passes(&mut self, tokens: usize, time: Duration) -> bool {
        self.passed_tokens = self.passed_tokens.saturating_add(tokens);
        self.passed_time = self.passed_time.saturating_add(time);
        let over = self.passed_tokens >= self.tokens || self.passed_time >= self.time;
        if over {
            self.begin_again();
        }
        over
    }

    pub fn begin_again(&mut self) {
        self.passed_tokens = 0;
        self.passed_time = Duration::ZERO;
    }
}
