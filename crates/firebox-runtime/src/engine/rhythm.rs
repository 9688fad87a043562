use std::time::Duration;

use crate::engine::sequence::Need;

/// Rows of a prompt that go through a layer together beside answers, before anything was measured.
const FIRST_ROWS: usize = 16;
/// What the newest measurement counts for.
const NEWEST: f64 = 0.3;
/// Layers of a prompt that fit between two steps of answers, at least.
const LAYERS: f64 = 2.0;
/// Seconds that a pass of prompts takes where nobody waits for the next token, about: who comes meanwhile waits for its end,
/// and other models for that of a layer. Longer ones are hardly faster, row by row.
const PASS: f64 = 0.4;
/// Rows that are worth reading a model's weights for, however long they take.
const WORTH_READING: usize = 32;

/// How long a prompt may go on between two steps of answers: as long as a step takes.
#[derive(Debug, Default)]
pub(crate) struct Rhythm {
    /// What a step of the answers takes.
    step: Option<f64>,
    /// What a layer takes for each row of a prompt.
    row: Option<f64>,
    /// How long prompts went on since the last step.
    fed: f64,
}

impl Rhythm {
    /// A layer has been run.
    pub fn layer(&mut self, need: Need, rows: usize, took: Duration) {
        if need == Need::Feed {
            self.fed += took.as_secs_f64();
            blend(&mut self.row, took.as_secs_f64() / rows.max(1) as f64);
        }
    }

    /// A pass has come to its end.
    pub fn pass(&mut self, need: Need, took: Duration) {
        if need == Need::Step {
            self.fed = 0.0;
            blend(&mut self.step, took.as_secs_f64());
        }
    }

    /// Whether a layer of so many rows of a prompt comes before the next step; of one not begun, where none is said. One
    /// always does, so that prompts go on whatever they take.
    pub fn may_feed(&self, rows: Option<usize>) -> bool {
        let Some(step) = self.step else { return false };
        let layer = self.row.unwrap_or(0.0) * rows.unwrap_or_else(|| self.rows()) as f64;
        self.fed == 0.0 || self.fed + layer <= step
    }

    /// How many rows of prompts go through so many layers together where there are no answers beside them.
    pub fn rows_alone(&self, layers: usize) -> usize {
        match self.row {
            Some(row) if row > 0.0 => ((PASS / layers.max(1) as f64 / row) as usize).max(WORTH_READING),
            _ => usize::MAX,
        }
    }

    /// How many rows of a prompt go through the layers together beside answers.
    pub fn rows(&self) -> usize {
        match (self.step, self.row) {
            (Some(step), Some(row)) if row > 0.0 => ((step / LAYERS / row) as usize).max(1),
            _ => FIRST_ROWS,
        }
    }
}

fn blend(mean: &mut Option<f64>, newest: f64) {
    *mean = Some(mean.map_or(newest, |mean| mean + NEWEST * (newest - mean)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_of_prompts_alone_is_short_unless_that_is_no_use() {
        let mut rhythm = Rhythm::default();
        assert_eq!(rhythm.rows_alone(28), usize::MAX, "nothing was measured");
        rhythm.layer(Need::Feed, 512, Duration::from_millis(120));
        let rows = rhythm.rows_alone(28);
        let took = rows as f64 * 28.0 * 0.12 / 512.0;
        assert!((0.38..0.41).contains(&took), "{rows} rows take {took} s");
        // A layer that takes as long whatever goes through it.
        let mut slow = Rhythm::default();
        slow.layer(Need::Feed, 512, Duration::from_millis(50));
        for _ in 0..100 {
            slow.layer(Need::Feed, slow.rows_alone(28), Duration::from_millis(50));
        }
        assert_eq!(slow.rows_alone(28), WORTH_READING);
    }
}
