//! How long drafts should be, from what passes cost and how many draft tokens are accepted.

use std::collections::VecDeque;
use std::time::Duration;

/// How many judged draft tokens are remembered.
const REMEMBERED: f64 = 32.0;

/// What a row adds to a pass of one, until it was measured: less than it does on most devices, so that it is tried.
const HOPED_ROW: f64 = 0.1;

/// How many passes of each number of rows are remembered.
const MEASUREMENTS: usize = 8;

/// For so many passes. What was not measured since may be out of date, or was unlucky, and is hoped for anew.
const LASTING: u64 = 512;

/// A draft has to promise this much more than none: what it promises is an estimate, what it costs is certain.
const WORTH: f64 = 1.05;

/// Drafts that are mostly refused are tried again only where they could bring this much.
const POSSIBLE: f64 = 1.25;

/// Drafts passed over between two that try whether drafts are accepted again, at most.
const LONGEST_WAIT: u32 = 64;

/// Decides how long drafts are, by what passes of so many rows were seen to cost and by how many draft tokens were
/// accepted lately.
#[derive(Debug, Clone, Default)]
pub(super) struct Pace {
    /// By the number of rows.
    passes: Vec<Passes>,
    /// All there were.
    count: u64,
    /// What draft tokens took to propose.
    proposing: Passes,
    /// How many drafts there were.
    drafts: u64,
    /// By how sure the drafter was.
    grades: Vec<Grade>,
}

/// The last passes of some kind.
#[derive(Debug, Clone, Default)]
struct Passes {
    /// Which of all passes each was, and its seconds.
    last: VecDeque<(u64, f64)>,
    seconds: Option<f64>,
}

impl Passes {
    fn push(&mut self, at: u64, seconds: f64) {
        self.last.push_back((at, seconds));
        if self.last.len() > MEASUREMENTS {
            self.last.pop_front();
        }
        self.estimate();
    }

    fn forget(&mut self, before: u64) {
        let known = self.last.len();
        while self.last.front().is_some_and(|&(at, _)| at < before) {
            self.last.pop_front();
        }
        if self.last.len() < known {
            self.estimate();
        }
    }

    /// Whatever else the machine does makes passes slower and never faster, so this is what the quicker ones took.
    fn estimate(&mut self) {
        let mut seconds: Vec<f64> = self.last.iter().map(|&(_, seconds)| seconds).collect();
        seconds.sort_unstable_by(f64::total_cmp);
        self.seconds = seconds.get(seconds.len() / 3).copied();
    }
}

/// What became of drafts that the drafter was equally sure of.
#[derive(Debug, Clone)]
struct Grade {
    /// The share of judged draft tokens that were accepted.
    acceptance: f64,
    /// How many of them that share is made of, the guess it began as included.
    remembered: f64,
    /// How many drafts to pass over after a trial that failed.
    wait: u32,
    waited: u32,
    /// The shares of judged drafts in which each further branch had what the ones before it had not, verified or not.
    elsewhere: Vec<f64>,
}

impl Default for Grade {
    fn default() -> Self {
        Self { acceptance: 0.5, remembered: 1.0, wait: 1, waited: 0, elsewhere: Vec::new() }
    }
}

impl Pace {
    /// How many tokens to draft for the next pass, `most` at most, by a drafter that is this sure.
    pub fn draft_length(&mut self, grade: usize, most: usize) -> usize {
        // Whether drafts are worth it is a comparison with passes of one row.
        if most == 0 || self.measured(1).is_none() {
            return 0;
        }
        let plain = self.speed(0, 1.0);
        let acceptance = self.grade(grade).acceptance;
        let length = self.fastest(most, acceptance, WORTH * plain);
        let could_help = length.is_some() || self.fastest(most, 1.0, POSSIBLE * plain).is_some();
        let grade = self.grade(grade);
        if let Some(length) = length {
            grade.waited = 0;
            return length;
        }
        grade.waited += 1;
        usize::from(grade.waited > grade.wait && could_help)
    }

    /// How many of the first branches of a draft to verify, from their lengths.
    pub fn branches(&mut self, grade: usize, lengths: &[usize]) -> usize {
        let Some((&first, others)) = lengths.split_first() else { return 0 };
        let Grade { acceptance, elsewhere, .. } = self.grade(grade).clone();
        let tokens_from = |at: usize, to: usize| (at..=to).map(|at| acceptance.powi(at as i32)).sum::<f64>();
        let (mut tokens, mut rows) = (tokens_from(0, first), 1 + first);
        let (mut count, mut fastest) = (1, tokens / self.seconds(rows));
        for (other, length) in others.iter().enumerate() {
            // Where a branch is right at all, it is as right as others are behind its first token.
            tokens += elsewhere.get(other).copied().unwrap_or_default() * tokens_from(0, length - 1);
            rows += 1 + length;
            let speed = tokens / self.seconds(rows);
            if speed > WORTH * fastest {
                (count, fastest) = (2 + other, speed);
            }
        }
        count
    }

