//! Blocks of cached tokens, found by the tokens that lead to them.

use std::collections::HashMap;
use std::sync::Arc;

use firebox_cache::{Block, PAGE_TOKENS, RecurrentStates};

use crate::Charge;

/// What sequences must have in common, apart from their tokens, to share blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub scope: Arc<str>,
    /// The head and its generation, adapters included.
    pub head: Arc<str>,
    /// The epoch of positions.
    pub epoch: usize,
}

/// The blocks and states that the tree has of some tokens.
#[derive(Debug, Default)]
pub(super) struct Match {
    /// The blocks of all known tokens.
    pub blocks: Vec<Block>,
    /// The number of known tokens.
    pub known: usize,
    /// The last recurrent states among them, and the number of tokens before them.
    pub states: Option<(usize, Arc<RecurrentStates>)>,
}

/// A tree of blocks: the path to a block is the tokens before it. A block with children is full.
#[derive(Debug, Default)]
pub(super) struct Tree {
    nodes: Vec<Option<Node>>,
    empty: Vec<usize>,
    roots: HashMap<Key, Vec<usize>>,
    /// Counts lookups, to find the least recently used block.
    clock: u64,
    pages: usize,
    state_bytes: u64,
}

#[derive(Debug)]
struct Node {
    parent: Parent,
    tokens: Box<[u32]>,
    block: Block,
    states: Vec<StatesEntry>,
    children: Vec<usize>,
    used: u64,
}

#[derive(Debug)]
enum Parent {
    Root(Key),
    Node(usize),
}

/// Recurrent states within a block.
#[derive(Debug)]
struct StatesEntry {
    /// The number of the block's tokens before them.
    at: usize,
    states: Arc<RecurrentStates>,
    bytes: u64,
    used: u64,
    _charge: Option<Charge>,
}

impl Tree {
    /// Returns the number of pages in the tree.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Returns the bytes of recurrent states in the tree.
    pub fn state_bytes(&self) -> u64 {
        self.state_bytes
    }

    /// Finds as many of the first tokens as the tree has.
    pub fn find(&mut self, key: &Key, tokens: &[u32]) -> Match {
        self.clock += 1;
        let mut found = Match::default();
        let mut children = self.roots.get(key).map_or(&[][..], Vec::as_slice);
        let mut path = Vec::new();
        while let Some((index, common)) = self.nearest(children, &tokens[found.known..]) {
            let Some(node) = &self.nodes[index] else { break };
            if let Some(entry) = self.last_states(children, &tokens[found.known..]) {
                found.states = Some((found.known + entry.at, entry.states.clone()));
            }
            found.blocks.push(node.block.clone());
            found.known += common;
            path.push(index);
            if common < PAGE_TOKENS {
                break;
            }
            children = &node.children;
        }
        for node in path {
            self.touch(node, found.states.as_ref().map(|(_, states)| states));
        }
        found
    }

    /// Returns whether the tree has all of these tokens.
    pub fn covers(&self, key: &Key, tokens: &[u32]) -> bool {
        let mut children = self.roots.get(key).map_or(&[][..], Vec::as_slice);
        let mut known = 0;
        while let Some((index, common)) = self.nearest(children, &tokens[known..]) {
            known += common;
            let Some(node) = self.nodes[index].as_ref().filter(|_| common == PAGE_TOKENS) else { break };
            children = &node.children;
        }
        known == tokens.len()
    }

    /// Inserts the blocks of these tokens that the tree does not have.
    pub fn insert(&mut self, key: &Key, tokens: &[u32], blocks: Vec<Block>) {
        self.clock += 1;
        let mut parent = None;
        let mut at = 0;
        for block in blocks {
            let end = at + block.tokens();
            let tokens = &tokens[at..end];
            at = end;
            let children = match parent {
                None => self.roots.get(key).map_or(&[][..], Vec::as_slice),
                Some(node) => self.children(node),
            };
            let index = match self.nearest(children, tokens) {
                Some((index, common)) if common == tokens.len() => {
                    self.exchange(index, block);
                    index
                }
                Some((index, common)) if self.length(index) == common => {
                    self.lengthen(index, tokens, block);
                    index
                }
                _ => self.add(parent, key, tokens, block),
            };
            self.touch(index, None);
            parent = Some(index);
        }
    }

    /// Inserts the states of recurrent layers after these tokens, whose blocks the tree has. `charge` charges for their bytes.
    pub fn insert_states(
        &mut self,
        key: &Key,
        tokens: &[u32],
        states: Arc<RecurrentStates>,
        bytes: u64,
        charge: impl FnOnce() -> Option<Option<Charge>>,
    ) {
        let (mut children, mut known) = (self.roots.get(key).map_or(&[][..], Vec::as_slice), 0);
        while let Some((index, common)) = self.nearest(children, &tokens[known..]) {
            known += common;
            if known < tokens.len() {
                let Some(node) = self.nodes[index].as_ref().filter(|_| common == PAGE_TOKENS) else { return };
                children = &node.children;
                continue;
            }
            let used = self.clock;
            let Some(node) = &mut self.nodes[index] else { return };
            if node.states.iter().all(|entry| entry.at != common)
                && let Some(charge) = charge()
            {
                node.states.push(StatesEntry { at: common, states, bytes, used, _charge: charge });
                self.state_bytes += bytes;
            }
            return;
        }
    }

