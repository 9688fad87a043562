use std::collections::VecDeque;
use std::time::Duration;

/// What is plainly wrong shows in the median of so few steps: two may be hiccups, three are not.
pub(super) const FEW: usize = 5;
/// Plainly dearer than streaming: more than noise and other programs make of a step.
const PLAINLY_DEARER: f64 = 2.0;
/// What is only a little wrong shows in the median of more steps.
const MANY: usize = 32;
/// A little dearer than streaming: about five times what the median of so many steps wavers by.
const DEARER: f64 = 1.06;
/// Dearer by more than the medians of few steps and of many waver by.
const SURELY_DEARER: f64 = 1.03;
/// Dearer than planned: a plan does not know how much there is to attend to, so that only with page faults this counts.
const DEARER_THAN_PLANNED: f64 = 1.5;

/// What steps take since residency last changed, and what they should take.
#[derive(Debug)]
pub(super) struct Pace {
    steps: VecDeque<Step>,
    planned: Duration,
    streaming: Duration,
    measured: bool,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    time: Duration,
    major_faults: u64,
}

/// Steps that take too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Thrash {
    pub step_time: Duration,
    pub expected: Duration,
    /// Per step.
    pub major_faults: u64,
    pub dearer_than_streaming: bool,
}

impl Pace {
    pub fn new(planned: Duration, streaming: Duration) -> Self {
        Self { steps: VecDeque::with_capacity(MANY), planned, streaming, measured: false }
    }

    pub fn record(&mut self, time: Duration, major_faults: u64) {
        if self.steps.len() == MANY {
            self.steps.pop_front();
        }
        self.steps.push_back(Step { time, major_faults });
    }

    /// Residency is another now.
    pub fn begin_again(&mut self) {
        self.steps.clear();
    }

    /// Whether there are enough steps to notice what is plainly wrong.
    pub fn is_known(&self) -> bool {
        self.steps.len() >= FEW
    }

    /// What a step takes with nothing kept.
    pub fn streaming(&self) -> Duration {
        self.streaming
    }

    /// Whether that was measured.
    pub fn streaming_is_measured(&self) -> bool {
        self.measured
    }

    /// What the steps that were dearer than streaming have cost beyond it, in streamed steps; nothing before it is known what
    /// those take.
    pub fn lost(&self) -> f64 {
        if !self.measured {
            return 0.0;
        }
        let streaming = self.streaming.as_secs_f64();
        let dearer = times(self.streaming, DEARER);
        let beyond = |step: &Step| step.time.as_secs_f64() / streaming - 1.0;
        self.steps.iter().filter(|step| step.time > dearer && streaming > 0.0).map(beyond).sum()
    }

    /// Takes what steps take now for what streaming costs where that is dearer than a step with layers kept was. Whether it is, or
    /// `None` while there are too few steps.
    pub fn learn_if_dearer(&mut self, step_time: Duration) -> Option<bool> {
        let found = self.median(FEW)?;
        let dearer = found > times(step_time, SURELY_DEARER);
        if dearer {
            (self.streaming, self.measured) = (found, true);
        }
        Some(dearer)
    }

    /// Takes what steps take now for what streaming costs; there is news if that is another cost than before.
    pub fn learn(&mut self) -> Option<Duration> {
        let found = self.median(MANY)?;
        let known = std::mem::replace(&mut self.streaming, found);
        let first = !std::mem::replace(&mut self.measured, true);
        let (less, more) = (known.min(found), known.max(found));
        (first || more > times(less, DEARER)).then_some(found)
    }

    /// Whether steps take too long, with such a share of the plan kept.
    pub fn thrash(&self, kept: f64) -> Option<Thrash> {
        if kept == 0.0 {
            return None;
        }
        self.dearer_than_streaming(FEW, PLAINLY_DEARER)
            .or_else(|| self.dearer_than_streaming(MANY, DEARER))
            .or_else(|| self.dearer_than_planned(kept))
    }

    fn dearer_than_streaming(&self, steps: usize, factor: f64) -> Option<Thrash> {
        let dearer = self.median_exceeds(steps, times(self.streaming, factor));
        dearer.then(|| self.found(steps, self.streaming, true))
    }

    fn dearer_than_planned(&self, kept: f64) -> Option<Thrash> {
        let saved = times(self.streaming.saturating_sub(self.planned), kept);
        let expected = self.streaming.saturating_sub(saved);
        let dearer = self.median_exceeds(MANY, times(expected, DEARER_THAN_PLANNED));
        (dearer && self.faults_per_step() > 0).then(|| self.found(MANY, expected, false))
    }

    fn found(&self, steps: usize, expected: Duration, dearer_than_streaming: bool) -> Thrash {
        let step_time = self.median(steps).unwrap_or_default();
        Thrash { step_time, expected, major_faults: self.faults_per_step(), dearer_than_streaming }
    }

    /// Says the same as the median of the last steps, which would be sorted after every step for it.
    fn median_exceeds(&self, count: usize, limit: Duration) -> bool {
        self.last(count).is_some_and(|last| last.filter(|step| step.time > limit).count() * 2 >= count)
    }

    fn median(&self, count: usize) -> Option<Duration> {
        let mut times: Vec<Duration> = self.last(count)?.map(|step| step.time).collect();
        let (_, median, _) = times.select_nth_unstable(count / 2);
        Some(*median)
    }

    fn last(&self, count: usize) -> Option<impl Iterator<Item = &Step>> {
        let first = self.steps.len().checked_sub(count)?;
        Some(self.steps.iter().skip(first))
    }

    fn faults_per_step(&self) -> u64 {
        let faults = self.steps.iter().map(|step| step.major_faults).fold(0, u64::saturating_add);
        faults / self.steps.len().max(1) as u64
    }
}

fn times(duration: Duration, factor: f64) -> Duration {
    Duration::try_from_secs_f64(duration.as_secs_f64() * factor).unwrap_or(Duration::MAX)
}
