//! Splits the prefill budget of a pass among several prompts.

use std::cmp::Reverse;

use firebox_schedule::Priority;

/// A prompt, or the rest of one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prompt {
    pub priority: Priority,
    pub tokens: usize,
    /// Seconds that a layer takes per token.
    pub row: f64,
}

/// How many rows go through a layer together, and for how long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    pub rows: usize,
    pub seconds: f64,
}

impl Room {
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
    fn rows_of(self, prompt: &Prompt) -> usize {
        self.rows.min((self.seconds / prompt.row) as usize)
    }

    /// Returns what is left after some rows of a prompt.
    fn beside(self, rows: usize, prompt: &Prompt) -> Self {
        let seconds = (self.seconds - rows as f64 * prompt.row).max(0.0);
        Self { rows: self.rows.saturating_sub(rows), seconds }
    }
}

/// Returns how many tokens of each prompt go through the layers together. Prompts are in order of arrival.
///
/// Higher priorities come first. Within a priority, the oldest prompt gets half, so that it makes progress whatever
/// arrives, and the other half goes to the prompts with the fewest tokens left: a question does not wait for a book.
/// However small the budget, the oldest prompt gets one token and another prompt one.
pub(crate) fn prefill_chunks(room: Room, prompts: &[Prompt]) -> Vec<usize> {
    let mut portions = vec![0; prompts.len()];
    let urgency = |at: usize| Reverse(prompts[at].priority);
    let Some(first) = (0..prompts.len()).min_by_key(|&at| urgency(at)) else { return portions };
    portions[first] = room.half().rows_of(&prompts[first]).max(1).min(prompts[first].tokens);
    let mut left = room.beside(portions[first], &prompts[first]);
    let mut order: Vec<usize> = (0..prompts.len()).collect();
    order.sort_by_key(|&at| (urgency(at), prompts[at].tokens));
    for (turn, at) in order.into_iter().enumerate() {
        let least = usize::from(turn == 0 && at != first);
        let more = left.rows_of(&prompts[at]).max(least).min(prompts[at].tokens - portions[at]);
        portions[at] += more;
        left = left.beside(more, &prompts[at]);
    }
    portions
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PRIORITIES: [Priority; 3] = [Priority::Background, Priority::Normal, Priority::Interactive];

    fn normal(tokens: usize) -> Prompt {
        Prompt { priority: Priority::Normal, tokens, row: 0.001 }
    }

    fn rows(rows: usize) -> Room {
        Room::ALL.at_most(rows)
    }

    #[test]
    fn a_short_one_passes_a_long_one_that_gets_on() {
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
    fn rows_that_attend_to_much_are_fewer() {
        let book = Prompt { row: 0.004, ..normal(1000) };
        let room = Room::seconds(0.016);
        assert_eq!(prefill_chunks(room, &[book]), [4]);
        assert_eq!(
            prefill_chunks(room, &[book, normal(5)]),
            [2, 5],
            "what is left is no whole row of the book"
        );
        assert_eq!(prefill_chunks(room, &[normal(100), book]), [16, 0]);
        assert_eq!(prefill_chunks(room, &[book, normal(100)]), [2, 8]);
        assert_eq!(prefill_chunks(Room::seconds(0.001), &[book]), [1]);
        assert_eq!(prefill_chunks(Room::seconds(0.001), &[book, normal(5), normal(9)]), [1, 1, 0]);
        assert_eq!(prefill_chunks(Room::ALL, &[book, Prompt { row: 0.0, ..normal(9) }]), [1000, 9]);
    }

    proptest! {
        #[test]
        fn no_row_is_left_over_and_who_came_first_gets_on(
            room in 2usize..600,
            prompts in prop::collection::vec((0usize..3, 1usize..900), 1..9),
        ) {
            let prompts: Vec<Prompt> = prompts
                .into_iter()
                .map(|(priority, tokens)| Prompt { priority: PRIORITIES[priority], ..normal(tokens) })
                .collect();
            let portions = prefill_chunks(rows(room), &prompts);
            let all: usize = prompts.iter().map(|prompt| prompt.tokens).sum();
            prop_assert_eq!(portions.iter().sum::<usize>(), room.min(all));
            let fits = |(portion, prompt): (&usize, &Prompt)| *portion <= prompt.tokens;
            prop_assert!(portions.iter().zip(&prompts).all(fits));
            let most = prompts.iter().map(|prompt| prompt.priority).max().unwrap();
            let first = prompts.iter().position(|prompt| prompt.priority == most).unwrap();
            prop_assert!(portions[first] >= prompts[first].tokens.min(room / 2));
        }
    }
}
