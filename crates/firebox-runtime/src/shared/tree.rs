use std::collections::HashMap;
use std::sync::Arc;

use firebox_cache::{Block, PAGE_TOKENS, RecurrentStates};

use crate::Charge;

/// What sequences have in common beside their first tokens, if what is remembered of those is the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub scope: Arc<str>,
    /// The head and its generation, adapters included.
    pub head: Arc<str>,
    /// What positions mean.
    pub epoch: usize,
}

/// What was found of some tokens.
#[derive(Debug, Default)]
pub(super) struct Match {
    /// Of all tokens that are known.
    pub blocks: Vec<Block>,
    /// How many are known.
    pub known: usize,
    /// The last place among them that recurrent layers go on from.
    pub place: Option<(usize, Arc<RecurrentStates>)>,
}

/// Blocks of tokens by the tokens, each behind those that came before it. A block that others come behind is full.
#[derive(Debug, Default)]
pub(super) struct Tree {
    nodes: Vec<Option<Node>>,
    empty: Vec<usize>,
    roots: HashMap<Key, Vec<usize>>,
    /// Counts what is asked for, to know what was asked for longest ago.
    clock: u64,
    pages: usize,
    state_bytes: u64,
}

#[derive(Debug)]
struct Node {
    above: Above,
    tokens: Box<[u32]>,
    block: Block,
    places: Vec<Place>,
    below: Vec<usize>,
    used: u64,
}

#[derive(Debug)]
enum Above {
    Root(Key),
    Node(usize),
}

/// Recurrent states within a block.
#[derive(Debug)]
struct Place {
    /// Behind so many of its tokens.
    at: usize,
    states: Arc<RecurrentStates>,
    bytes: u64,
    used: u64,
    _charge: Option<Charge>,
}

impl Tree {
    /// Pages that it has.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Bytes of recurrent states that it has.
    pub fn state_bytes(&self) -> u64 {
        self.state_bytes
    }

    /// What is known of the first of these tokens.
    pub fn find(&mut self, key: &Key, tokens: &[u32]) -> Match {
        self.clock += 1;
        let mut found = Match::default();
        let mut below = self.roots.get(key).map_or(&[][..], Vec::as_slice);
        let mut path = Vec::new();
        while let Some((index, common)) = self.nearest(below, &tokens[found.known..]) {
            let Some(node) = &self.nodes[index] else { break };
            if let Some(place) = self.last_place(below, &tokens[found.known..]) {
                found.place = Some((found.known + place.at, place.states.clone()));
            }
            found.blocks.push(node.block.clone());
            found.known += common;
            path.push(index);
            if common < PAGE_TOKENS {
                break;
            }
            below = &node.below;
        }
        for node in path {
            self.touch(node, found.place.as_ref().map(|(_, states)| states));
        }
        found
    }

    /// Whether all of these tokens are known.
    pub fn covers(&self, key: &Key, tokens: &[u32]) -> bool {
        let mut below = self.roots.get(key).map_or(&[][..], Vec::as_slice);
        let mut known = 0;
        while let Some((index, common)) = self.nearest(below, &tokens[known..]) {
            known += common;
            let Some(node) = self.nodes[index].as_ref().filter(|_| common == PAGE_TOKENS) else { break };
            below = &node.below;
        }
        known == tokens.len()
    }

    /// Takes blocks of these tokens where it has none of them.
    pub fn insert(&mut self, key: &Key, tokens: &[u32], blocks: Vec<Block>) {
        self.clock += 1;
        let mut above = None;
        let mut at = 0;
        for block in blocks {
            let end = at + block.tokens();
            let tokens = &tokens[at..end];
            at = end;
            let below = match above {
                None => self.roots.get(key).map_or(&[][..], Vec::as_slice),
                Some(node) => self.below(node),
            };
            let index = match self.nearest(below, tokens) {
                Some((index, common)) if common == tokens.len() => {
                    self.exchange(index, block);
                    index
                }
                Some((index, common)) if self.length(index) == common => {
                    self.lengthen(index, tokens, block);
                    index
                }
                _ => self.add(above, key, tokens, block),
            };
            self.touch(index, None);
            above = Some(index);
        }
    }

    /// Takes the states of recurrent layers behind so many tokens, of which it has blocks. `charged` pays for their bytes.
    pub fn insert_place(
        &mut self,
        key: &Key,
        tokens: &[u32],
        states: Arc<RecurrentStates>,
        bytes: u64,
        charged: impl FnOnce() -> Option<Option<Charge>>,
    ) {
        let (mut below, mut known) = (self.roots.get(key).map_or(&[][..], Vec::as_slice), 0);
        while let Some((index, common)) = self.nearest(below, &tokens[known..]) {
            known += common;
            if known < tokens.len() {
                let Some(node) = self.nodes[index].as_ref().filter(|_| common == PAGE_TOKENS) else { return };
                below = &node.below;
                continue;
            }
            let used = self.clock;
            let Some(node) = &mut self.nodes[index] else { return };
            if node.places.iter().all(|place| place.at != common)
                && let Some(charge) = charged()
            {
                node.places.push(Place { at: common, states, bytes, used, _charge: charge });
                self.state_bytes += bytes;
            }
            return;
        }
    }

