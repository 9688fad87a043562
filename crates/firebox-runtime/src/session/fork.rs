//! Going back in a session, and the branches that continue it in several ways.

use firebox_cache::RecurrentState;

use super::Session;
use crate::RuntimeError;

/// A place in a sequence to go back to without computing again what came before it.
#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    /// Tokens that were cached.
    len: usize,
    /// The epoch of their positions.
    epoch: usize,
    /// The states of recurrent layers, by layer.
    states: Vec<Option<RecurrentState>>,
}

impl Session {
    /// Goes back to the first `len` tokens. If the model has recurrent layers and no turn began there, the cache is dropped:
    /// the tokens are recomputed with the next feed, until then there are no turns, and hidden ones are removed.
    pub fn rewind(&mut self, len: usize) {
        self.tokens.truncate(len);
        if self.cache.len() > self.tokens.len() && !self.cache.rewind(self.tokens.len()) {
            self.drop_cache();
        }
        self.recomputing = self.recomputing.min(self.uncached_tokens());
    }

    /// Returns a snapshot of the session as it is.
    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot { len: self.cache.len(), epoch: self.epoch(), states: self.cache.states().to_vec() }
    }

    /// Goes back to the first `len` tokens. Those up to the snapshot stay cached. In models with recurrent layers, those after
    /// it go through the layers again with the next feed.
    pub(crate) fn rewind_to(&mut self, snapshot: &Snapshot, len: usize) {
        let recurrent = self.cache.pool().layout().is_recurrent();
        let within = snapshot.len <= len && len < self.cache.len();
        if !recurrent || !within || snapshot.epoch != self.epoch() {
            return self.rewind(len);
        }
        self.tokens.truncate(len);
        self.cache.restore_states(snapshot.len, snapshot.states.clone());
    }
}

/// Identifies a branch of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BranchId(pub u64);

/// A tree of sessions. Branches share the cache of the tokens that they have in common: a fork copies no keys and values.
#[derive(Debug)]
pub struct Branches {
    branches: Vec<Branch>,
    next: u64,
}

#[derive(Debug)]
struct Branch {
    id: BranchId,
    /// `None` for the root.
    parent: Option<BranchId>,
    /// The number of first tokens that it shares with its parent, as long as neither goes back.
    from: usize,
    session: Session,
}

/// A branch, as [`Branches::iter`] lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BranchInfo {
    /// Its id.
    pub id: BranchId,
    /// The branch that it was forked from; `None` for the root.
    pub parent: Option<BranchId>,
    /// The number of first tokens that it shares with its parent.
    pub from: usize,
    /// The number of its tokens.
    pub tokens: usize,
}

impl Branches {
    /// Creates a tree with one branch.
    pub fn new(session: Session) -> Self {
        let root = Branch { id: BranchId(0), parent: None, from: 0, session };
        Self { branches: vec![root], next: 1 }
    }

    /// Returns the branch that all others were forked from.
    pub fn root(&self) -> BranchId {
        self.branches[0].id
    }

    /// Lists all branches, each after its parent.
    pub fn iter(&self) -> impl Iterator<Item = BranchInfo> {
        self.branches.iter().map(|branch| BranchInfo {
            id: branch.id,
            parent: branch.parent,
            from: branch.from,
            tokens: branch.session.tokens().len(),
        })
    }

    /// Returns the session of a branch.
    pub fn session(&mut self, branch: BranchId) -> Result<&mut Session, RuntimeError> {
        let index = self.index(branch)?;
        Ok(&mut self.branches[index].session)
    }

    /// Forks a branch at its end.
    pub fn fork(&mut self, branch: BranchId) -> Result<BranchId, RuntimeError> {
        let session = self.session(branch)?.clone();
        Ok(self.add(branch, session))
    }

    /// Forks a branch after its first `tokens`. If the model has recurrent layers and no turn began there, those tokens are
    /// recomputed with the next feed.
    pub fn fork_at(&mut self, branch: BranchId, tokens: usize) -> Result<BranchId, RuntimeError> {
        let mut session = self.session(branch)?.clone();
        session.rewind(tokens);
        Ok(self.add(branch, session))
    }

    fn add(&mut self, parent: BranchId, session: Session) -> BranchId {
        let id = BranchId(self.next);
        self.next += 1;
        let from = session.tokens().len();
        self.branches.push(Branch { id, parent: Some(parent), from, session });
        id
    }

