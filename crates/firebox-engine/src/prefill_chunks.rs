//! Splits the prefill budget of a pass among several prompts.

use std::cmp::Reverse;

use firebox_schedule::Priority;

use crate::recent_rows::Standing;

/// A prompt, or the rest of one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prompt {
    pub priority: Priority,
    pub tokens: usize,
    /// Seconds that a layer takes per token.
    pub row: f64,
    /// Where its client stands.
    pub standing: Standing,
}

/// Bounds of a prefill pass: rows that go through a layer together, and the seconds that they take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefillBudget {
    pub rows: usize,
    pub seconds: f64,
}

impl PrefillBudget {
    /// No limit.
    pub const ALL: Self = Self { rows: usize::MAX, seconds: f64::INFINITY };

    /// A limit on the time that a layer takes.
    pub fn seconds(seconds: f64) -> Self {
        Self { seconds, ..Self::ALL }
    }

    /// Limits the number of rows.
    pub fn at_most(self, rows: usize) -> Self {
        Self { rows: self.rows.min(rows), ..self }
    }

    fn half(self) -> Self {
        Self { rows: self.rows / 2, seconds: self.seconds / 2.0 }
    }

    /// Returns how many rows of a prompt fit.
    pub fn rows_of(self, prompt: &Prompt) -> usize {
        self.rows.min((self.seconds / prompt.row) as usize)
    }

    /// Returns what is left after some rows of a prompt.
    fn after(self, rows: usize, prompt: &Prompt) -> Self {
        let seconds = (self.seconds - rows as f64 * prompt.row).max(0.0);
        Self { rows: self.rows.saturating_sub(rows), seconds }
    }
}

/// Returns how many tokens of each prompt go through the layers together. Prompts are in order of arrival.
///
/// Higher priorities come first, and within a priority clients that have had less lately. Of the first client, the oldest prompt
/// gets half, so that it makes progress whatever arrives, and the other half goes to the prompts with the fewest tokens left: a
/// short prompt does not wait for a long one.
/// However small the budget, the oldest prompt gets one token and another prompt one.
pub(crate) fn prefill_chunks(budget: PrefillBudget, prompts: &[Prompt]) -> Vec<usize> {
    let mut chunks = vec![0; prompts.len()];
    let by_turn = |&one: &usize, &other: &usize| {
        let [one, other] = [one, other].map(|at| &prompts[at]);
        Reverse(one.priority)
            .cmp(&Reverse(other.priority))
            .then(one.standing.recent.total_cmp(&other.standing.recent))
    };
    let Some(first) = (0..prompts.len()).min_by(by_turn) else { return chunks };
    chunks[first] = budget.half().rows_of(&prompts[first]).max(1).min(prompts[first].tokens);
    let mut left = budget.after(chunks[first], &prompts[first]);
    let mut order: Vec<usize> = (0..prompts.len()).collect();
    order.sort_by(|one, other| by_turn(one, other).then(prompts[*one].tokens.cmp(&prompts[*other].tokens)));
    for (place, at) in order.into_iter().enumerate() {
        let least = usize::from(place == 0 && at != first);
        let more = left.rows_of(&prompts[at]).max(least).min(prompts[at].tokens - chunks[at]);
        chunks[at] += more;
        left = left.after(more, &prompts[at]);
    }
    chunks
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PRIORITIES: [Priority; 3] = [Priority::Background, Priority::Normal, Priority::Interactive];

    fn normal(tokens: usize) -> Prompt {
        Prompt { priority: Priority::Normal, tokens, row: 0.001, standing: Standing::default() }
    }

    fn rows(rows: usize) -> PrefillBudget {
        PrefillBudget::ALL.at_most(rows)
    }

    #[test]
    fn short_prompts_overtake_long_ones_that_still_progress() {
        assert_eq!(prefill_chunks(rows(16), &[normal(1000)]), [16]);
        assert_eq!(prefill_chunks(rows(16), &[normal(1000), normal(5)]), [11, 5]);
        assert_eq!(prefill_chunks(rows(16), &[normal(1000), normal(900), normal(50)]), [8, 0, 8]);
        assert_eq!(
            prefill_chunks(rows(16), &[normal(1000), normal(1000)]),
            [16, 0],
            "of two alike the first is done first"
        );
        let urgent = Prompt { priority: Priority::Interactive, ..normal(40) };
        assert_eq!(prefill_chunks(rows(16), &[normal(1000), normal(5), urgent]), [0, 0, 16]);
    }

    #[test]
    fn clients_that_had_less_go_first() {
        let of = |recent, tokens| Prompt { standing: Standing { recent, owed: 0 }, ..normal(tokens) };
        assert_eq!(prefill_chunks(rows(16), &[of(900.0, 1000), of(30.0, 24)]), [0, 16]);
        assert_eq!(prefill_chunks(rows(16), &[of(900.0, 1000), of(30.0, 9)]), [7, 9]);
        assert_eq!(prefill_chunks(rows(16), &[of(9.0, 40), of(9.0, 24), of(90.0, 2)]), [8, 8, 0]);
    }

    #[test]
    fn rows_deep_in_a_prompt_are_fewer() {
        let long = Prompt { row: 0.004, ..normal(1000) };
        let budget = PrefillBudget::seconds(0.016);
        assert_eq!(prefill_chunks(budget, &[long]), [4]);
        assert_eq!(
            prefill_chunks(budget, &[long, normal(5)]),
            [2, 5],
            "what is left is no whole row of the long"
        );
        assert_eq!(prefill_chunks(budget, &[normal(100), long]), [16, 0]);
        assert_eq!(prefill_chunks(budget, &[long, normal(100)]), [2, 8]);
        assert_eq!(prefill_chunks(PrefillBudget::seconds(0.001), &[long]), [1]);
        assert_eq!(prefill_chunks(PrefillBudget::seconds(0.001), &[long, normal(5), normal(9)]), [1, 1, 0]);
        assert_eq!(prefill_chunks(PrefillBudget::ALL, &[long, Prompt { row: 0.0, ..normal(9) }]), [1000, 9]);
    }

    proptest! {
        #[test]
        fn the_budget_is_used_up_and_the_oldest_prompt_progresses(
            budget in 2usize..600,
            prompts in prop::collection::vec((0usize..3, 1usize..900), 1..9),
        ) {
            let prompts: Vec<Prompt> = prompts
                .into_iter()
                .map(|(priority, tokens)| Prompt { priority: PRIORITIES[priority], ..normal(tokens) })
                .collect();
            let chunks = prefill_chunks(rows(budget), &prompts);
            let all: usize = prompts.iter().map(|prompt| prompt.tokens).sum();
            prop_assert_eq!(chunks.iter().sum::<usize>(), budget.min(all));
            let fits = |(chunk, prompt): (&usize, &Prompt)| *chunk <= prompt.tokens;
            prop_assert!(chunks.iter().zip(&prompts).all(fits));
            let most = prompts.iter().map(|prompt| prompt.priority).max().unwrap();
            let first = prompts.iter().position(|prompt| prompt.priority == most).unwrap();
            prop_assert!(chunks[first] >= prompts[first].tokens.min(budget / 2));
        }
    }
}
