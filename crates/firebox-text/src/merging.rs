//! Neighbours become one token, the pair that comes first of all before any other.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A run of text that is one token so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Symbol {
    pub id: u32,
    pub start: usize,
    /// In bytes; 0 once it was merged into its left neighbour.
    pub len: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

impl Symbol {
    /// Its first byte, and the one behind its last.
    pub fn range(&self) -> (usize, usize) {
        (self.start, self.start + self.len)
    }
}

/// What two neighbours would become.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Merge {
    /// The least merges first; of equal ones the leftmost.
    pub rank: u32,
    pub id: u32,
}

/// A text as a row of symbols.
#[derive(Debug, Default)]
pub(crate) struct Symbols(Vec<Symbol>);

impl Symbols {
    pub fn with_capacity(count: usize) -> Self {
        Self(Vec::with_capacity(count))
    }

    /// Puts a token behind the others that stands for so many bytes.
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

    /// Merges neighbours until `offer` has nothing for any two of them.
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
            // Symbols only grow, so that two that are as long as they were have not changed.
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

    /// What is left of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Symbol> {
        self.0.iter().filter(|symbol| symbol.len > 0)
    }
}