    /// Removes the least recently used of the blocks that `may_evict` accepts. Blocks without children go first; a block with
    /// children goes with all of them. Returns how many were removed.
    pub fn evict(&mut self, may_evict: impl Fn(&Block) -> bool) -> usize {
        let nodes = self.nodes.iter().enumerate().filter_map(|(index, node)| Some((index, node.as_ref()?)));
        let candidates = nodes.filter(|(_, node)| may_evict(&node.block));
        let oldest = candidates.min_by_key(|(_, node)| (!node.children.is_empty(), node.used));
        let Some((oldest, _)) = oldest else { return 0 };
        let before = self.pages;
        self.remove(oldest);
        before - self.pages
    }

    /// Removes the least recently used recurrent states. Returns whether there were any.
    pub fn evict_states(&mut self) -> bool {
        let entries = self.nodes.iter_mut().flatten().flat_map(|node| {
            let at = node.states.iter().enumerate().min_by_key(|(_, entry)| entry.used);
            at.map(|(at, entry)| (entry.used, at)).map(|(used, at)| (used, node, at))
        });
        let Some((_, node, at)) = entries.min_by_key(|(used, ..)| *used) else { return false };
        let entry = node.states.swap_remove(at);
        self.state_bytes -= entry.bytes;
        true
    }

    fn children(&self, node: usize) -> &[usize] {
        self.nodes[node].as_ref().map_or(&[], |node| &node.children)
    }

    fn length(&self, node: usize) -> usize {
        self.nodes[node].as_ref().map_or(0, |node| node.tokens.len())
    }

    /// Returns the node that shares most of the first tokens, and how many it shares.
    fn nearest(&self, nodes: &[usize], tokens: &[u32]) -> Option<(usize, usize)> {
        let common = |index: &usize| {
            let node = self.nodes[*index].as_ref()?;
            let common = node.tokens.iter().zip(tokens).take_while(|(one, other)| one == other).count();
            (common > 0).then_some((*index, common))
        };
        nodes.iter().filter_map(common).max_by_key(|(_, common)| *common)
    }

    /// Returns the last recurrent states in any node that the first tokens reach.
    fn last_states(&self, nodes: &[usize], tokens: &[u32]) -> Option<&StatesEntry> {
        let entries = nodes
            .iter()
            .filter_map(|&index| self.nodes[index].as_ref())
            .flat_map(|node| node.states.iter().filter(|entry| tokens.starts_with(&node.tokens[..entry.at])));
        entries.max_by_key(|entry| entry.at)
    }

    fn touch(&mut self, node: usize, entries: Option<&Arc<RecurrentStates>>) {
        let clock = self.clock;
        if let Some(node) = &mut self.nodes[node] {
            node.used = clock;
            let used =
                |entry: &&mut StatesEntry| entries.is_some_and(|states| Arc::ptr_eq(states, &entry.states));
            node.states.iter_mut().filter(used).for_each(|entry| entry.used = clock);
        }
    }

    /// Replaces a block by one with more tokens.
    fn lengthen(&mut self, node: usize, tokens: &[u32], block: Block) {
        if let Some(node) = &mut self.nodes[node] {
            (node.tokens, node.block) = (tokens.into(), block);
        }
    }

    /// Replaces a block that no sequence reads by a sequence's own block with as many tokens, which frees a page.
    fn exchange(&mut self, node: usize, block: Block) {
        if let Some(node) = &mut self.nodes[node]
            && node.block.is_alone()
            && node.tokens.len() == block.tokens()
        {
            node.block = block;
        }
    }

    fn add(&mut self, parent: Option<usize>, key: &Key, tokens: &[u32], block: Block) -> usize {
        let index = self.empty.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.nodes.len() - 1
        });
        self.nodes[index] = Some(Node {
            parent: parent.map_or_else(|| Parent::Root(key.clone()), Parent::Node),
            tokens: tokens.into(),
            block,
            states: Vec::new(),
            children: Vec::new(),
            used: self.clock,
        });
        self.pages += 1;
        match parent.map(|parent| self.nodes[parent].as_mut()) {
            Some(Some(parent)) => parent.children.push(index),
            _ => self.roots.entry(key.clone()).or_default().push(index),
        }
        index
    }

    fn remove(&mut self, index: usize) {
        let Some(mut node) = self.nodes[index].take() else { return };
        self.empty.push(index);
        for children in std::mem::take(&mut node.children) {
            self.remove(children);
        }
        self.pages -= 1;
        self.state_bytes -= node.states.iter().map(|entry| entry.bytes).sum::<u64>();
        match node.parent {
            Parent::Node(parent) => {
                if let Some(parent) = &mut self.nodes[parent] {
                    parent.children.retain(|children| *children != index);
                }
            }
            Parent::Root(key) => {
                if let Some(children) = self.roots.get_mut(&key) {
                    children.retain(|children| *children != index);
                    if children.is_empty() {
                        self.roots.remove(&key);
                    }
                }
            }
        }
    }
}
