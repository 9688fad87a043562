use std::cmp::Reverse;

use crate::schedule::Priority;

/// A prompt, or what is left of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prompt {
    pub priority: Priority,
    pub tokens: usize,
}

/// How many tokens of each of several prompts go through the layers together, of so many at most; the prompts are in the
/// order in which they came.
///
/// Those that are urgent come first. Of those that are as urgent who came first has half, so that it gets on whoever
/// else comes, and the other half is for who has the least left: a question does not wait for a book.
pub(crate) fn portions(rows: usize, prompts: &[Prompt]) -> Vec<usize> {
    let mut portions = vec![0; prompts.len()];
    let urgency = |at: usize| Reverse(prompts[at].priority);
    let Some(first) = (0..prompts.len()).min_by_key(|&at| urgency(at)) else { return portions };
    portions[first] = prompts[first].tokens.min(rows / 2);
    let mut left = rows - portions[first];
    let mut order: Vec<usize> = (0..prompts.len()).collect();
    order.sort_by_key(|&at| (urgency(at), prompts[at].tokens));
    for at in order {
        let more = left.min(prompts[at].tokens - portions[at]);
        portions[at] += more;
        left -= more;
    }
    portions
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PRIORITIES: [Priority; 3] = [Priority::Background, Priority::Normal, Priority::Interactive];

    fn normal(tokens: usize) -> Prompt {
        Prompt { priority: Priority::Normal, tokens }
    }

    #[test]
    fn a_short_one_passes_a_long_one_that_gets_on() {
        assert_eq!(portions(16, &[normal(1000)]), [16]);
        assert_eq!(portions(16, &[normal(1000), normal(5)]), [11, 5]);
        assert_eq!(portions(16, &[normal(1000), normal(900), normal(50)]), [8, 0, 8]);
        assert_eq!(
            portions(16, &[normal(1000), normal(1000)]),
            [16, 0],
            "of two alike the first is done first"
        );
        let urgent = Prompt { priority: Priority::Interactive, tokens: 40 };
        assert_eq!(portions(16, &[normal(1000), normal(5), urgent]), [0, 0, 16]);
    }

    proptest! {
        #[test]
        fn no_row_is_left_over_and_who_came_first_gets_on(
            rows in 2usize..600,
            prompts in prop::collection::vec((0usize..3, 1usize..900), 1..9),
        ) {
            let prompts: Vec<Prompt> = prompts
                .into_iter()
                .map(|(priority, tokens)| Prompt { priority: PRIORITIES[priority], tokens })
                .collect();
            let portions = portions(rows, &prompts);
            let all: usize = prompts.iter().map(|prompt| prompt.tokens).sum();
            prop_assert_eq!(portions.iter().sum::<usize>(), rows.min(all));
            let fits = |(portion, prompt): (&usize, &Prompt)| *portion <= prompt.tokens;
            prop_assert!(portions.iter().zip(&prompts).all(fits));
            let most = prompts.iter().map(|prompt| prompt.priority).max().unwrap();
            let first = prompts.iter().position(|prompt| prompt.priority == most).unwrap();
            prop_assert!(portions[first] >= prompts[first].tokens.min(rows / 2));
        }
    }
}
