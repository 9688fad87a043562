//! Times of one request's tokens.

use std::sync::Arc;
use std::time::Duration;

use crate::decode::Finish;
use crate::telemetry::{Counter, Gauge, Held, Histogram, Meters};

/// Times of one request's tokens, by the caller's clock, and the metrics that follow from them.
#[derive(Debug)]
pub struct Timing {
    began: Duration,
    first: Option<Duration>,
    last: Duration,
    /// Tokens after the first, with the one that ended the answer.
    steps: usize,
    meters: Arc<Meters>,
    running: Option<Held>,
}

impl Timing {
    /// Begins at `now`, for a request that does not run yet.
    pub fn begin(now: Duration, meters: &Arc<Meters>) -> Self {
        Self {
            began: now,
            first: None,
            last: Duration::ZERO,
            steps: 0,
            meters: meters.clone(),
            running: None,
        }
    }

    /// Records that the request runs, or that it waits.
    pub fn set_running(&mut self, runs: bool) {
        self.running = runs.then(|| self.meters.hold(Gauge::RunningRequests));
    }

    /// Records the length of the prompt, and how many of its tokens were cached.
    pub fn prompt(&self, tokens: usize, cached: usize) {
        self.meters.add(Counter::PromptTokens, tokens as u64);
        if cached > 0 {
            self.meters.add(Counter::CachedTokens, cached as u64);
        }
    }

    /// Records how long the request waited before it ran.
    pub fn waited(&self, time: Duration) {
        self.meters.took(Histogram::QueueWait, time);
    }

    /// Records that a token was chosen.
    pub(crate) fn token(&mut self, now: Duration) {
        let since = self.since_begin(now);
        let before = std::mem::replace(&mut self.last, since);
        if self.first.is_some() {
            self.steps += 1;
            self.meters.took(Histogram::InterToken, since.saturating_sub(before));
        } else {
            self.first = Some(since);
            self.meters.took(Histogram::TimeToFirstToken, since);
        }
    }

    /// Records that the token became part of the answer.
    pub(crate) fn generated(&self) {
        self.meters.add(Counter::GeneratedTokens, 1);
    }

    /// Records the end of the request; `None` is a failure.
    pub fn ended(&self, finish: Option<Finish>) {
        let counter = match finish {
            None => Counter::FailedRequests,
            Some(Finish::Cancelled) => Counter::CancelledRequests,
            Some(Finish::Stop | Finish::Length | Finish::Repetition) => Counter::FinishedRequests,
        };
        self.meters.add(counter, 1);
    }

    /// Returns how long the first token took; without one, the time so far.
    pub(crate) fn first(&self, now: Duration) -> Duration {
        self.first.unwrap_or_else(|| self.since_begin(now))
    }

    /// Returns the time since the beginning.
    pub fn since_begin(&self, now: Duration) -> Duration {
        now.saturating_sub(self.began)
    }

    /// Returns the tokens per second after the first; 0 when there are fewer than two.
    pub(crate) fn decode_tps(&self) -> f64 {
        let took = self.last.saturating_sub(self.first.unwrap_or(self.last));
        if self.steps == 0 { 0.0 } else { self.steps as f64 / took.as_secs_f64().max(f64::EPSILON) }
    }
}
