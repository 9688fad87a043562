//! Chooses the length of drafts from the cost of passes and the acceptance rate.

use std::time::Duration;

use crate::decode::speculation::costs::{PassCosts, RecentTimes};

/// Judged draft tokens that the share of accepted ones is made of.
const REMEMBERED_TOKENS: f64 = 32.0;

/// The gain in tokens per second that a draft has to promise: its gain is an estimate, its cost is certain.
const LEAST_GAIN: f64 = 1.05;

/// The gain that drafts have to be able to bring if all were accepted, to be tried again after they were refused.
const LEAST_POSSIBLE_GAIN: f64 = 1.25;

/// The most drafts that are skipped between two trials.
const LONGEST_WAIT: u32 = 64;

/// How many drafts of one drafter were accepted, and how long they took to propose.
#[derive(Debug, Clone, Default)]
pub(super) struct Acceptance {
    /// Seconds for a draft token.
    proposing: RecentTimes,
    /// Drafts that were proposed.
    drafts: u64,
    /// By the grade of the draft.
    grades: Vec<Grade>,
}

/// The outcome of drafts of which the drafter was equally sure.
#[derive(Debug, Clone)]
struct Grade {
    /// The share of judged draft tokens that were accepted.
    acceptance: f64,
    /// Judged draft tokens that the share is made of, and the first guess.
    remembered: f64,
    /// Drafts to skip after a trial that failed.
    wait: u32,
    waited: u32,
    /// For each further branch, the share of judged drafts in which it had a token that the branches before it had not,
    /// verified or not.
    elsewhere: Vec<f64>,
}

impl Default for Grade {
    fn default() -> Self {
        Self { acceptance: 0.5, remembered: 1.0, wait: 1, waited: 0, elsewhere: Vec::new() }
    }
}

/// A sequence that may draft tokens for the next pass.
#[derive(Debug)]
pub(super) struct Candidate<'a> {
    pub acceptance: &'a mut Acceptance,
    pub grade: usize,
    /// The most tokens it may draft.
    pub most: usize,
}

/// Chooses how many tokens each candidate drafts for a pass that `sequences` share, so that most tokens come per second.
/// `rows` go through it without these drafts, and `room` more may. Nothing is drafted before a pass of all sequences without
/// drafts was measured, as drafts have to be faster than that.
pub(super) fn draft_lengths(
    costs: &PassCosts,
    sequences: usize,
    rows: usize,
    room: usize,
    candidates: &mut [Candidate<'_>],
) -> Vec<usize> {
    if costs.measured(sequences).is_none() {
        return vec![0; candidates.len()];
    }
    let plain = rows as f64 / costs.seconds(rows);
    let promises = |candidate: &mut Candidate<'_>| {
        let acceptance = candidate.acceptance.grade(candidate.grade).acceptance;
        Promise { acceptance, most: candidate.most, seconds: candidate.acceptance.token_seconds() }
    };
    let promises: Vec<Promise> = candidates.iter_mut().map(promises).collect();
    let mut lengths = fastest(costs, rows, room, &promises, LEAST_GAIN * plain);
    let mut left = room - lengths.iter().sum::<usize>();
    for ((candidate, promise), length) in candidates.iter_mut().zip(promises).zip(&mut lengths) {
        let grade = candidate.acceptance.grade(candidate.grade);
        if *length > 0 {
            grade.waited = 0;
            continue;
        }
        grade.waited += 1;
        if grade.waited <= grade.wait || left == 0 {
            continue;
        }
        let certain = Promise { acceptance: 1.0, ..promise };
        let possible = fastest(costs, rows, room, &[certain], LEAST_POSSIBLE_GAIN * plain);
        if possible[0] > 0 {
            (*length, left) = (1, left - 1);
        }
    }
    lengths
}

/// The expected gain of drafts of one sequence.
#[derive(Debug, Clone, Copy)]
struct Promise {
    /// The probability that a token is accepted, if those before it were.
    acceptance: f64,
    most: usize,
    /// Seconds to propose a token.
    seconds: f64,
}

