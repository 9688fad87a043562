use firebox_cache::SequenceCache;
use firebox_model::Wanted;

use crate::session::read;
use crate::{RuntimeError, Session};

/// One of several ways in which a sequence may go on, after it went through the layers.
#[derive(Debug, Default)]
pub(crate) struct Way {
    /// Behind the token that all ways begin with.
    pub draft: Vec<u32>,
    /// After that token, and after each of the draft.
    pub logits: Vec<f32>,
    /// What is remembered of it; absent for the way that the session has gone.
    cache: Option<SequenceCache>,
}

impl Way {
    /// What comes of a token that nothing was drafted behind, or nothing yet.
    pub fn straight(logits: Vec<f32>) -> Self {
        Self { logits, ..Self::default() }
    }

    /// The logits after so many tokens of the draft.
    pub fn logits_after(&self, drafted: usize) -> &[f32] {
        let width = self.logits.len() / (1 + self.draft.len());
        &self.logits[drafted * width..][..width]
    }
}

impl Session {
    /// Takes a token and each of several drafts behind it through the layers, in one pass. The session goes the first way.
    /// Ways that a pass or the pool has no room for are left out, and the first of them goes without its draft.
    pub(crate) fn go_ways(&mut self, token: u32, drafts: Vec<Vec<u32>>) -> Result<Vec<Way>, RuntimeError> {
        let Some(longest) = drafts.iter().map(Vec::len).max() else {
            return Ok(vec![Way::straight(self.feed(&[token])?)]);
        };
        let length = self.prepare(1 + longest)?;
        // Tokens that were accepted before without going through the layers come first, and unasked for.
        let behind = self.tokens[self.cache.len()..].to_vec();
        let tokens: Vec<Vec<u32>> =
            drafts.iter().map(|draft| [&behind[..], &[token], draft].concat()).collect();
        let Some(mut branches) = self.branches_for(&tokens) else {
            return Ok(vec![Way::straight(self.feed(&[token])?)]);
        };
        let tokens: Vec<&[u32]> = tokens.iter().take(1 + branches.len()).map(Vec::as_slice).collect();
        let logits = self.pass_together(&tokens, &mut branches, length, Wanted::All)?;
        self.tokens.extend_from_slice(&tokens[0][behind.len()..]);
        let logits = read(logits)?;
        let vocab = self.decoder.config().vocab_size;
        let mut rows = 0;
        let caches = std::iter::once(None).chain(branches.into_iter().map(Some));
        let ways = drafts.into_iter().zip(caches).map(|(draft, cache)| {
            let asked = rows + behind.len()..rows + behind.len() + 1 + draft.len();
            rows = asked.end;
            Way { draft, logits: logits[asked.start * vocab..asked.end * vocab].to_vec(), cache }
        });
        Ok(ways.collect())
    }

    /// Branches for all but the first of what is to go through the layers together, as many as there is room for.
    /// Nothing where there is none for the first.
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
            // What comes first must not go without room for what may come instead.
            branches.clear();
            self.cache.reserve(first.len()).ok()?;
        }
        let mut sized = branches.iter_mut().zip(others);
        if let Some(refused) = sized.position(|(branch, other)| branch.reserve(other.len()).is_err()) {
            branches.truncate(refused);
        }
        Some(branches)
    }

    /// Goes another way than it has gone, of which so many last tokens are a draft.
    pub(crate) fn change_ways(&mut self, way: &mut Way, drafted: usize) {
        if let Some(cache) = way.cache.take() {
            self.cache = cache;
            self.tokens.truncate(self.tokens.len() - drafted);
            self.tokens.extend_from_slice(&way.draft);
        }
    }
}
