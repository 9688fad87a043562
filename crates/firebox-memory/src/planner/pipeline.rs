//! A simulation of reading and computing at the same time.

/// The most passes until the pipeline is in its steady state. Few suffice nearly always, but a reader that is hardly faster
/// than the computation gets ahead slowly.
const WARM_UP_PASSES: usize = 256;

/// Passes that are averaged: with more buffers than streamed parts, a pattern may span several.
const MEASURED_PASSES: usize = 16;

/// Leads that differ by fewer seconds are equal.
const SAME_LEAD: f64 = 1e-12;

/// The costs of a pass over a model, in seconds.
#[derive(Debug, Clone)]
pub(super) struct PassCosts {
    /// The computing time of each part and, if it is streamed, its reading time.
    pub(super) parts: Vec<(f64, Option<f64>)>,
    /// The time after the last part.
    pub(super) overhead: f64,
    /// The factor by which computing slows down during a read.
    pub(super) contention: f64,
    /// The factor by which reading slows down during computing.
    pub(super) hindrance: f64,
}

/// The time of a pass in the steady state, and the part of it spent waiting for reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PassTime {
    pub(super) seconds: f64,
    pub(super) waiting: f64,
}

/// Returns the time of a pass that reads ahead into `buffers`. Without buffers a part is read when it is needed, as pages of
/// a mapped file are.
pub(super) fn pass_time(work: &PassCosts, buffers: usize) -> PassTime {
    let mut pipeline = Pipeline::new(work, buffers);
    pipeline.warm_up();
    let (clock, waited) = (pipeline.clock, pipeline.waited);
    (0..MEASURED_PASSES).for_each(|_| pipeline.pass());
    let mean = |total: f64| total / MEASURED_PASSES as f64;
    PassTime { seconds: mean(pipeline.clock - clock), waiting: mean(pipeline.waited - waited) }
}

/// A reader that cycles through the streamed parts, and a computation that follows it.
struct Pipeline<'a> {
    work: &'a PassCosts,
    buffers: usize,
    /// The reading time of each streamed part.
    reads: Vec<f64>,
    clock: f64,
    waited: f64,
    /// The remaining time of the read in flight.
    in_flight: Option<f64>,
    /// Finished reads of all passes.
    read: usize,
    /// Computed streamed parts of all passes.
    computed: usize,
}

impl<'a> Pipeline<'a> {
    fn new(work: &'a PassCosts, buffers: usize) -> Self {
        let reads = work.parts.iter().filter_map(|&(_, read)| read).collect();
        Self { work, buffers, reads, clock: 0.0, waited: 0.0, in_flight: None, read: 0, computed: 0 }
    }

    /// Runs passes until the reader's lead is the same before and after one.
    fn warm_up(&mut self) {
        for _ in 0..WARM_UP_PASSES {
            let (reads, left) = self.lead();
            self.pass();
            let (reads_now, left_now) = self.lead();
            if reads == reads_now && (left - left_now).abs() <= SAME_LEAD {
                return;
            }
        }
    }

    /// Returns how many reads the reader is ahead, and the remaining time of the next.
    fn lead(&self) -> (usize, f64) {
        (self.read - self.computed, self.in_flight.unwrap_or(0.0))
    }

    fn pass(&mut self) {
        for &(seconds, read) in &self.work.parts {
            if read.is_some() {
                self.wait_for_read();
            }
            self.compute(seconds);
            self.computed += usize::from(read.is_some());
        }
        self.compute(self.work.overhead);
    }

    /// Waits until the next part to compute has been read.
    fn wait_for_read(&mut self) {
        if self.read > self.computed {
            return;
        }
        let left = self.in_flight.take().unwrap_or_else(|| self.next_read());
        self.clock += left;
        self.waited += left;
        self.read += 1;
    }

    /// Computes for `seconds`, or longer where reads interfere, while the reader goes on.
    fn compute(&mut self, seconds: f64) {
        let mut left = seconds;
        while left > 0.0 {
            let Some(reading) = self.reading() else {
                self.clock += left;
                return;
            };
            let PassCosts { contention, hindrance, .. } = *self.work;
            let (disturbed, hindered) = (left * contention, reading * hindrance);
            if disturbed < hindered {
                self.clock += disturbed;
                self.in_flight = Some(reading - disturbed / hindrance);
                return;
            }
            self.clock += hindered;
            left -= hindered / contention;
            self.in_flight = None;
            self.read += 1;
        }
    }

    /// Returns the remaining time of the read in flight. Begins one if there is none and a buffer is free.
    fn reading(&mut self) -> Option<f64> {
        let is_free = !self.reads.is_empty() && self.read - self.computed < self.buffers;
        if self.in_flight.is_none() && is_free {
            self.in_flight = Some(self.next_read());
        }
        self.in_flight
    }