    /// Lets go of the block that was asked for longest ago, among those that `may_go`: of those that nothing comes behind
    /// if there are any, and otherwise with all that comes behind it. Returns how many went.
    pub fn evict(&mut self, may_go: impl Fn(&Block) -> bool) -> usize {
        let nodes = self.nodes.iter().enumerate().filter_map(|(index, node)| Some((index, node.as_ref()?)));
        let going = nodes.filter(|(_, node)| may_go(&node.block));
        let oldest = going.min_by_key(|(_, node)| (!node.below.is_empty(), node.used));
        let Some((oldest, _)) = oldest else { return 0 };
        let before = self.pages;
        self.remove(oldest);
        before - self.pages
    }

    /// Lets go of the recurrent states that were asked for longest ago. Returns whether there were any.
    pub fn evict_place(&mut self) -> bool {
        let places = self.nodes.iter_mut().flatten().flat_map(|node| {
            let at = node.places.iter().enumerate().min_by_key(|(_, place)| place.used);
            at.map(|(at, place)| (place.used, at)).map(|(used, at)| (used, node, at))
        });
        let Some((_, node, at)) = places.min_by_key(|(used, ..)| *used) else { return false };
        let place = node.places.swap_remove(at);
        self.state_bytes -= place.bytes;
        true
    }

    fn below(&self, node: usize) -> &[usize] {
        self.nodes[node].as_ref().map_or(&[], |node| &node.below)
    }

    fn length(&self, node: usize) -> usize {
        self.nodes[node].as_ref().map_or(0, |node| node.tokens.len())
    }

    /// The node that has most of the first tokens in common, and how many.
    fn nearest(&self, nodes: &[usize], tokens: &[u32]) -> Option<(usize, usize)> {
        let common = |index: &usize| {
            let node = self.nodes[*index].as_ref()?;
            let common = node.tokens.iter().zip(tokens).take_while(|(one, other)| one == other).count();
            (common > 0).then_some((*index, common))
        };
        nodes.iter().filter_map(common).max_by_key(|(_, common)| *common)
    }

    /// The last place in any node that the first tokens reach.
    fn last_place(&self, nodes: &[usize], tokens: &[u32]) -> Option<&Place> {
        let places = nodes
            .iter()
            .filter_map(|&index| self.nodes[index].as_ref())
            .flat_map(|node| node.places.iter().filter(|place| tokens.starts_with(&node.tokens[..place.at])));
        places.max_by_key(|place| place.at)
    }

    fn touch(&mut self, node: usize, places: Option<&Arc<RecurrentStates>>) {
        let clock = self.clock;
        if let Some(node) = &mut self.nodes[node] {
            node.used = clock;
            let used = |place: &&mut Place| places.is_some_and(|states| Arc::ptr_eq(states, &place.states));
            node.places.iter_mut().filter(used).for_each(|place| place.used = clock);
        }
    }

    /// Puts a block in the place of one with fewer tokens.
    fn lengthen(&mut self, node: usize, tokens: &[u32], block: Block) {
        if let Some(node) = &mut self.nodes[node] {
            (node.tokens, node.block) = (tokens.into(), block);
        }
    }

    /// Takes a sequence's own block for one that nobody reads, whose page is then there for others.
    fn exchange(&mut self, node: usize, block: Block) {
        if let Some(node) = &mut self.nodes[node]
            && node.block.is_alone()
            && node.tokens.len() == block.tokens()
        {
            node.block = block;
        }
    }

    fn add(&mut self, above: Option<usize>, key: &Key, tokens: &[u32], block: Block) -> usize {
        let index = self.empty.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.nodes.len() - 1
        });
        self.nodes[index] = Some(Node {
            above: above.map_or_else(|| Above::Root(key.clone()), Above::Node),
            tokens: tokens.into(),
            block,
            places: Vec::new(),
            below: Vec::new(),
            used: self.clock,
        });
        self.pages += 1;
        match above.map(|above| self.nodes[above].as_mut()) {
            Some(Some(above)) => above.below.push(index),
            _ => self.roots.entry(key.clone()).or_default().push(index),
        }
        index
    }

    fn remove(&mut self, index: usize) {
        let Some(mut node) = self.nodes[index].take() else { return };
        self.empty.push(index);
        for below in std::mem::take(&mut node.below) {
            self.remove(below);
        }
        self.pages -= 1;
        self.state_bytes -= node.places.iter().map(|place| place.bytes).sum::<u64>();
        match node.above {
            Above::Node(above) => {
                if let Some(above) = &mut self.nodes[above] {
                    above.below.retain(|below| *below != index);
                }
            }
            Above::Root(key) => {
                if let Some(below) = self.roots.get_mut(&key) {
                    below.retain(|below| *below != index);
                    if below.is_empty() {
                        self.roots.remove(&key);
                    }
                }
            }
        }
    }
}
