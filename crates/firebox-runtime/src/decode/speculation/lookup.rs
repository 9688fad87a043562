//! Drafts from earlier occurrences in the sequence itself.

use std::cmp::Reverse;

use crate::decode::speculation::{DRAFT_BRANCHES, Draft, Drafter};
use crate::{RuntimeError, Sampler};

/// The shortest match; shorter ones are mostly chance.
const SHORTEST_MATCH: usize = 3;

/// The longest match; longer ones are not told apart.
const LONGEST_MATCH: usize = 32;

/// The most earlier occurrences that are compared for a draft. A common run of tokens has thousands.
const CANDIDATES: usize = 64;

/// Hash buckets of the index.
const BUCKETS: usize = 1 << 15;

/// Positions the index reaches back. A power of two.
const WINDOW: usize = 1 << 17;

const NONE: u32 = u32::MAX;

/// Prompt lookup: drafts the tokens that followed an earlier occurrence of the sequence's last tokens. The longest match comes
/// first, then the latest; matches that continue differently are further branches.
///
/// The index is that of LZ77 compressors: every run of three tokens is chained to the run before it in the same bucket. It
/// grows with the sequence and takes at most 640 KiB.
///
/// ```
/// use firebox_runtime::{Drafter, LookupDrafter, Sampler, SamplerConfig};
///
/// # fn main() -> Result<(), firebox_runtime::RuntimeError> {
/// let sampler = Sampler::new(SamplerConfig::greedy())?;
/// let draft = LookupDrafter::new().propose(&[1, 2, 3, 4, 5, 6, 1, 2, 3], 2, &sampler)?;
/// assert_eq!(draft.branches(), [[4, 5]]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct LookupDrafter {
    /// The end of the latest run in each bucket.
    heads: Vec<u32>,
    /// For the end of each run, in a ring, the end of the one before it in its bucket.
    before: Vec<u32>,
    /// Runs that end here or before are in the index.
    indexed: usize,
    /// The last tokens that were indexed, by which another sequence is recognised.
    last: Vec<u32>,
}

impl Default for LookupDrafter {
    fn default() -> Self {
        Self::new()
    }
}

impl LookupDrafter {
    /// Creates a drafter with an empty index.
    pub fn new() -> Self {
        Self { heads: vec![NONE; BUCKETS], before: Vec::new(), indexed: 0, last: Vec::new() }
    }

    /// Returns the bytes of the index.
    pub fn bytes(&self) -> usize {
        4 * (self.heads.len() + self.before.len() + self.last.len())
    }

    /// Extends the index to the sequence. A sequence that differs before the compared tokens leaves stale entries, which
    /// searches skip.
    fn follow(&mut self, tokens: &[u32]) {
        if self.indexed >= tokens.len().max(1) || !tokens[..self.indexed].ends_with(&self.last) {
            self.heads.fill(NONE);
            self.before.clear();
            self.indexed = 0;
        }
        // The last run is the one that is searched for; it is indexed with the token that follows it.
        let end = tokens.len().saturating_sub(1);
        for at in self.indexed..end {
            let bucket = (at + 1).checked_sub(SHORTEST_MATCH).map(|start| bucket(&tokens[start..=at]));
            let before = bucket.map_or(NONE, |bucket| std::mem::replace(&mut self.heads[bucket], at as u32));
            if self.before.len() < WINDOW {
                self.before.push(before);
            } else {
                self.before[at % WINDOW] = before;
            }
        }
        if end > self.indexed {
            self.indexed = end;
            self.last.clear();
            self.last.extend_from_slice(&tokens[end.saturating_sub(LONGEST_MATCH)..end]);
        }
    }

    /// Returns the ends of earlier matches of the sequence's last tokens, and their lengths: longest first, then latest, and
    /// one for each token that follows.
    fn matches(&self, tokens: &[u32]) -> Vec<(usize, usize)> {
        let mut found: Vec<(usize, usize)> = Vec::new();
        let Some(start) = tokens.len().checked_sub(SHORTEST_MATCH) else { return found };
        let mut at = self.heads[bucket(&tokens[start..])];
        for _ in 0..CANDIDATES {
            if at == NONE || tokens.len() > at as usize + WINDOW {
                break;
            }
            let end = at as usize + 1;
            let earlier = tokens[..end].iter().rev();
            let equal =
                earlier.zip(tokens.iter().rev()).take(LONGEST_MATCH).take_while(|(a, b)| a == b).count();
            match found.iter_mut().find(|(other, _)| tokens[*other] == tokens[end]) {
                Some(other) if equal > other.1 => *other = (end, equal),
                None if equal >= SHORTEST_MATCH => found.push((end, equal)),
                _ => {}
            }
            if equal == LONGEST_MATCH {
                break;
            }
            at = self.before[at as usize % WINDOW];
        }
        found.sort_by_key(|&(end, equal)| Reverse((equal, end)));
        found.truncate(DRAFT_BRANCHES);
        found
    }
}

impl Drafter for LookupDrafter {
    /// Longer matches are graded higher: 3 tokens, up to 7, up to 15, and so on.
    fn grade(&mut self, tokens: &[u32]) -> Option<usize> {
        self.follow(tokens);
        self.matches(tokens).first().map(|(_, equal)| equal.ilog2() as usize - 1)
    }

