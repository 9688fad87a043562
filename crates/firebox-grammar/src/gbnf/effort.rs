use std::cell::Cell;

use super::characters::Characters;

/// Ranges of characters that may be looked at for one grammar. What is looked at is what a translation costs: sets of characters
/// become larger with every rule that they are handed on by, and rows of parts are looked at anew from each of their parts.
const MOST: usize = 64 << 20;

/// A range in a set that is remembered counts for so many: it takes memory until the whole grammar is translated.
const KEPT: usize = 16;

/// What has been spent on a grammar. Once that is too much, whatever goes on is to say as little as it can and to end, since what
/// comes of it is of no use any more.
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
        self.spend(KEPT * (1 + set.ranges()));
    }

    pub fn is_spent(&self) -> bool {
        self.spent.get() > MOST
    }

    /// What is wrong, if too much has been spent.
    pub fn check(&self) -> Result<(), String> {
        if self.is_spent() {
            return Err(format!(
                "more than {MOST} ranges of characters would have to be looked at; use fewer characters that stand alone, and \
                 put long rows of parts that can be left out or begin alike into rules of their own"
            ));
        }
        Ok(())
    }
}
