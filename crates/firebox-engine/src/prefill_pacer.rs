//! Paces prefill beside decoding.

use std::iter::Sum;
use std::time::Duration;

use crate::prefill_chunks::PrefillBudget;
use crate::sequence::Need;

/// Rows of prefill that go through a layer together beside decoding before anything was measured.
const FIRST_ROWS: usize = 16;
/// Weight of the newest measurement in the moving average.
const NEWEST: f64 = 0.3;
/// Share of the time of a decode step that a layer of prefill may take.
const SHARE: f64 = 0.5;
/// [`SHARE`] for when that would be few rows: deep in a prompt, most of a layer's time goes into reading the keys of
/// all earlier tokens, however few rows they are read for.
const LARGEST_SHARE: f64 = 0.65;
/// Approximate seconds that a prefill pass computes for. A new request waits for the end of the pass, and of the decode steps
/// between its layers; other models wait for the end of a layer. Longer passes are hardly faster per row.
const PASS: f64 = 0.4;
/// Rows that make reading the weights and keys of a layer worth it; the limits on time are raised to allow as many.
pub(crate) const WORTH_READING: f64 = 32.0;
/// Passes that decode and prefill after which one only decodes, so that its time is known.
const JOINT_PASSES: usize = 16;
/// Number of attended positions that is assumed to cost as much as the weights of a layer for a row, until measured.
const POSITIONS: f64 = 4096.0;

/// Moves a moving average towards a measurement.
fn blend(average: &mut Option<f64>, newest: f64) {
    *average = Some(average.map_or(newest, |average| average + NEWEST * (newest - average)));
}

/// Decides how long prefill may run between two decode steps: as long as a step takes.
#[derive(Debug, Default)]
pub(crate) struct PrefillPacer {
    /// Seconds that a decode step takes.
    step: Option<f64>,
    /// Cost of a layer of prefill.
    layer: Option<Seconds>,
    /// Seconds of prefill since the last decode step.
    prefill_seconds: f64,
    /// Seconds that a layer of a decode step takes.
    decode_layer: Option<f64>,
    /// Rows of prefill in the last pass that decoded as well, and how many such passes ran since one that only decoded.
    joint: Option<(usize, usize)>,
}

/// The work of a layer for rows of prompts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Work {
    rows: f64,
    /// Positions that all rows attend to, in units of [`POSITIONS`].
    attended: f64,
}

impl Work {
    /// The work of `tokens` tokens that follow `before` others.
    pub fn new(tokens: usize, before: usize) -> Self {
        let rows = tokens as f64;
        Self { rows, attended: rows * (before as f64 + rows / 2.0) / POSITIONS }
    }
}

impl Sum for Work {
    fn sum<I: Iterator<Item = Self>>(works: I) -> Self {
        works.fold(Self::default(), |all, work| Self {
            rows: all.rows + work.rows,
            attended: all.attended + work.attended,
        })
    }
}

/// Seconds that a layer takes per unit of each kind of work.
#[derive(Debug, Clone, Copy, Default)]
struct Seconds {
    row: f64,
    attended: f64,
}

impl Seconds {
    fn for_work(self, work: Work) -> f64 {
        self.row * work.rows + self.attended * work.attended
    }

    /// Moves a part of the way towards a measurement, by the shortest correction that explains it: rows that attend to
    /// little adjust the cost of rows, rows that attend to much the cost of attention.
    fn blend(&mut self, work: Work, took: f64, part: f64) {
        let length = work.rows * work.rows + work.attended * work.attended;
        if length > 0.0 {
            let off = part * (took - self.for_work(work)) / length;
            self.row = (self.row + off * work.rows).max(0.0);
            self.attended = (self.attended + off * work.attended).max(0.0);
        }
    }
}

impl PrefillPacer {
    /// Records a layer.
    pub fn record_layer(&mut self, need: Need, work: Work, took: Duration) {
        let took = took.as_secs_f64();
        match need {
            Need::Prefill => {
                self.prefill_seconds += took;
                let part = if self.layer.is_some() { NEWEST } else { 1.0 };
                self.layer.get_or_insert_default().blend(work, took, part);
            }
            Need::Decode => blend(&mut self.decode_layer, took),
        }
    }

    /// Records a layer that decode rows and this work of prefill went through together.
    pub fn record_joint_layer(&mut self, work: Work, took: Duration) {
        let prefill = took.as_secs_f64() - self.decode_layer.unwrap_or_default();
        self.record_layer(Need::Prefill, work, Duration::from_secs_f64(prefill.max(0.0)));
    }