    fn propose(&mut self, tokens: &[u32], most: usize, _: &Sampler) -> Result<Draft, RuntimeError> {
        self.follow(tokens);
        let read_on = |(from, _)| {
            let mut branch: Vec<u32> = Vec::with_capacity(most);
            for at in from..from + most {
                // In a sequence that repeats itself, the match continues into the draft.
                branch.push(if at < tokens.len() { tokens[at] } else { branch[at - tokens.len()] });
            }
            branch
        };
        Ok(self.matches(tokens).into_iter().map(read_on).collect::<Vec<_>>().into())
    }
}

fn bucket(run: &[u32]) -> usize {
    let hash = run.iter().fold(0u64, |hash, &token| {
        // Knuth's multiplicative hash: odd, and near the golden ratio of 2^64.
        (hash.rotate_left(21) ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    });
    (hash >> 32) as usize % BUCKETS
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;

    use super::*;
    use crate::SamplerConfig;

    fn propose(drafter: &mut LookupDrafter, tokens: &[u32], most: usize) -> Vec<Vec<u32>> {
        let draft = drafter.propose(tokens, most, &Sampler::new(SamplerConfig::greedy()).unwrap()).unwrap();
        draft.branches().to_vec()
    }

    /// Drafts by searching the whole sequence.
    fn searched(tokens: &[u32], most: usize) -> Vec<Vec<u32>> {
        let equal = |end: usize| {
            let earlier = tokens[..end].iter().rev();
            earlier.zip(tokens.iter().rev()).take(LONGEST_MATCH).take_while(|(a, b)| a == b).count()
        };
        // A match of the greatest length ends the search.
        let from = (1..tokens.len()).rfind(|&end| equal(end) == LONGEST_MATCH).unwrap_or(1);
        let mut ends: Vec<usize> = (from..tokens.len()).filter(|&end| equal(end) >= SHORTEST_MATCH).collect();
        ends.sort_by_key(|&end| Reverse((equal(end), end)));
        let mut next = Vec::new();
        ends.retain(|&end| {
            !next.contains(&tokens[end]) && {
                next.push(tokens[end]);
                true
            }
        });
        let read_on = |from: usize| {
            let mut whole = tokens.to_vec();
            for at in from..from + most {
                whole.push(whole[at]);
            }
            whole.split_off(tokens.len())
        };
        ends.into_iter().take(DRAFT_BRANCHES).map(read_on).collect()
    }

    #[test]
    fn a_cycle_is_drafted_repeatedly() {
        let tokens: Vec<u32> = (0..11).map(|at| 40 + at % 4).collect();
        assert_eq!(propose(&mut LookupDrafter::new(), &tokens, 9), [[43, 40, 41, 42, 43, 40, 41, 42, 43]]);
    }

    #[test]
    fn the_longest_run_comes_first() {
        let tokens = [9, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3];
        assert_eq!(propose(&mut LookupDrafter::new(), &tokens, 2), [[50, 8], [60, 9]]);
    }

    #[test]
    fn longer_matches_have_higher_grades() {
        for (equal, grade) in
            [(2, None), (3, Some(0)), (4, Some(1)), (7, Some(1)), (8, Some(2)), (40, Some(4))]
        {
            let run: Vec<u32> = (10..10 + equal).collect();
            let tokens = [&run[..], &[1], &run[..]].concat();
            assert_eq!(LookupDrafter::new().grade(&tokens), grade, "{equal}");
        }
    }

    #[test]
    fn short_sequences_have_no_draft() {
        for len in 0..6 {
            let tokens: Vec<u32> = (0..len).collect();
            assert!(propose(&mut LookupDrafter::new(), &tokens, 4).is_empty());
        }
    }

    /// Neither the index nor a search grows with a long sequence.
    #[test]
    fn a_long_sequence_costs_little() {
        let mut drafter = LookupDrafter::new();
        let mut tokens: Vec<u32> = (0..300_000u32).map(|at| at.wrapping_mul(at) >> 3 & 7).collect();
        propose(&mut drafter, &tokens, 8);
        assert!(drafter.bytes() <= 660 << 10, "{}", drafter.bytes());
        let began = Instant::now();
        for step in 0..1000 {
            tokens.push(step & 7);
            propose(&mut drafter, &tokens, 8);
        }
        // Some 30 µs each without optimisation; a search of the whole sequence takes milliseconds.
        assert!(began.elapsed().as_millis() < 1000, "{:?}", began.elapsed());
    }

    proptest! {
        #[test]
        fn drafts_match_a_search_of_the_whole_sequence(
            tokens in prop::collection::vec(0u32..3, 0..60), most in 0usize..6,
        ) {
            let mut drafter = LookupDrafter::new();
            for len in 0..=tokens.len() {
                prop_assert_eq!(propose(&mut drafter, &tokens[..len], most), searched(&tokens[..len], most));
            }
        }

        /// A sequence may be cut, continue differently, or be another.
        #[test]
        fn any_sequence_after_any_other_is_safe(
            sequences in prop::collection::vec(prop::collection::vec(0u32..4, 0..80), 1..6),
        ) {
            let mut drafter = LookupDrafter::new();
            for tokens in &sequences {
                let draft = propose(&mut drafter, tokens, 5);
                prop_assert!(draft.iter().flatten().all(|token| tokens.contains(token)));
            }
            // Another sequence of equal length and ending may lose drafts; an empty one resets the index.
            propose(&mut drafter, &[], 5);
            let last = sequences.last().unwrap();
            prop_assert_eq!(propose(&mut drafter, last, 5), searched(last, 5));
        }
    }
}