/// Returns the draft lengths with the most tokens per second, if these are more than `speed`; otherwise zeros.
fn fastest(costs: &PassCosts, rows: usize, room: usize, promises: &[Promise], speed: f64) -> Vec<usize> {
    let mut lengths = vec![0; promises.len()];
    let (mut best, mut fastest) = (lengths.clone(), speed);
    let (mut tokens, mut proposing) = (rows as f64, 0.0);
    // The next token of each draft, and the probability that it is accepted.
    let mut gains: Vec<f64> = promises.iter().map(|promise| promise.acceptance).collect();
    for drafted in 1..=room {
        let open = (0..promises.len()).filter(|&at| lengths[at] < promises[at].most);
        let Some(next) = open.max_by(|&a, &b| gains[a].total_cmp(&gains[b])) else { break };
        lengths[next] += 1;
        tokens += gains[next];
        gains[next] *= promises[next].acceptance;
        proposing += promises[next].seconds;
        let speed = tokens / (costs.seconds(rows + drafted) + proposing);
        if speed > fastest {
            (fastest, best) = (speed, lengths.clone());
        }
    }
    best
}

impl Acceptance {
    fn grade(&mut self, grade: usize) -> &mut Grade {
        if self.grades.len() <= grade {
            self.grades.resize_with(grade + 1, Grade::default);
        }
        &mut self.grades[grade]
    }

    fn token_seconds(&self) -> f64 {
        self.proposing.seconds().unwrap_or_default()
    }

    /// Returns how many of the first branches of a draft to verify, from their lengths.
    pub fn branches(&mut self, costs: &PassCosts, grade: usize, lengths: &[usize]) -> usize {
        let Some((&first, others)) = lengths.split_first() else { return 0 };
        let Grade { acceptance, elsewhere, .. } = self.grade(grade).clone();
        let tokens_from = |at: usize, to: usize| (at..=to).map(|at| acceptance.powi(at as i32)).sum::<f64>();
        let (mut tokens, mut rows) = (tokens_from(0, first), 1 + first);
        let (mut count, mut fastest) = (1, tokens / costs.seconds(rows));
        for (other, length) in others.iter().enumerate() {
            // Where a branch is right at all, it is as right as others are behind its first token.
            tokens += elsewhere.get(other).copied().unwrap_or_default() * tokens_from(0, length - 1);
            rows += 1 + length;
            let speed = tokens / costs.seconds(rows);
            if speed > LEAST_GAIN * fastest {
                (count, fastest) = (2 + other, speed);
            }
        }
        count
    }

    /// Records how long a draft of `tokens` took to propose. The first is not counted: a draft model reads the whole prompt
    /// for it.
    pub fn drafted(&mut self, tokens: usize, took: Duration) {
        if tokens == 0 {
            return;
        }
        if self.drafts > 0 {
            self.proposing.push(self.drafts, took.as_secs_f64() / tokens as f64);
        }
        self.drafts += 1;
    }

    /// Records how many tokens of a draft were accepted.
    pub fn judged(&mut self, grade: usize, drafted: usize, accepted: usize) {
        if drafted == 0 {
            return;
        }
        let grade = self.grade(grade);
        for at in 0..drafted.min(accepted + 1) {
            let outcome = f64::from(u8::from(at < accepted));
            grade.remembered = REMEMBERED_TOKENS.min(grade.remembered + 1.0);
            grade.acceptance += (outcome - grade.acceptance) / grade.remembered;
        }
        grade.wait = if accepted > 0 { 0 } else { (2 * grade.wait).clamp(1, LONGEST_WAIT) };
        grade.waited = 0;
    }

