//! The merge loop of BPE: neighbours are merged in the order of their priority.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A span of text that is one token so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Symbol {
    pub id: u32,
    pub start: usize,
    /// Bytes; 0 once it was merged into its left neighbour.
    pub len: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

impl Symbol {
    /// Its first byte and the one after its last.
    pub fn range(&self) -> (usize, usize) {
        (self.start, self.start + self.len)
    }
}

/// A possible merge of two neighbours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Merge {
    /// Ordered by priority; of equal ones the leftmost is first.
    pub rank: u32,
    pub id: u32,
}

/// A text as a sequence of symbols.
#[derive(Debug, Default)]
pub(crate) struct Symbols(Vec<Symbol>);

impl Symbols {
    pub fn with_capacity(count: usize) -> Self {
        Self(Vec::with_capacity(count))
    }

    /// Appends a token of so many bytes.
    pub fn push(&mut self, id: u32, len: usize) {
        let index = self.0.len();
        let previous = index.checked_sub(1);
        let start = match self.0.last_mut() {
            Some(last) => {
                last.next = Some(index);
                last.start + last.len
            }
            None => 0,
        };
        self.0.push(Symbol { id, start, len, previous, next: None });
    }

    /// Merges neighbours until `offer` returns nothing for any pair.
    pub fn merge(&mut self, offer: impl Fn(&Symbol, &Symbol) -> Option<Merge>) {
        let mut queue = BinaryHeap::with_capacity(self.0.len());
        let propose = |symbols: &[Symbol], left: usize, right: usize| {
            let (one, other) = (&symbols[left], &symbols[right]);
            let merge = offer(one, other)?;
            Some(Reverse((merge.rank, left, one.len + other.len, merge.id)))
        };
        queue.extend((1..self.0.len()).filter_map(|right| propose(&self.0, right - 1, right)));
        let symbols = &mut self.0;
        while let Some(Reverse((_, left, len, id))) = queue.pop() {
            // Symbols only grow, so equal lengths mean that neither has changed.
            let Some(right) =
                symbols[left].next.filter(|&right| symbols[left].len + symbols[right].len == len)
            else {
                continue;
            };
            let after = symbols[right].next;
            symbols[right].len = 0;
            symbols[right].next = None;
            symbols[left] = Symbol { id, len, next: after, ..symbols[left] };
            if let Some(after) = after {
                symbols[after].previous = Some(left);
                queue.extend(propose(symbols, left, after));
            }
            if let Some(before) = symbols[left].previous {
                queue.extend(propose(symbols, before, left));
            }
        }
    }

    /// The remaining symbols, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Symbol> {
        self.0.iter().filter(|symbol| symbol.len > 0)
    }
}
