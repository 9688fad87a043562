/// Passes until the pipeline runs as it always will, at most. Few do nearly always; but a reader that is hardly faster
/// than the computer gets ahead of it slowly.
const RUNNING_IN: usize = 256;

/// Passes that are averaged: with more buffers than streamed parts, a pattern may span several.
const MEASURED: usize = 16;

/// Leads that differ by fewer seconds are the same.
const SAME_LEAD: f64 = 1e-12;

/// What one pass over a model does; times are in seconds.
#[derive(Debug, Clone)]
pub(super) struct Work {
    /// How long each part computes and, if it is streamed, how long it is read before.
    pub(super) parts: Vec<(f64, Option<f64>)>,
    /// What follows the last part.
    pub(super) overhead: f64,
    /// How many times longer computing takes while something is read.
    pub(super) contention: f64,
    /// How many times longer reading takes while something computes.
    pub(super) hindrance: f64,
}

/// How long a pass takes once all passes are alike, and how much of that it waits for reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pace {
    pub(super) seconds: f64,
    pub(super) waiting: f64,
}

/// The pace of passes that read ahead into so many buffers. Without buffers a part is read when it is needed, as pages
/// of a mapped file are.
pub(super) fn pace(work: &Work, buffers: usize) -> Pace {
    let mut pipeline = Pipeline::new(work, buffers);
    pipeline.run_in();
    let (clock, waited) = (pipeline.clock, pipeline.waited);
    (0..MEASURED).for_each(|_| pipeline.pass());
    let mean = |total: f64| total / MEASURED as f64;
    Pace { seconds: mean(pipeline.clock - clock), waiting: mean(pipeline.waited - waited) }
}

/// A reader that goes through the streamed parts again and again, and a computer that follows it.
struct Pipeline<'a> {
    work: &'a Work,
    buffers: usize,
    /// How long each streamed part is read.
    reads: Vec<f64>,
    clock: f64,
    waited: f64,
    /// What is left of the read in flight.
    in_flight: Option<f64>,
    /// Reads that are done, of all passes.
    read: usize,
    /// StreamedWeights parts that have computed, of all passes.
    computed: usize,
}

impl<'a> Pipeline<'a> {
    fn new(work: &'a Work, buffers: usize) -> Self {
        let reads = work.parts.iter().filter_map(|&(_, read)| read).collect();
        Self { work, buffers, reads, clock: 0.0, waited: 0.0, in_flight: None, read: 0, computed: 0 }
    }

    /// Goes through passes until the reader is as far ahead after one as it was before.
    fn run_in(&mut self) {
        for _ in 0..RUNNING_IN {
            let (reads, left) = self.lead();
            self.pass();
            let (reads_now, left_now) = self.lead();
            if reads == reads_now && (left - left_now).abs() <= SAME_LEAD {
                return;
            }
        }
    }

    /// How many reads the reader is ahead, and what is left of the next.
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

    /// Until the next part to compute has been read.
    fn wait_for_read(&mut self) {
        if self.read > self.computed {
            return;
        }
        let left = self.in_flight.take().unwrap_or_else(|| self.next_read());
        self.clock += left;
        self.waited += left;
        self.read += 1;
    }

    /// Computes for so long, or longer where reads disturb it, while the reader goes on.
    fn compute(&mut self, seconds: f64) {
        let mut left = seconds;
        while left > 0.0 {
            let Some(reading) = self.reading() else {
                self.clock += left;
                return;
            };
            let Work { contention, hindrance, .. } = *self.work;
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

    /// What is left of the read in flight; begins one if there is none and a buffer is free.
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

    fn work(parts: &[(f64, Option<f64>)]) -> Work {
        Work { parts: parts.to_vec(), overhead: 0.0, contention: 1.0, hindrance: 1.0 }
    }

    #[track_caller]
    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found}, expected {expected}");
    }

    #[test]
    fn the_slower_of_reading_and_computing_sets_the_pace() {
        let reading_bound = pace(&work(&[(1.0, Some(3.0)); 4]), 2);
        close(reading_bound.seconds, 12.0);
        close(reading_bound.waiting, 8.0);
        let computing_bound = pace(&work(&[(3.0, Some(1.0)); 4]), 2);
        close(computing_bound.seconds, 12.0);
        close(computing_bound.waiting, 0.0);
    }

