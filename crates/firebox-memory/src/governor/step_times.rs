//! Step times, and the detection of steps that take too long.

use std::collections::VecDeque;
use std::time::Duration;

/// Steps whose median shows a gross deviation: two slow steps may be chance, three are not.
pub(super) const FEW_STEPS: usize = 5;
/// The factor of a gross deviation from streaming, beyond noise and the load of other programs.
const GROSS_SLOWDOWN: f64 = 2.0;
/// Steps whose median shows a small deviation.
const MANY_STEPS: usize = 32;
/// The factor of a small deviation from streaming: about five times the spread of that median.
const SMALL_SLOWDOWN: f64 = 1.06;
/// The factor beyond the spread of the medians of both few and many steps.
const CLEAR_SLOWDOWN: f64 = 1.03;
/// The factor of a deviation from the plan. The plan does not know the length of the context, so this counts only together
/// with page faults.
const SLOWER_THAN_PLANNED: f64 = 1.5;

/// The times of steps since the resident layers last changed, and the times expected.
#[derive(Debug)]
pub(super) struct StepTimes {
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
    pub slower_than_streaming: bool,
}

impl StepTimes {
    pub fn new(planned: Duration, streaming: Duration) -> Self {
        Self { steps: VecDeque::with_capacity(MANY_STEPS), planned, streaming, measured: false }
    }

    pub fn record(&mut self, time: Duration, major_faults: u64) {
        if self.steps.len() == MANY_STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(Step { time, major_faults });
    }

    /// Forgets the steps, because the resident layers have changed.
    pub fn restart(&mut self) {
        self.steps.clear();
    }

    /// Returns whether there are enough steps to notice a gross deviation.
    pub fn is_known(&self) -> bool {
        self.steps.len() >= FEW_STEPS
    }

    /// Returns the time of a step without resident layers.
    pub fn streaming(&self) -> Duration {
        self.streaming
    }

    /// Returns whether that time was measured.
    pub fn streaming_is_measured(&self) -> bool {
        self.measured
    }

    /// Returns the time lost by steps slower than streaming, in streamed steps; zero before the time of a streamed step was
    /// measured.
    pub fn lost_steps(&self) -> f64 {
        if !self.measured {
            return 0.0;
        }
        let streaming = self.streaming.as_secs_f64();
        let dearer = times(self.streaming, SMALL_SLOWDOWN);
        let beyond = |step: &Step| step.time.as_secs_f64() / streaming - 1.0;
        self.steps.iter().filter(|step| step.time > dearer && streaming > 0.0).map(beyond).sum()
    }

    /// Takes the present step time as the time of a streamed step if it is longer than a step with resident layers was.
    /// Returns whether it is longer, or `None` while there are too few steps.
    pub fn learn_if_slower(&mut self, step_time: Duration) -> Option<bool> {
        let found = self.median(FEW_STEPS)?;
        let dearer = found > times(step_time, CLEAR_SLOWDOWN);
        if dearer {
            (self.streaming, self.measured) = (found, true);
        }
        Some(dearer)
    }

    /// Takes the present step time as the time of a streamed step. Returns it if it differs from the last one.
    pub fn learn(&mut self) -> Option<Duration> {
        let found = self.median(MANY_STEPS)?;
        let known = std::mem::replace(&mut self.streaming, found);
        let first = !std::mem::replace(&mut self.measured, true);
        let (less, more) = (known.min(found), known.max(found));
        (first || more > times(less, SMALL_SLOWDOWN)).then_some(found)
    }

    /// Returns a finding if steps take too long for the share of the plan that is resident.
    pub fn thrash(&self, kept: f64) -> Option<Thrash> {
        if kept == 0.0 {
            return None;
        }
        self.slower_than_streaming(FEW_STEPS, GROSS_SLOWDOWN)
            .or_else(|| self.slower_than_streaming(MANY_STEPS, SMALL_SLOWDOWN))
            .or_else(|| self.slower_than_planned(kept))
    }

    fn slower_than_streaming(&self, steps: usize, factor: f64) -> Option<Thrash> {
        let dearer = self.median_exceeds(steps, times(self.streaming, factor));
        dearer.then(|| self.found(steps, self.streaming, true))
    }

    fn slower_than_planned(&self, kept: f64) -> Option<Thrash> {
        let saved = times(self.streaming.saturating_sub(self.planned), kept);
        let expected = self.streaming.saturating_sub(saved);
        let dearer = self.median_exceeds(MANY_STEPS, times(expected, SLOWER_THAN_PLANNED));
        (dearer && self.faults_per_step() > 0).then(|| self.found(MANY_STEPS, expected, false))
    }

    fn found(&self, steps: usize, expected: Duration, slower_than_streaming: bool) -> Thrash {
        let step_time = self.median(steps).unwrap_or_default();
        Thrash { step_time, expected, major_faults: self.faults_per_step(), slower_than_streaming }
    }

    /// Compares the median of the last steps with a limit, without sorting them.
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