    /// Records a pass of decode rows and `rows` rows of prefill.
    pub fn record_joint_pass(&mut self, rows: usize) {
        let passes = self.joint.map_or(0, |(_, passes)| passes);
        self.joint = Some((rows, passes + 1));
    }

    /// Returns whether the next pass that decodes should have no rows of prefill: how long it takes is not known, or was
    /// measured long ago.
    pub fn measures_decoding(&self) -> bool {
        self.step.is_none() || self.joint.is_some_and(|(_, passes)| passes >= JOINT_PASSES)
    }

    /// Records a pass.
    pub fn record_pass(&mut self, need: Need, took: Duration) {
        if need == Need::Decode {
            self.prefill_seconds = 0.0;
            self.joint = self.joint.map(|(rows, _)| (rows, 0));
            blend(&mut self.step, took.as_secs_f64());
        }
    }

    /// Returns whether a layer of prefill runs before the next decode step. Without `work`, assumes a pass that has not
    /// begun. At least one layer runs between two steps, so that prefill makes progress whatever it costs.
    pub fn may_prefill(&self, work: Option<Work>) -> bool {
        let Some(step) = self.step else { return false };
        let layer = work.map_or(SHARE * step, |work| self.layer_seconds(work));
        self.prefill_seconds == 0.0 || self.prefill_seconds + layer <= step
    }

    /// Returns the seconds that a layer takes, or zero as long as nothing was measured.
    pub fn layer_seconds(&self, work: Work) -> f64 {
        self.layer.unwrap_or_default().for_work(work)
    }

    /// Returns how much of a prompt goes through `layers` layers together when nothing runs beside it. `row` is the
    /// seconds that a layer takes per row.
    pub fn alone(&self, layers: usize, row: f64) -> PrefillBudget {
        match self.layer {
            Some(_) => PrefillBudget::seconds(self.layer_of_pass(layers, row)),
            None => PrefillBudget::ALL,
        }
    }

    /// Returns the seconds that a layer of a pass may take.
    fn layer_of_pass(&self, layers: usize, row: f64) -> f64 {
        (PASS / layers.max(1) as f64).max(WORTH_READING * row)
    }

    /// Returns how much of the prompts goes through `layers` layers in a pass that decodes as well: it may take as long again
    /// as the pass would alone, which is `step` seconds if they are known, and has at most twice the rows of the last one,
    /// because their cost is a guess.
    pub fn joint(&self, layers: usize, step: f64) -> PrefillBudget {
        let rows = self.joint.map_or(FIRST_ROWS, |(rows, _)| (2 * rows).max(FIRST_ROWS));
        let step = Some(step).filter(|step| *step > 0.0).or(self.step);
        let seconds = step.map_or(f64::INFINITY, |step| step / layers.max(1) as f64);
        PrefillBudget { rows, seconds }
    }

