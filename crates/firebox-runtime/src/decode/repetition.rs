//! Finds answers that only repeat themselves.

/// How many times the same tokens have to follow one another.
const TIMES: usize = 8;
/// The fewest tokens of all repetitions together.
const LEAST: usize = 256;
/// The longest sequence of tokens whose repetition is found.
const LONGEST: usize = 512;
/// Tokens from one search to the next.
const EVERY: usize = 32;

/// Returns whether an answer ends with so many repetitions of the same tokens that nothing else is to be expected. It is
/// searched for at every 32nd token, so that it is found at the same one wherever the answer was interrupted.
pub(crate) fn ends_in_a_loop(answer: &[u32]) -> bool {
    if !answer.len().is_multiple_of(EVERY) {
        return false;
    }
    let last = &answer[answer.len().saturating_sub(TIMES * LONGEST)..];
    let at = |index: usize| last[last.len() - 1 - index];
    // For each end of the answer, how long the longest shorter end is that it begins with.
    let mut borders = vec![0; last.len()];
    for length in 1..last.len() {
        let mut border = borders[length - 1];
        while border > 0 && at(border) != at(length) {
            border = borders[border - 1];
        }
        borders[length] = border + usize::from(at(border) == at(length));
        let (length, period) = (length + 1, length + 1 - borders[length]);
        if length >= LEAST.max(TIMES * period) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns how many tokens an answer has when the loop is found: some that do not repeat, then `period` ones again and again.
    fn found(before: usize, period: usize, most: usize) -> Option<usize> {
        let tokens: Vec<u32> =
            (0..before).chain((0..most).map(|at| 10_000 + at % period)).map(|token| token as u32).collect();
        (0..=tokens.len()).find(|&length| ends_in_a_loop(&tokens[..length]))
    }

    #[test]
    fn loops_are_found_after_eight_times() {
        assert_eq!(found(0, 1, 1000), Some(256));
        assert_eq!(found(100, 1, 1000), Some(384), "the first multiple of 32 from 356 on");
        assert_eq!(found(64, 20, 1000), Some(64 + 256));
        assert_eq!(found(64, 100, 2000), Some(64 + 800));
        assert_eq!(found(0, 512, 8192), Some(4096));
        assert_eq!(found(0, 513, 8192), None, "too long to be looked for");
    }

    #[test]
    fn lists_are_no_loops() {
        let counted: Vec<u32> =
            (0..4096).map(|at| if at % 4 == 0 { 1000 + at / 4 } else { at % 4 }).collect();
        assert!((0..4096).all(|length| !ends_in_a_loop(&counted[..length])));
        let seven_times: Vec<u32> = (0..7 * 480).map(|at| at % 480).collect();
        assert!((0..seven_times.len()).all(|length| !ends_in_a_loop(&seven_times[..length])));
    }

    proptest! {
        #[test]
        fn loops_are_those_that_counting_finds(
            tokens in prop::collection::vec(0u32..2, 0..80), period in 1usize..40, times in 6usize..12,
        ) {
            let mut answer = tokens;
            let repeated: Vec<u32> = (0..period as u32).map(|at| at % 3).collect();
            answer.extend(repeated.iter().cycle().take(period * times));
            answer.truncate(answer.len() / EVERY * EVERY);
            let counted = (1..=LONGEST).any(|period| {
                let equal = answer.iter().rev().zip(answer.iter().rev().skip(period)).take_while(|(one, other)| one == other);
                equal.count() + period >= LEAST.max(TIMES * period)
            });
            prop_assert_eq!(ends_in_a_loop(&answer), counted && !answer.is_empty());
        }
    }
}