    fn grade(&mut self, grade: usize) -> &mut Grade {
        if self.grades.len() <= grade {
            self.grades.resize_with(grade + 1, Grade::default);
        }
        &mut self.grades[grade]
    }

    /// The draft length with the most tokens per second, if these are more than `worth`.
    fn fastest(&self, most: usize, acceptance: f64, worth: f64) -> Option<usize> {
        let speeds = (1..=most).map(|drafted| (drafted, self.speed(drafted, acceptance)));
        let (length, speed) = speeds.max_by(|a, b| a.1.total_cmp(&b.1))?;
        (speed > worth).then_some(length)
    }

    /// What a draft took to propose. The first is not counted: a draft model reads the whole prompt for it.
    pub fn drafted(&mut self, tokens: usize, took: Duration) {
        if tokens == 0 {
            return;
        }
        if self.drafts > 0 {
            self.proposing.push(self.drafts, took.as_secs_f64() / tokens as f64);
        }
        self.drafts += 1;
    }

    /// How long a pass of some rows took.
    pub fn passed(&mut self, rows: usize, took: Duration) {
        if self.passes.len() <= rows {
            self.passes.resize_with(rows + 1, Passes::default);
        }
        self.count += 1;
        self.passes[rows].push(self.count, took.as_secs_f64());
        for passes in &mut self.passes {
            passes.forget(self.count.saturating_sub(LASTING));
        }
    }

    /// How much of a draft was accepted.
    pub fn judged(&mut self, grade: usize, drafted: usize, accepted: usize) {
        if drafted == 0 {
            return;
        }
        let grade = self.grade(grade);
        for at in 0..drafted.min(accepted + 1) {
            let outcome = f64::from(u8::from(at < accepted));
            grade.remembered = REMEMBERED.min(grade.remembered + 1.0);
            grade.acceptance += (outcome - grade.acceptance) / grade.remembered;
        }
        grade.wait = if accepted > 0 { 0 } else { (2 * grade.wait).clamp(1, LONGEST_WAIT) };
        grade.waited = 0;
    }

    /// How many tokens each further branch had guessed that the ones before it had not.
    pub fn chosen(&mut self, grade: usize, gains: &[usize]) {
        let grade = self.grade(grade);
        if grade.elsewhere.len() < gains.len() {
            grade.elsewhere.resize(gains.len(), 0.0);
        }
        let remembered = grade.remembered;
        for (at, share) in grade.elsewhere.iter_mut().enumerate() {
            // One that was not there would have brought nothing.
            let outcome = f64::from(u8::from(gains.get(at).is_some_and(|gain| *gain > 0)));
            *share += (outcome - *share) / remembered;
        }
    }

    /// Tokens per second with drafts of this length.
    fn speed(&self, drafted: usize, acceptance: f64) -> f64 {
        let tokens: f64 = (0..=drafted).map(|at| acceptance.powi(at as i32)).sum();
        tokens / (self.seconds(1 + drafted) + drafted as f64 * self.proposing.seconds.unwrap_or_default())
    }

    /// What a pass of some rows probably takes: at most what more rows took, and where it was never measured as much more
    /// than fewer as these took more than one.
    fn seconds(&self, rows: usize) -> f64 {
        let of_more =
            (rows..self.passes.len()).filter_map(|rows| self.measured(rows)).fold(f64::MAX, f64::min);
        if self.measured(rows).is_some() {
            return of_more;
        }
        let single = self.measured(1).unwrap_or_default();
        let of_fewer = (1..rows).rev().find_map(|fewer| {
            let seconds = self.measured(fewer)?;
            let row = if fewer == 1 { 0.0 } else { (seconds - single) / (fewer - 1) as f64 };
            Some(seconds + (rows - fewer) as f64 * row.max(HOPED_ROW * single))
        });
        of_fewer.unwrap_or_default().min(of_more)
    }