    /// Returns how much of the prompts goes through `layers` layers together beside decoding, or beside each other.
    pub fn beside(&self, layers: usize, row: f64) -> PrefillBudget {
        match (self.step, self.layer) {
            (Some(step), Some(_)) => {
                let of_step = (step * SHARE).max((step * LARGEST_SHARE).min(WORTH_READING * row));
                PrefillBudget::seconds(of_step.min(self.layer_of_pass(layers, row)))
            }
            _ => PrefillBudget { rows: FIRST_ROWS, ..PrefillBudget::ALL },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a pacer beside decode steps of 20 ms, and the rows and milliseconds of a prefill layer once they have
    /// settled, `before` tokens into a prompt. `took` holds the milliseconds of a layer: fixed, per row, and per 4096
    /// positions that a row attends to.
    fn beside(took: [f64; 3], before: usize) -> (PrefillPacer, usize, f64) {
        let mut pacer = PrefillPacer::default();
        pacer.record_pass(Need::Decode, Duration::from_millis(20));
        let (mut rows, mut ms) = (FIRST_ROWS, 0.0);
        for _ in 0..200 {
            let work = Work::new(rows, before);
            ms = took[0] + took[1] * work.rows + took[2] * work.attended;
            pacer.record_layer(Need::Prefill, work, Duration::from_secs_f64(ms / 1e3));
            let row = pacer.layer_seconds(Work::new(1, before));
            rows = ((pacer.beside(10, row).seconds / row) as usize).max(1);
        }
        (pacer, rows, ms)
    }

    #[test]
    fn few_rows_get_a_larger_share_of_a_step() {
        let worth = WORTH_READING as usize;
        let (_, many, took) = beside([1.0, 0.1, 0.0], 0);
        assert!(many > worth && (9.0..=10.1).contains(&took), "{many} rows take {took} ms");
        let (_, some, took) = beside([3.0, 0.2, 0.025], 16_384);
        assert!(
            (worth - 2..=worth).contains(&some) && (12.0..=13.0).contains(&took),
            "{some} take {took} ms"
        );
        let (_, few, took) = beside([3.0, 0.1, 0.125], 16_384);
        assert!(few < worth && (12.0..=13.1).contains(&took), "{few} rows take {took} ms");
    }

    /// Steps over streamed weights: 30 ms a pass whatever is in it, 5 of them computing, and 1 ms a row in each of 10 layers.
    #[test]
    fn prefill_at_most_doubles_a_pass_over_streamed_weights() {
        let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        let mut pacer = PrefillPacer::default();
        assert!(pacer.measures_decoding(), "nothing was measured");
        let (mut rows, mut alone) = (0, 0);
        for _ in 0..200 {
            if pacer.measures_decoding() {
                alone += 1;
                (0..10).for_each(|_| pacer.record_layer(Need::Decode, Work::new(1, 0), ms(0.5)));
                pacer.record_pass(Need::Decode, ms(30.0));
                continue;
            }
            let budget = pacer.joint(10, 0.0);
            let row = pacer.layer_seconds(Work::new(1, 0));
            rows = budget.rows.min((budget.seconds / row) as usize).max(1);
            let layer = ms(0.5 + 0.1 * rows as f64);
            (0..10).for_each(|_| pacer.record_joint_layer(Work::new(rows, 0), layer));
            pacer.record_joint_pass(rows);
        }
        assert!((28..=31).contains(&rows), "{rows} rows of 1 ms beside 30 ms");
        assert!((10..=14).contains(&alone), "{alone} of 200 passes only decode");
    }

    #[test]
    fn short_prompts_do_not_distort_the_cost_of_long_ones() {
        let took = [0.5, 0.1, 0.15];
        let mut pacer = beside(took, 100).0;
        // The long prompt goes on, now and then beside a short one. After some of those, both costs are known.
        let mut before = 100;
        for pass in 0..400 {
            let short = (pass % 7 == 0).then(|| Work::new(16, 30));
            let work: Work = [Work::new(10, before)].into_iter().chain(short).sum();
            before += 50;
            let ms = took[0] + took[1] * work.rows + took[2] * work.attended;
            if pass > 120 {
                let predicted = pacer.layer_seconds(work) * 1e3;
                assert!((predicted / ms - 1.0).abs() < 0.1, "{predicted} instead of {ms} ms in pass {pass}");
            }
            for _ in 0..28 {
                pacer.record_layer(Need::Prefill, work, Duration::from_secs_f64(ms / 1e3));
            }
        }
    }

    #[test]
    fn a_pass_beside_slow_steps_is_no_longer_than_one_alone() {
        let (layers, row) = (28, 0.000_1);
        let mut pacer = PrefillPacer::default();
        pacer.record_layer(Need::Prefill, Work::new(100, 0), Duration::from_millis(10));
        pacer.record_pass(Need::Decode, Duration::from_millis(200));
        let (beside, alone) = (pacer.beside(layers, row).seconds, pacer.alone(layers, row).seconds);
        assert!(
            beside <= alone && (0.39..0.41).contains(&(beside * layers as f64)),
            "{beside} of {alone} s a layer"
        );
        pacer.record_layer(Need::Prefill, Work::new(100, 0), Duration::from_millis(10));
        assert!(pacer.may_prefill(Some(Work::new(100, 0))), "several layers between two steps");
    }

    #[test]
    fn a_pass_without_decoding_is_short_but_not_of_too_few_rows() {
        let mut pacer = PrefillPacer::default();
        assert_eq!(pacer.alone(28, 0.0).rows, usize::MAX, "nothing was measured");
        pacer.record_layer(Need::Prefill, Work::new(512, 0), Duration::from_millis(120));
        let took = 28.0 * pacer.alone(28, pacer.layer_seconds(Work::new(1, 0))).seconds;
        assert!((0.38..0.41).contains(&took), "{took} s");
        // The time of this layer does not depend on its rows.
        let (mut slow, mut rows) = (PrefillPacer::default(), 512);
        for _ in 0..100 {
            slow.record_layer(Need::Prefill, Work::new(rows, 0), Duration::from_millis(50));
            let row = slow.layer_seconds(Work::new(1, 0));
            rows = (slow.alone(28, row).seconds / row) as usize;
        }
        assert_eq!(rows, WORTH_READING as usize);
    }
}
