//! Measurement of how many rows of a prompt fit between two steps of the answers beside it.

use std::iter::Sum;
use std::time::Duration;

use crate::engine::portions::Room;
use crate::engine::sequence::Need;

/// Rows of a prompt that go through a layer together beside answers, before anything was measured.
const FIRST_ROWS: usize = 16;
/// What the newest measurement counts for.
const NEWEST: f64 = 0.3;
/// Of the time between two steps of answers, what a layer of a prompt takes.
const SHARE: f64 = 0.5;
/// The same where that would be few rows: the deeper in a prompt, the more of a layer is reading the keys of all that came
/// before, however few rows they are read for.
const LARGEST_SHARE: f64 = 0.65;
/// Seconds that a pass of prompts takes where nobody waits for the next token, about: who comes meanwhile waits for its end,
/// and other models for that of a layer. Longer ones are hardly faster, row by row.
const PASS: f64 = 0.4;
/// Rows that are worth reading weights and keys for, however long they take.
const WORTH_READING: f64 = 32.0;
/// Positions to attend to that are taken to cost as much as the weights of a layer, until it was measured.
const POSITIONS: f64 = 4096.0;

/// How long a prompt may go on between two steps of answers: as long as a step takes.
#[derive(Debug, Default)]
pub(crate) struct Rhythm {
    /// What a step of the answers takes.
    step: Option<f64>,
    /// What a layer takes.
    layer: Option<Seconds>,
    /// How long prompts went on since the last step.
    fed: f64,
}

/// What there is to do for rows of prompts in a layer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Work {
    rows: f64,
    /// Positions that all rows attend to, by [`POSITIONS`].
    attended: f64,
}

impl Work {
    /// For so many tokens behind so many others.
    pub fn of(tokens: usize, before: usize) -> Self {
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

/// What a layer takes for a unit of each kind of work.
#[derive(Debug, Clone, Copy, Default)]
struct Seconds {
    row: f64,
    attended: f64,
}

impl Seconds {
    fn of(self, work: Work) -> f64 {
        self.row * work.rows + self.attended * work.attended
    }

    /// Moves a part of the way to what was measured, and no further in any direction than that takes: rows that attend to
    /// little say something of rows, those that attend to much of attending.
    fn blend(&mut self, work: Work, took: f64, part: f64) {
        let length = work.rows * work.rows + work.attended * work.attended;
        if length > 0.0 {
            let off = part * (took - self.of(work)) / length;
            self.row = (self.row + off * work.rows).max(0.0);
            self.attended = (self.attended + off * work.attended).max(0.0);
        }
    }
}

impl Rhythm {
    /// A layer has been run.
    pub fn layer(&mut self, need: Need, work: Work, took: Duration) {
        if need == Need::Feed {
            let took = took.as_secs_f64();
            self.fed += took;
            let part = if self.layer.is_some() { NEWEST } else { 1.0 };
            self.layer.get_or_insert_default().blend(work, took, part);
        }
    }

    /// A pass has come to its end.
    pub fn pass(&mut self, need: Need, took: Duration) {
        if need == Need::Step {
            self.fed = 0.0;
            let took = took.as_secs_f64();
            self.step = Some(self.step.map_or(took, |step| step + NEWEST * (took - step)));
        }
    }

    /// Whether a layer of prompts comes before the next step; of a pass not begun, where nothing is said. One always does,
    /// so that prompts go on whatever they take.
    pub fn may_feed(&self, work: Option<Work>) -> bool {
        let Some(step) = self.step else { return false };
        let layer = work.map_or(SHARE * step, |work| self.takes(work));
        self.fed == 0.0 || self.fed + layer <= step
    }

    /// Seconds that a layer takes; none, as long as nothing was measured.
    pub fn takes(&self, work: Work) -> f64 {
        self.layer.unwrap_or_default().of(work)
    }

    /// How much of a prompt goes through so many layers together where there is nothing beside it. A layer takes so long for a
    /// row of it.
    pub fn alone(&self, layers: usize, row: f64) -> Room {
        match self.layer {
            Some(_) => Room::seconds((PASS / layers.max(1) as f64).max(WORTH_READING * row)),
            None => Room::ALL,
        }
    }

    /// How much of prompts goes through the layers together beside answers, or beside each other.
    pub fn beside(&self, row: f64) -> Room {
        match (self.step, self.layer) {
            (Some(step), Some(_)) => {
                Room::seconds((step * SHARE).max((step * LARGEST_SHARE).min(WORTH_READING * row)))
            }
            _ => Room { rows: FIRST_ROWS, ..Room::ALL },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rhythm beside steps of 20 ms whose layers take so many milliseconds, for each row, and for each 4096 positions that a row
    /// attends to; what it gives to a prompt behind so many tokens once it has found its pace, in rows and milliseconds.
    fn beside(took: [f64; 3], before: usize) -> (Rhythm, usize, f64) {
        let mut rhythm = Rhythm::default();
        rhythm.pass(Need::Step, Duration::from_millis(20));
        let (mut rows, mut ms) = (FIRST_ROWS, 0.0);
        for _ in 0..200 {
            let work = Work::of(rows, before);
            ms = took[0] + took[1] * work.rows + took[2] * work.attended;
            rhythm.layer(Need::Feed, work, Duration::from_secs_f64(ms / 1e3));
            let row = rhythm.takes(Work::of(1, before));
            rows = ((rhythm.beside(row).seconds / row) as usize).max(1);
        }
        (rhythm, rows, ms)
    }

    #[test]
    fn few_rows_of_a_prompt_take_more_of_the_time_between_steps() {
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

    #[test]
    fn a_question_beside_a_book_says_nothing_wrong_of_the_book() {
        let took = [0.5, 0.1, 0.15];
        let mut rhythm = beside(took, 100).0;
        // The book goes on, now and then beside a question. What rows cost and what attending does is known some questions later.
        let mut before = 100;
        for pass in 0..400 {
            let question = (pass % 7 == 0).then(|| Work::of(16, 30));
            let work: Work = [Work::of(10, before)].into_iter().chain(question).sum();
            before += 50;
            let ms = took[0] + took[1] * work.rows + took[2] * work.attended;
            if pass > 120 {
                let foretold = rhythm.takes(work) * 1e3;
                assert!((foretold / ms - 1.0).abs() < 0.1, "{foretold} instead of {ms} ms in pass {pass}");
            }
            for _ in 0..28 {
                rhythm.layer(Need::Feed, work, Duration::from_secs_f64(ms / 1e3));
            }
        }
    }

    #[test]
    fn a_pass_of_prompts_alone_is_short_unless_that_is_no_use() {
        let mut rhythm = Rhythm::default();
        assert_eq!(rhythm.alone(28, 0.0).rows, usize::MAX, "nothing was measured");
        rhythm.layer(Need::Feed, Work::of(512, 0), Duration::from_millis(120));
        let took = 28.0 * rhythm.alone(28, rhythm.takes(Work::of(1, 0))).seconds;
        assert!((0.38..0.41).contains(&took), "{took} s");
        // A layer that takes as long whatever goes through it.
        let (mut slow, mut rows) = (Rhythm::default(), 512);
        for _ in 0..100 {
            slow.layer(Need::Feed, Work::of(rows, 0), Duration::from_millis(50));
            let row = slow.takes(Work::of(1, 0));
            rows = (slow.alone(28, row).seconds / row) as usize;
        }
        assert_eq!(rows, WORTH_READING as usize);
    }
}