    #[test]
    fn without_buffers_nothing_overlaps() {
        let pace = pace(&work(&[(1.0, Some(3.0)), (5.0, None)]), 0);
        close(pace.seconds, 9.0);
        close(pace.waiting, 3.0);
    }

    #[test]
    fn one_buffer_is_read_into_while_kept_parts_compute() {
        close(pace(&work(&[(1.0, Some(3.0)), (2.0, None)]), 1).seconds, 4.0);
    }

    #[test]
    fn a_read_ahead_needs_a_buffer() {
        // Ten kept parts hide as many reads as there are buffers; the others are waited for.
        let mut parts = vec![(1.0, None); 10];
        parts.extend([(0.0, Some(2.0)); 5]);
        close(pace(&work(&parts), 2).seconds, 16.0);
        close(pace(&work(&parts), 4).seconds, 12.0);
        close(pace(&work(&parts), 5).seconds, 10.0);
    }

    #[test]
    fn reading_may_slow_computing() {
        let mut slowed = work(&[(2.0, Some(1.0)); 4]);
        slowed.contention = 2.0;
        // Of every part's two seconds of computing one second passes beside a read and does half a second's work.
        close(pace(&slowed, 2).seconds, 4.0 * 2.5);
    }

    #[test]
    fn computing_may_slow_reading() {
        let mut slowed = work(&[(1.0, Some(3.0)); 4]);
        slowed.hindrance = 2.0;
        // Beside a second of computing half a second's worth is read, and the rest is waited for.
        close(pace(&slowed, 2).seconds, 4.0 * 3.5);
    }

    fn some_work() -> impl Strategy<Value = (Work, usize)> {
        let part = (0.0..2.0, prop::option::weighted(0.6, 0.01..3.0));
        let contention = prop_oneof![Just(1.0), 1.0..3.0];
        // Doing both at once is never slower than one after the other.
        let share = prop_oneof![Just(0.0), 0.0..0.9];
        (prop::collection::vec(part, 1..24), 0.0..1.0, contention, share, 1usize..6).prop_map(
            |(parts, overhead, contention, share, buffers)| {
                let hindrance = 1.0 / (1.0 - share / contention);
                (Work { parts, overhead, contention, hindrance }, buffers)
            },
        )
    }

    proptest! {
        #[test]
        fn a_pass_takes_what_it_has_to_and_no_more((work, buffers) in some_work()) {
            let computing = work.overhead + work.parts.iter().map(|part| part.0).sum::<f64>();
            let reading: f64 = work.parts.iter().filter_map(|part| part.1).sum();
            let found = pace(&work, buffers);
            prop_assert!(found.seconds >= computing.max(reading) - 1e-9, "{found:?} {computing} {reading}");
            prop_assert!(found.seconds <= computing + reading + 1e-9, "{found:?} {computing} {reading}");
            prop_assert!(found.waiting >= 0.0 && found.waiting <= found.seconds - computing + 1e-9);
        }

        #[test]
        fn to_keep_a_part_or_add_a_buffer_never_slows((mut work, buffers) in some_work(), kept in 0usize..24) {
            let before = pace(&work, buffers).seconds;
            // Where reads disturb computing, a pipeline may have run in to a pattern of many passes, and few are averaged.
            let slack = if work.contention == 1.0 && work.hindrance == 1.0 { 1e-9 } else { 0.01 * before };
            prop_assert!(pace(&work, buffers + 1).seconds <= before + slack);
            let kept = kept % work.parts.len();
            work.parts[kept].1 = None;
            let after = pace(&work, buffers).seconds;
            prop_assert!(after <= before + slack, "{after} {before}");
        }

        #[test]
        fn with_everything_kept_a_pass_is_its_computing((mut work, buffers) in some_work()) {
            work.parts.iter_mut().for_each(|part| part.1 = None);
            let computing = work.overhead + work.parts.iter().map(|part| part.0).sum::<f64>();
            let found = pace(&work, buffers);
            prop_assert!((found.seconds - computing).abs() < 1e-9 && found.waiting == 0.0);
        }
    }
}