    fn next_read(&self) -> f64 {
        self.reads[self.read % self.reads.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn work(parts: &[(f64, Option<f64>)]) -> PassCosts {
        PassCosts { parts: parts.to_vec(), overhead: 0.0, contention: 1.0, hindrance: 1.0 }
    }

    #[track_caller]
    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found}, expected {expected}");
    }

    #[test]
    fn the_slower_of_reading_and_computing_sets_the_pass_time() {
        let reading_bound = pass_time(&work(&[(1.0, Some(3.0)); 4]), 2);
        close(reading_bound.seconds, 12.0);
        close(reading_bound.waiting, 8.0);
        let computing_bound = pass_time(&work(&[(3.0, Some(1.0)); 4]), 2);
        close(computing_bound.seconds, 12.0);
        close(computing_bound.waiting, 0.0);
    }

    #[test]
    fn without_buffers_nothing_overlaps() {
        let pace = pass_time(&work(&[(1.0, Some(3.0)), (5.0, None)]), 0);
        close(pace.seconds, 9.0);
        close(pace.waiting, 3.0);
    }

    #[test]
    fn one_buffer_is_read_into_while_resident_parts_compute() {
        close(pass_time(&work(&[(1.0, Some(3.0)), (2.0, None)]), 1).seconds, 4.0);
    }

    #[test]
    fn reading_ahead_needs_a_buffer() {
        // Ten resident parts hide as many reads as there are buffers; the pass waits for the others.
        let mut parts = vec![(1.0, None); 10];
        parts.extend([(0.0, Some(2.0)); 5]);
        close(pass_time(&work(&parts), 2).seconds, 16.0);
        close(pass_time(&work(&parts), 4).seconds, 12.0);
        close(pass_time(&work(&parts), 5).seconds, 10.0);
    }

    #[test]
    fn reading_may_slow_computing() {
        let mut slowed = work(&[(2.0, Some(1.0)); 4]);
        slowed.contention = 2.0;
        // Of every part's two seconds of computing, one passes during a read and does the work of half a second.
        close(pass_time(&slowed, 2).seconds, 4.0 * 2.5);
    }

    #[test]
    fn computing_may_slow_reading() {
        let mut slowed = work(&[(1.0, Some(3.0)); 4]);
        slowed.hindrance = 2.0;
        // During a second of computing half a second's worth is read; the pass waits for the rest.
        close(pass_time(&slowed, 2).seconds, 4.0 * 3.5);
    }

    fn some_work() -> impl Strategy<Value = (PassCosts, usize)> {
        let part = (0.0..2.0, prop::option::weighted(0.6, 0.01..3.0));
        let contention = prop_oneof![Just(1.0), 1.0..3.0];
        // Doing both at once is never slower than one after the other.
        let share = prop_oneof![Just(0.0), 0.0..0.9];
        (prop::collection::vec(part, 1..24), 0.0..1.0, contention, share, 1usize..6).prop_map(
            |(parts, overhead, contention, share, buffers)| {
                let hindrance = 1.0 / (1.0 - share / contention);
                (PassCosts { parts, overhead, contention, hindrance }, buffers)
            },
        )
    }

    proptest! {
        #[test]
        fn a_pass_takes_no_more_than_computing_plus_reading((work, buffers) in some_work()) {
            let computing = work.overhead + work.parts.iter().map(|part| part.0).sum::<f64>();
            let reading: f64 = work.parts.iter().filter_map(|part| part.1).sum();
            let found = pass_time(&work, buffers);
            prop_assert!(found.seconds >= computing.max(reading) - 1e-9, "{found:?} {computing} {reading}");
            prop_assert!(found.seconds <= computing + reading + 1e-9, "{found:?} {computing} {reading}");
            prop_assert!(found.waiting >= 0.0 && found.waiting <= found.seconds - computing + 1e-9);
        }

        #[test]
        fn another_resident_part_or_buffer_never_slows_a_pass((mut work, buffers) in some_work(), kept in 0usize..24) {
            let before = pass_time(&work, buffers).seconds;
            // Where reads slow computing, the steady state may be a pattern of many passes, of which few are averaged.
            let slack = if work.contention == 1.0 && work.hindrance == 1.0 { 1e-9 } else { 0.01 * before };
            prop_assert!(pass_time(&work, buffers + 1).seconds <= before + slack);
            let kept = kept % work.parts.len();
            work.parts[kept].1 = None;
            let after = pass_time(&work, buffers).seconds;
            prop_assert!(after <= before + slack, "{after} {before}");
        }

        #[test]
        fn a_fully_resident_pass_takes_its_computing_time((mut work, buffers) in some_work()) {
            work.parts.iter_mut().for_each(|part| part.1 = None);
            let computing = work.overhead + work.parts.iter().map(|part| part.0).sum::<f64>();
            let found = pass_time(&work, buffers);
            prop_assert!((found.seconds - computing).abs() < 1e-9 && found.waiting == 0.0);
        }
    }
}
