use std::time::Duration;

/// When the tokens of one request came, by whatever clock says what time it is.
#[derive(Debug, Clone)]
pub(crate) struct Timing {
    began: Duration,
    first: Option<Duration>,
    last: Duration,
    /// Tokens after the first, the one that ended the answer included.
    steps: usize,
}

impl Timing {
    /// From now on.
    pub fn begin(now: Duration) -> Self {
        Self { began: now, first: None, last: Duration::ZERO, steps: 0 }
    }

    /// A token was chosen.
    pub fn token(&mut self, now: Duration) {
        self.last = self.since_begin(now);
        self.steps += usize::from(self.first.is_some());
        self.first.get_or_insert(self.last);
    }

    /// How long the first token took; so far, where there is none.
    pub fn first(&self, now: Duration) -> Duration {
        self.first.unwrap_or_else(|| self.since_begin(now))
    }

    /// How long ago it began.
    pub fn since_begin(&self, now: Duration) -> Duration {
        now.saturating_sub(self.began)
    }

    /// Tokens a second after the first; 0 when there are fewer than two.
    pub fn decode_tps(&self) -> f64 {
        let took = self.last.saturating_sub(self.first.unwrap_or(self.last));
        if self.steps == 0 { 0.0 } else { self.steps as f64 / took.as_secs_f64().max(f64::EPSILON) }
    }
}