    /// Puts a branch in its parent's place: the parent's id continues as the branch, and other branches of both stay. The root
    /// stays where it is. Returns the id that the branch has from then on.
    pub fn promote(&mut self, branch: BranchId) -> Result<BranchId, RuntimeError> {
        let index = self.index(branch)?;
        let Some(parent) = self.branches[index].parent else { return Ok(branch) };
        let promoted = self.branches.remove(index);
        let above = self.index(parent)?;
        let place = &mut self.branches[above];
        place.session = promoted.session;
        // What the branches share with their parents ends where the promoted one was forked.
        place.from = place.from.min(promoted.from);
        for sibling in self.branches.iter_mut().filter(|sibling| sibling.parent == Some(parent)) {
            sibling.from = sibling.from.min(promoted.from);
        }
        for child in self.branches.iter_mut().filter(|child| child.parent == Some(branch)) {
            child.parent = Some(parent);
        }
        Ok(parent)
    }

    /// Removes a branch and all branches that were forked from it. The root cannot be removed.
    pub fn drop_branch(&mut self, branch: BranchId) -> Result<(), RuntimeError> {
        self.index(branch)?;
        if branch == self.root() {
            return Err(RuntimeError::RootBranch);
        }
        let mut removed = vec![branch];
        // Every branch stands after its parent.
        self.branches.retain(|branch| {
            let is_removed =
                removed.contains(&branch.id) || branch.parent.is_some_and(|parent| removed.contains(&parent));
            if is_removed {
                removed.push(branch.id);
            }
            !is_removed
        });
        Ok(())
    }

    fn index(&self, branch: BranchId) -> Result<usize, RuntimeError> {
        let index = self.branches.iter().position(|held| held.id == branch);
        index.ok_or(RuntimeError::NoSuchBranch { branch: branch.0 })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{Model, device, likeliest};

    fn tree(fixture: &str) -> Branches {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(fixture);
        let mut session = Model::open(root, &device("cpu").unwrap()).unwrap().session().unwrap();
        session.feed(&(5..150).collect::<Vec<_>>()).unwrap();
        Branches::new(session)
    }

    fn go_on(session: &mut Session, token: u32, count: usize) -> Vec<u32> {
        let mut next = token;
        let step = |_| {
            next = likeliest(&session.feed(&[next]).unwrap());
            next
        };
        (0..count).map(step).collect()
    }

    /// A branch takes pages for its own tokens, and none for those that it shares.
    #[test]
    fn branches_share_their_beginning_and_go_on_alone() {
        for fixture in ["reference/llama", "reference/qwen3_5_text", "reference/gemma4_text"] {
            let mut tree = tree(fixture);
            let root = tree.root();
            let pool = tree.session(root).unwrap().cache().pool().clone();
            let before = pool.pages();
            let forks: Vec<_> = (0..5).map(|_| tree.fork(root).unwrap()).collect();
            assert_eq!(pool.pages(), before, "{fixture}: a fork takes no page");
            let mut alone = tree.session(root).unwrap().clone();
            let expected = go_on(&mut alone, 9, 8);
            drop(alone);
            for (index, &fork) in forks.iter().enumerate() {
                let others = go_on(tree.session(fork).unwrap(), 9 + index as u32, 8);
                assert_eq!(others == expected, index == 0, "{fixture}: {index}");
            }
            // All but one of them had to begin a page of their own.
            assert!(pool.pages() <= before + 5, "{fixture}");
            assert_eq!(go_on(tree.session(root).unwrap(), 9, 8), expected, "{fixture}");
            for fork in forks {
                tree.drop_branch(fork).unwrap();
            }
            assert_eq!(tree.iter().count(), 1);
            // Another branch was first to go on in the page that all of them began in.
            assert!(pool.pages() - pool.free_pages() <= before + 1, "{fixture}: pages have come back");
        }
    }

    #[test]
    fn a_promoted_branch_goes_on_in_its_parents_place() {
        let mut tree = tree("reference/qwen3");
        let root = tree.root();
        let (left, right) = (tree.fork(root).unwrap(), tree.fork_at(root, 40).unwrap());
        let deeper = tree.fork(right).unwrap();
        go_on(tree.session(right).unwrap(), 7, 3);
        let tokens = tree.session(right).unwrap().tokens().to_vec();
        assert_eq!(tree.promote(right).unwrap(), root);
        assert_eq!(tree.session(root).unwrap().tokens(), tokens);
        let shown: Vec<_> = tree.iter().map(|branch| (branch.id, branch.parent, branch.from)).collect();
        assert_eq!(shown, [(root, None, 0), (left, Some(root), 40), (deeper, Some(root), 40)]);
        assert!(matches!(tree.session(right), Err(RuntimeError::NoSuchBranch { .. })));
        assert!(matches!(tree.drop_branch(root), Err(RuntimeError::RootBranch)));
        assert_eq!(tree.promote(root).unwrap(), root);
        let leaf = tree.fork(deeper).unwrap();
        tree.drop_branch(deeper).unwrap();
        assert!(tree.session(leaf).is_err());
    }
}
