//! Which sequences a decode step takes when several clients decode.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use firebox_schedule::{Client, Priority};

/// How much longer a decode step may take for sequences of a client that has more of them than another one. Where rows cost
/// little beside reading the weights, as on most accelerators, all are in every step; where they do not, they take turns.
const MOST_SLOWDOWN: f64 = 1.5;

/// [`MOST_SLOWDOWN`] beside prompts, which may take as long again as the step.
const SLOWDOWN_BESIDE_PROMPTS: f64 = 1.1;

/// What waits or runs beside a decode step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beside {
    Nothing,
    Prompts,
    /// A prompt of a client that is [owed](crate::recent_rows::Standing::owed) rows.
    OwedPrompt,
}

/// A sequence that needs a decode step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Decoding<'c> {
    pub client: &'c Client,
    pub priority: Priority,
    /// The last decode step that it was in.
    pub last_step: u64,
}

/// Returns for each sequence whether the next decode step takes it. Every client gets as many rows, by its weight, as the one
/// with the fewest sequences has; more join, those first that have waited longest, as long as the step takes hardly longer for
/// them by `seconds`, the time of a step by its rows, which is 0 where it is not known yet. A client that is owed a prompt counts
/// as one with a sequence.
pub(crate) fn decode_share(
    decoding: &[Decoding<'_>],
    beside: Beside,
    seconds: impl Fn(usize) -> f64,
) -> Vec<bool> {
    let mut order: Vec<usize> = (0..decoding.len()).collect();
    order.sort_by_key(|&at| (Reverse(decoding[at].priority), decoding[at].last_step));
    let mut clients: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
    for Decoding { client, .. } in decoding {
        clients.entry(&client.name).or_insert((0, f64::from(client.weight.max(1)))).0 += 1;
    }
    let owes = beside == Beside::OwedPrompt;
    if clients.len() < 2 && !owes {
        return vec![true; decoding.len()];
    }
    let rows = clients.values().map(|(rows, weight)| *rows as f64 / weight);
    let fewest = rows.fold(if owes { 1.0 } else { f64::INFINITY }, f64::min);
    let mut left: BTreeMap<&str, usize> =
        clients.into_iter().map(|(name, (_, weight))| (name, ((fewest * weight) as usize).max(1))).collect();
    let mut takes = vec![false; decoding.len()];
    for &at in &order {
        if let Some(left) = left.get_mut(&*decoding[at].client.name).filter(|left| **left > 0) {
            *left -= 1;
            takes[at] = true;
        }
    }
    let fair = takes.iter().filter(|takes| **takes).count();
    let slowdown = if beside == Beside::Nothing { MOST_SLOWDOWN } else { SLOWDOWN_BESIDE_PROMPTS };
    let most = seconds(fair) * slowdown;
    let fits = |rows: &usize| most > 0.0 && seconds(*rows) <= most;
    let more = (fair + 1..=decoding.len()).take_while(fits).count();
    let others: Vec<usize> = order.into_iter().filter(|&at| !takes[at]).take(more).collect();
    others.into_iter().for_each(|at| takes[at] = true);
    takes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Runs `steps` steps of clients with so many sequences each, and returns the rows of every sequence.
    fn rows(clients: &[(Client, usize)], steps: u64, seconds: impl Fn(usize) -> f64) -> Vec<Vec<usize>> {
        let mut last: Vec<Vec<u64>> = clients.iter().map(|(_, count)| vec![0; *count]).collect();
        let mut rows: Vec<Vec<usize>> = clients.iter().map(|(_, count)| vec![0; *count]).collect();
        for step in 1..=steps {
            let each = clients.iter().zip(&last).enumerate().flat_map(|(at, ((client, _), last))| {
                let decoding = |&last_step| Decoding { client, priority: Priority::Normal, last_step };
                last.iter().map(decoding).enumerate().map(move |(nth, one)| (at, nth, one))
            });
            let each: Vec<_> = each.collect();
            let decoding: Vec<Decoding<'_>> = each.iter().map(|(.., one)| *one).collect();
            let taken = decode_share(&decoding, Beside::Nothing, &seconds);
            let taken: Vec<(usize, usize)> = each
                .iter()
                .zip(taken)
                .filter(|(_, taken)| *taken)
                .map(|((at, nth, _), _)| (*at, *nth))
                .collect();
            for (at, nth) in taken {
                last[at][nth] = step;
                rows[at][nth] += 1;
            }
        }
        rows
    }

    #[test]
    fn rows_that_cost_as_much_as_the_first_take_turns() {
        let clients = [(Client::new("one"), 1), (Client::new("many"), 8)];
        let rows = rows(&clients, 80, |rows| 20.0 + 15.0 * rows as f64);
        assert_eq!(rows[0], [80], "a client with one answer is in every step");
        // 20 + 2 * 15 ms for both, and one and a half times that for three rows.
        assert_eq!(rows[1], [20; 8]);
    }

    #[test]
    fn rows_that_cost_little_are_in_every_step() {
        let clients = [(Client::new("one"), 1), (Client::new("many"), 8)];
        assert_eq!(rows(&clients, 10, |rows| 20.0 + rows as f64), [vec![10], vec![10; 8]]);
        assert_eq!(rows(&clients[1..], 10, |rows| rows as f64), [[10; 8]], "there is no other client");
    }

    #[test]
    fn beside_prompts_a_client_adds_no_slow_rows() {
        let clients = [Client::new("one"), Client::new("many")];
        let decoding =
            |at: usize| Decoding { client: &clients[at], priority: Priority::Normal, last_step: 0 };
        let decoding = [decoding(1), decoding(0), decoding(1), decoding(1)];
        assert_eq!(
            decode_share(&decoding, Beside::Prompts, |rows| 20.0 + 15.0 * rows as f64),
            [true, true, false, false]
        );
        assert_eq!(decode_share(&decoding, Beside::Prompts, |rows| 20.0 + rows as f64), [true; 4]);
    }

    #[test]
    fn a_client_takes_turns_beside_a_prompt_that_another_is_owed() {
        let client = Client::new("many");
        let decoding = [Decoding { client: &client, priority: Priority::Normal, last_step: 0 }; 3];
        let takes = |beside| decode_share(&decoding, beside, |rows| 20.0 + 15.0 * rows as f64);
        assert_eq!(takes(Beside::OwedPrompt), [true, false, false]);
        assert_eq!(takes(Beside::Prompts), [true; 3]);
    }

    #[test]
    fn a_step_whose_time_is_unknown_is_measured_first() {
        let clients = [(Client::new("one"), 1), (Client::new("many"), 8)];
        let rows = rows(&clients, 8, |rows| if rows < 9 { 0.0 } else { 100.0 });
        assert_eq!((&rows[0], &rows[1]), (&vec![8], &vec![1; 8]));
    }

    #[test]
    fn weights_count() {
        let clients = [(Client::new("heavy").with_weight(3), 6), (Client::new("light"), 6)];
        let rows = rows(&clients, 60, |rows| rows.saturating_sub(7).pow(2) as f64);
        let [heavy, light] = [&rows[0], &rows[1]].map(|rows| rows.iter().sum::<usize>());
        assert_eq!((heavy, light), (6 * 60, 2 * 60));
        assert_eq!(rows[1], [20; 6]);
    }

    proptest! {
        #[test]
        fn every_sequence_gets_rows_and_every_client_in_every_step(
            counts in prop::collection::vec((1usize..9, 1u32..4), 1..5), row in 0.0..30.0,
        ) {
            let client = |at: usize, weight| Client::new(at.to_string()).with_weight(weight);
            let clients: Vec<_> =
                counts.iter().enumerate().map(|(at, (count, weight))| (client(at, *weight), *count)).collect();
            let rows = rows(&clients, 64, |rows| 20.0 + row * rows as f64);
            for rows in rows {
                prop_assert!(rows.iter().sum::<usize>() >= 64);
                prop_assert!(rows.iter().all(|each| *each >= 64 / rows.len()), "{:?}", rows);
            }
        }
    }
}