    fn measured(&self, rows: usize) -> Option<f64> {
        self.passes.get(rows)?.seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a while on a machine where a pass of some rows takes `cost`, and a text whose draft tokens are accepted with
    /// probability `acceptance`. Returns the speed, as a multiple of the plain one.
    fn ratio(pace: &mut Pace, cost: impl Fn(usize) -> f64, acceptance: f64, passes: usize) -> f64 {
        let mut random = 12345u64;
        let mut uniform = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as f64 / (1u64 << 31) as f64
        };
        let (mut seconds, mut tokens) = (0.0, 0);
        for _ in 0..passes {
            let drafted = pace.draft_length(0, 8);
            let noise = if uniform() < 0.02 { 5.0 } else { 0.97 + 0.06 * uniform() };
            let took = cost(1 + drafted);
            pace.drafted(drafted, Duration::from_micros(3));
            pace.passed(1 + drafted, Duration::from_secs_f64(took * noise));
            let accepted = (0..drafted).take_while(|_| uniform() < acceptance).count();
            pace.judged(0, drafted, accepted);
            seconds += took;
            tokens += 1 + accepted;
        }
        tokens as f64 * cost(1) / seconds
    }

    /// As measured for q4 on two cores.
    fn cpu(rows: usize) -> f64 {
        0.012 * [1.0, 1.25, 1.4, 1.6, 1.95, 2.3, 2.7, 3.05, 3.4][rows - 1]
    }

    #[test]
    fn repetition_is_used() {
        // The best there is are 2.48 and 1.58.
        assert!(ratio(&mut Pace::default(), cpu, 0.98, 400) > 2.35);
        assert!(ratio(&mut Pace::default(), cpu, 0.7, 400) > 1.45);
        // A device on which rows cost nothing drafts as much as it may.
        assert!(ratio(&mut Pace::default(), |_| 0.01, 0.95, 400) > 6.0);
    }

    #[test]
    fn bad_drafts_cost_next_to_nothing() {
        assert!(ratio(&mut Pace::default(), cpu, 0.0, 400) > 0.97);
        assert!(ratio(&mut Pace::default(), cpu, 0.1, 2000) > 0.96);
        assert!(ratio(&mut Pace::default(), cpu, 0.25, 2000) > 0.96);
        // Where every row costs a pass, nothing helps.
        assert!(ratio(&mut Pace::default(), |rows| 0.01 * rows as f64, 0.5, 2000) > 0.97);
    }

    #[test]
    fn drafts_to_be_sure_of_are_used_whatever_becomes_of_others() {
        let mut pace = Pace::default();
        ratio(&mut pace, cpu, 0.0, 1000);
        assert_eq!(pace.draft_length(0, 8), 0);
        assert!(pace.draft_length(1, 8) > 0);
    }

    #[test]
    fn branches_are_verified_where_they_are_worth_their_rows() {
        let verified = |cost: fn(usize) -> f64, share: usize| {
            let mut pace = Pace::default();
            for rows in 1..=9 {
                pace.passed(rows, Duration::from_secs_f64(cost(rows)));
            }
            for draft in 0..40 {
                // The second branch is right where the first is not, and the third never.
                let second = draft % 10 < share;
                pace.judged(0, 2, if second { 0 } else { 2 });
                pace.chosen(0, &[usize::from(second), 0]);
            }
            pace.branches(0, &[2, 2, 2])
        };
        assert_eq!(verified(cpu, 0), 1);
        assert_eq!(verified(cpu, 5), 1);
        assert_eq!(verified(|rows| 0.01 + 0.0002 * rows as f64, 5), 2);
        assert_eq!(verified(|rows| 0.01 + 0.0002 * rows as f64, 1), 1);
    }

    #[test]
    fn what_drafts_cost_counts_and_what_the_first_costs_does_not() {
        let drafting = |token: f64, first: f64| {
            let mut pace = Pace::default();
            let mut drafted = 0;
            for pass in 0..200 {
                let length = pace.draft_length(0, 8);
                let seconds = token * length as f64 + if pass < 2 { first } else { 0.0 };
                pace.drafted(length, Duration::from_secs_f64(seconds));
                pace.passed(1 + length, Duration::from_secs_f64(cpu(1 + length)));
                pace.judged(0, length, length);
                drafted += if pass < 100 { 0 } else { length };
            }
            drafted
        };
        assert!(drafting(0.001, 2.0) > 300);
        assert!(drafting(0.02, 0.02) < 10);
    }

    #[test]
    fn it_notices_that_a_text_has_changed() {
        let mut pace = Pace::default();
        ratio(&mut pace, cpu, 0.0, 1000);
        let recovering = ratio(&mut pace, cpu, 0.98, 200);
        assert!(recovering > 1.9, "{recovering}");
        let again = ratio(&mut pace, cpu, 0.0, 300);
        assert!(again > 0.9, "{again}");
    }
}
