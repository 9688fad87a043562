//! Branches of a draft, and the pass that verifies them.

use firebox_cache::SequenceCache;
use firebox_model::LogitRows;

use crate::decode::{ScoreRow, Scores};
use crate::readback::read_floats;
use crate::{RuntimeError, Session};

/// One continuation of a sequence after it went through the layers.
#[derive(Debug, Default)]
pub struct DraftBranch {
    /// Tokens behind the last one that was chosen.
    pub draft: Vec<u32>,
    /// Scores after the last chosen token, and after each token of the draft.
    scores: Scores,
    /// The branch's keys, values and states; absent for the branch that the session itself holds.
    cache: Option<SequenceCache>,
}

impl DraftBranch {
    /// A branch that the session itself holds: a draft, and the scores of a pass over the last chosen token and the draft.
    pub fn new(draft: Vec<u32>, scores: Scores) -> Self {
        Self { draft, scores, cache: None }
    }

    /// Scores after the first `drafted` tokens of the draft.
    pub fn scores_after(&self, drafted: usize) -> ScoreRow<'_> {
        self.scores.row(drafted, 1 + self.draft.len())
    }
}

impl Session {
    /// Returns how many of `most` draft tokens can follow the accepted tokens in one pass whose positions mean the same as
    /// in passes of single tokens: what positions mean must not depend on a draft.
    pub(crate) fn draft_room(&self, most: usize) -> usize {
        let behind = self.uncached_tokens();
        let most = most.min(self.chunk.saturating_sub(behind)).min(self.turn_room().saturating_sub(behind));
        let length = self.expected_length.max(self.cache.position() + behind + most);
        if self.epoch() == self.decoder.config().position_epoch(length) { most } else { 0 }
    }

    /// Takes the accepted tokens and the drafts behind them through the layers in one pass. The session holds the first
    /// branch then. Branches that the pass or the pool has no room for are left out; without room for the first there is
    /// no draft. Without one the likeliest `most` tokens suffice, if there is a number.
    pub(crate) fn forward_drafts(
        &mut self,
        drafts: Vec<Vec<u32>>,
        most: Option<usize>,
    ) -> Result<Vec<DraftBranch>, RuntimeError> {
        let Some(longest) = drafts.iter().map(Vec::len).max() else { return self.forward_accepted(most) };
        let length = self.reserve(longest)?;
        let behind = self.tokens[self.cache.len()..].to_vec();
        let tokens: Vec<Vec<u32>> = drafts.iter().map(|draft| [&behind[..], draft].concat()).collect();
        let Some(mut branches) = self.branches_for(&tokens) else { return self.forward_accepted(most) };
        let tokens: Vec<&[u32]> = tokens.iter().take(1 + branches.len()).map(Vec::as_slice).collect();
        let logits = self.forward(&tokens, &mut branches, length, LogitRows::All)?;
        self.tokens.extend_from_slice(&drafts[0]);
        let logits = read_floats(logits)?;
        let vocab = self.decoder.config().vocab_size;
        let mut rows = 0;
        let caches = std::iter::once(None).chain(branches.into_iter().map(Some));
        let branches = drafts.into_iter().zip(caches).map(|(draft, cache)| {
            let wanted = rows + behind.len() - 1..rows + behind.len() + draft.len();
            rows = wanted.end;
            let scores = Scores::Logits(logits[wanted.start * vocab..wanted.end * vocab].to_vec());
            DraftBranch { draft, scores, cache }
        });
        Ok(branches.collect())
    }

    /// Takes the accepted tokens through the layers without a draft.
    fn forward_accepted(&mut self, most: Option<usize>) -> Result<Vec<DraftBranch>, RuntimeError> {
        let Some(last) = self.tokens.pop() else { return Ok(Vec::new()) };
        match self.feed_scored(&[last], most) {
            Ok(scores) => Ok(vec![DraftBranch::new(Vec::new(), scores)]),
            Err(error) => {
                self.append(last);
                Err(error)
            }
        }
    }

    /// Returns caches for all but the first of the continuations that go through the layers together, as many as there is
    /// room for; nothing where there is no room for the first.
    fn branches_for(&mut self, tokens: &[Vec<u32>]) -> Option<Vec<SequenceCache>> {
        let (first, others) = tokens.split_first()?;
        let mut rows = first.len();
        let mut branches = Vec::new();
        for other in others {
            rows += other.len();
            if rows > self.chunk {
                break;
            }
            let Ok(branch) = self.cache.branch() else { break };
            branches.push(branch);
        }
        if self.cache.reserve(first.len()).is_err() {
            // The branches must not take the pages that the first continuation needs.
            branches.clear();
            self.cache.reserve(first.len()).ok()?;
        }
        let mut sized = branches.iter_mut().zip(others);
        if let Some(refused) = sized.position(|(branch, other)| branch.reserve(other.len()).is_err()) {
            branches.truncate(refused);
        }
        Some(branches)
    }

    /// Continues with another branch than the one it holds, whose draft has `drafted` tokens.
    pub(crate) fn change_branch(&mut self, branch: &mut DraftBranch, drafted: usize) {
        if let Some(cache) = branch.cache.take() {
            self.cache = cache;
            self.tokens.truncate(self.tokens.len() - drafted);
            self.tokens.extend_from_slice(&branch.draft);
        }
    }
}
