//! Drafts: one continuation or several.

/// Guesses of what follows a sequence: one continuation, or several that exclude each other.
///
/// ```
/// use firebox_runtime::Draft;
///
/// assert_eq!(Draft::from(vec![3, 4]), Draft::from(vec![vec![3, 4]]));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Draft {
    branches: Vec<Vec<u32>>,
}

impl From<Vec<u32>> for Draft {
    fn from(tokens: Vec<u32>) -> Self {
        Self::from(vec![tokens])
    }
}

impl From<Vec<Vec<u32>>> for Draft {
    /// Takes branches, likeliest first. They may begin alike.
    fn from(branches: Vec<Vec<u32>>) -> Self {
        Self { branches }
    }
}

impl Draft {
    /// Returns the branches, likeliest first.
    pub fn branches(&self) -> &[Vec<u32>] {
        &self.branches
    }

    /// Cuts every branch to the length that is `permitted`.
    pub(super) fn permitted(mut self, mut permitted: impl FnMut(&[u32]) -> usize) -> Self {
        for branch in &mut self.branches {
            let length = permitted(branch);
            branch.truncate(length);
        }
        self
    }

    /// Cuts branches to `most` tokens and before tokens that are not `known`, and drops those that another begins with.
    pub(super) fn cut(self, most: usize, known: impl Fn(u32) -> bool) -> Self {
        let mut branches: Vec<Vec<u32>> = Vec::with_capacity(self.branches.len());
        for mut branch in self.branches {
            branch.truncate(branch.iter().take_while(|token| known(**token)).count().min(most));
            if branches.iter().any(|other| other.starts_with(&branch)) || branch.is_empty() {
                continue;
            }
            match branches.iter_mut().find(|other| branch.starts_with(other)) {
                Some(shorter) => *shorter = branch,
                None => branches.push(branch),
            }
        }
        Self { branches }
    }

    /// Returns how many of the `chosen` tokens each branch guessed beyond those that the branches before it guessed.
    pub(super) fn gains(&self, chosen: &[u32]) -> Vec<usize> {
        let mut best = 0;
        let gain = |branch: &Vec<u32>| {
            let guessed = branch.iter().zip(chosen).take_while(|(drafted, chosen)| drafted == chosen).count();
            let gain = guessed.saturating_sub(best);
            best += gain;
            gain
        };
        self.branches.iter().map(gain).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn redundant_branches_are_dropped() {
        let draft = Draft::from(vec![vec![1, 2], vec![], vec![1], vec![1, 2, 3, 9], vec![4, 99, 5], vec![4]]);
        assert_eq!(draft.clone().cut(3, |token| token < 50).branches(), [vec![1, 2, 3], vec![4]]);
        assert_eq!(draft.cut(0, |_| true), Draft::default());
    }

    #[test]
    fn gains_count_only_new_tokens() {
        let draft = Draft::from(vec![vec![1, 2, 3], vec![1, 5], vec![1, 5, 6], vec![7]]);
        assert_eq!(draft.gains(&[1, 5, 6, 8]), [1, 1, 1, 0]);
        assert_eq!(draft.gains(&[7]), [0, 0, 0, 1]);
        assert_eq!(draft.gains(&[]), [0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn cutting_loses_no_guess_within_the_limit(
            branches in prop::collection::vec(prop::collection::vec(0u32..3, 0..5), 0..6),
            chosen in prop::collection::vec(0u32..3, 0..5),
            most in 0usize..5,
        ) {
            let guessed = |draft: &Draft| draft.gains(&chosen).iter().sum::<usize>();
            let draft = Draft::from(branches);
            let cut = draft.clone().cut(most, |_| true);
            prop_assert_eq!(guessed(&cut), guessed(&draft).min(most));
            for (at, branch) in cut.branches().iter().enumerate() {
                let mut others = cut.branches().iter().enumerate().filter(|(other, _)| *other != at);
                prop_assert!(!branch.is_empty() && !others.any(|(_, other)| other.starts_with(branch)));
            }
        }
    }
}