    /// Records how many tokens each further branch had guessed that the branches before it had not.
    pub fn chosen(&mut self, grade: usize, gains: &[usize]) {
        let grade = self.grade(grade);
        if grade.elsewhere.len() < gains.len() {
            grade.elsewhere.resize(gains.len(), 0.0);
        }
        let remembered = grade.remembered;
        for (at, share) in grade.elsewhere.iter_mut().enumerate() {
            // A branch that was not there would have brought nothing.
            let outcome = f64::from(u8::from(gains.get(at).is_some_and(|gain| *gain > 0)));
            *share += (outcome - *share) / remembered;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pace of one sequence.
    #[derive(Default)]
    struct Pace {
        costs: PassCosts,
        acceptance: Acceptance,
    }

    impl Pace {
        fn draft_length(&mut self, grade: usize, most: usize) -> usize {
            let candidate = Candidate { acceptance: &mut self.acceptance, grade, most };
            draft_lengths(&self.costs, 1, 1, most, &mut [candidate])[0]
        }
    }

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
            pace.acceptance.drafted(drafted, Duration::from_micros(3));
            pace.costs.record(1 + drafted, Duration::from_secs_f64(took * noise));
            let accepted = (0..drafted).take_while(|_| uniform() < acceptance).count();
            pace.acceptance.judged(0, drafted, accepted);
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
                pace.costs.record(rows, Duration::from_secs_f64(cost(rows)));
            }
            for draft in 0..40 {
                // The second branch is right where the first is not, and the third never.
                let second = draft % 10 < share;
                pace.acceptance.judged(0, 2, if second { 0 } else { 2 });
                pace.acceptance.chosen(0, &[usize::from(second), 0]);
            }
            pace.acceptance.branches(&pace.costs, 0, &[2, 2, 2])
        };
        assert_eq!(verified(cpu, 0), 1);
        assert_eq!(verified(cpu, 5), 1);
        assert_eq!(verified(|rows| 0.01 + 0.0002 * rows as f64, 5), 2);
        assert_eq!(verified(|rows| 0.01 + 0.0002 * rows as f64, 1), 1);
    }

    #[test]
    fn the_cost_of_drafts_counts_but_for_the_first() {
        let drafting = |token: f64, first: f64| {
            let mut pace = Pace::default();
            let mut drafted = 0;
            for pass in 0..200 {
                let length = pace.draft_length(0, 8);
                let seconds = token * length as f64 + if pass < 2 { first } else { 0.0 };
                pace.acceptance.drafted(length, Duration::from_secs_f64(seconds));
                pace.costs.record(1 + length, Duration::from_secs_f64(cpu(1 + length)));
                pace.acceptance.judged(0, length, length);
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

    /// The draft lengths of sequences of a batch, of whose drafts these shares were accepted, where passes take `cost`.
    fn lengths(cost: impl Fn(usize) -> f64, accepted: &[f64], room: usize) -> Vec<usize> {
        let mut costs = PassCosts::default();
        for rows in 1..=64 {
            costs.record(rows, Duration::from_secs_f64(cost(rows)));
        }
        let mut drafters: Vec<Acceptance> = vec![Acceptance::default(); accepted.len()];
        for (drafter, share) in drafters.iter_mut().zip(accepted) {
            (0..50).for_each(|at| drafter.judged(0, 1, usize::from(f64::from(at % 10) < share * 10.0)));
        }
        let sequences = accepted.len();
        let candidate = |acceptance| Candidate { acceptance, grade: 0, most: 8 };
        let mut candidates: Vec<Candidate<'_>> = drafters.iter_mut().map(candidate).collect();
        draft_lengths(&costs, sequences, sequences, room, &mut candidates)
    }

    #[test]
    fn a_batch_drafts_for_the_sequences_whose_drafts_are_accepted() {
        let cheap = |rows: usize| 0.01 + 0.0005 * rows as f64;
        let found = lengths(cheap, &[1.0, 0.0, 1.0, 0.0], 64);
        assert!(found[0] > 4 && found[2] > 4 && found[1] <= 1 && found[3] <= 1, "{found:?}");
        let found = lengths(cheap, &[1.0; 4], 5);
        assert_eq!(found.iter().sum::<usize>(), 5, "{found:?}");
    }

    #[test]
    fn a_batch_whose_rows_cost_as_much_as_passes_drafts_nothing() {
        assert_eq!(lengths(|rows| 0.01 * rows as f64, &[1.0, 1.0, 0.5], 64), [0, 0, 0]);
    }
}
