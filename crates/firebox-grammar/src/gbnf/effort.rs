//! The limit of the cost of a translation.

use std::cell::Cell;

use super::characters::Characters;

/// The most ranges of characters that may be visited for one grammar. They are what a translation costs: sets grow with every
/// rule that passes them on, and sequences are visited again from each of their parts.
const MAX_RANGES: usize = 64 << 20;

/// The cost of a range in a stored set: it takes memory until the whole grammar is translated.
const STORED_RANGE_COST: usize = 16;

/// The cost of a translation so far. Once it exceeds the limit, all steps return as soon as they can, because their results
/// are discarded.
#[derive(Debug, Default)]
pub(super) struct Effort {
    spent: Cell<usize>,
}

impl Effort {
    pub fn spend(&self, ranges: usize) {
        self.spent.set(self.spent.get().saturating_add(ranges));
    }

    pub fn add(&self, to: &mut Characters, others: &Characters) {
        let looked_at = to.add(others);
        self.spend(looked_at);
    }

    pub fn meet(&self, one: &Characters, other: &Characters) -> bool {
        self.spend(1 + one.ranges().min(other.ranges()));
        one.meets(other)
    }

    pub fn keep(&self, set: &Characters) {
        self.spend(STORED_RANGE_COST * (1 + set.ranges()));
    }

    pub fn is_spent(&self) -> bool {
        self.spent.get() > MAX_RANGES
    }

    /// Returns an error if the limit is exceeded.
    pub fn check(&self) -> Result<(), String> {
        if self.is_spent() {
            return Err(format!(
                "more than {MAX_RANGES} ranges of characters would have to be looked at; use fewer characters that stand alone, and \
                 put long rows of parts that can be left out or begin alike into rules of their own"
            ));
        }
        Ok(())
    }
}
