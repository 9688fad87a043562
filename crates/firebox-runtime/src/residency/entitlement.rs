//! What models that share a budget are entitled to, and which of two may take memory from the other.

use std::cmp::{Ordering, Reverse};
use std::sync::Weak;

use firebox_cache::Reclaimable;

use super::config::CONFIG;
use crate::schedule::Priority;

/// The demand for a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Urgency {
    /// The highest priority of its requests.
    pub priority: Priority,
    /// Whether one of these requests still waits for its first token.
    pub awaits_first_token: bool,
}

/// What a model that shares a budget is entitled to, and the demand for it.
#[derive(Debug)]
pub(super) struct Entitlement {
    /// Whether its weights are never evicted for another model.
    pub is_pinned: bool,
    /// Bytes of all its parts.
    pub bytes: u64,
    /// Bytes without which it cannot run.
    pub least: u64,
    /// Whether the model is open: before, other models do not count on it or take memory from it.
    pub is_open: bool,
    /// `None` if no request uses it.
    pub urgency: Option<Urgency>,
    /// When demand for it last began or ended, in the order of such changes.
    pub since: u64,
    /// Holders of pages of keys and values which no sequence uses now.
    pub idle_pages: Vec<Weak<dyn Reclaimable>>,
}

impl Entitlement {
    pub fn new(is_pinned: bool, bytes: u64, least: u64) -> Self {
        Self { is_pinned, bytes, least, is_open: false, urgency: None, since: 0, idle_pages: Vec::new() }
    }

    /// Sets the urgency. Returns whether demand begins or ends.
    pub fn set_urgency(&mut self, urgency: Option<Urgency>, changes: &mut u64) -> bool {
        let is_change = self.urgency.is_some() != urgency.is_some();
        if is_change {
            *changes += 1;
            self.since = *changes;
        }
        self.urgency = urgency;
        is_change
    }

    pub fn is_idle(&self) -> bool {
        self.urgency.is_none()
    }

    /// Returns whether a request waits for the first token.
    pub fn awaits_first_token(&self) -> bool {
        self.urgency.is_some_and(|urgency| urgency.awaits_first_token)
    }

    fn priority(&self) -> Option<Priority> {
        self.urgency.map(|urgency| urgency.priority)
    }

    /// Returns the holders of unused pages if the model is open, idle and not pinned.
    pub fn holders_of_idle_pages(&self) -> Option<Vec<Weak<dyn Reclaimable>>> {
        (self.is_open && self.is_idle() && !self.is_pinned).then(|| self.idle_pages.clone())
    }

    /// The order of eviction: models with the smallest key are asked for memory first. Those are idle models, the one that has been idle
    /// for longest first, then the least urgent ones, the largest of them first, and pinned ones last.
    pub fn eviction_key(&self) -> impl Ord + use<> {
        let since = if self.is_idle() { self.since } else { 0 };
        (self.is_pinned, self.priority(), since, Reverse(self.bytes))
    }

    /// Returns whether the model may take resident parts from another: if its requests have a higher priority, or the
    /// same and it is smaller, so that each byte saves it more reading. A model that waits for its first token needs
    /// every part once: it would gain nothing from other models' memory, and is about to use its own parts.
    pub fn comes_before(&self, other: &Self) -> bool {
        let (numerator, denominator) = CONFIG.smaller_by;
        let is_smaller = self.bytes * denominator < other.bytes * numerator;
        !other.is_pinned
            && match self.priority().cmp(&other.priority()) {
                Ordering::Greater => true,
                Ordering::Equal => !self.is_idle() && is_smaller && !other.awaits_first_token(),
                Ordering::Less => false,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urgency(priority: Priority, awaits_first_token: bool) -> Option<Urgency> {
        Some(Urgency { priority, awaits_first_token })
    }

    #[test]
    fn memory_goes_to_the_more_urgent_then_to_the_smaller_model() {
        let mut changes = 0;
        let mut small = Entitlement::new(false, 100, 0);
        let mut large = Entitlement::new(false, 1000, 0);
        let pinned = Entitlement::new(true, 10, 0);
        assert!(!small.comes_before(&large) && !large.comes_before(&small), "both are idle");
        large.set_urgency(urgency(Priority::Normal, true), &mut changes);
        assert!(large.comes_before(&small) && !large.comes_before(&pinned));
        small.set_urgency(urgency(Priority::Normal, false), &mut changes);
        assert!(!small.comes_before(&large), "the large model is about to use what it has");
        assert!(!large.comes_before(&small), "it would use once what the small one uses for every token");
        small.set_urgency(urgency(Priority::Normal, true), &mut changes);
        large.set_urgency(urgency(Priority::Normal, false), &mut changes);
        assert!(
            small.comes_before(&large) && !large.comes_before(&small),
            "it reads its parts now and can keep them"
        );
        small.set_urgency(urgency(Priority::Normal, false), &mut changes);
        assert!(small.comes_before(&large) && !large.comes_before(&small), "it is read more often");
        large.set_urgency(urgency(Priority::Interactive, false), &mut changes);
        assert!(large.comes_before(&small) && !small.comes_before(&large));
    }

    #[test]
    fn the_model_that_was_idle_for_longest_is_asked_first() {
        let mut changes = 0;
        let mut models: Vec<_> = [100, 200, 300].map(|bytes| Entitlement::new(false, bytes, 0)).into();
        for at in [2, 0, 1] {
            models[at].set_urgency(urgency(Priority::Normal, true), &mut changes);
            assert!(models[at].set_urgency(None, &mut changes));
        }
        models.push(Entitlement::new(true, 400, 0));
        models.push(Entitlement::new(false, 500, 0));
        models[4].set_urgency(urgency(Priority::Background, false), &mut changes);
        models.sort_by_cached_key(Entitlement::eviction_key);
        let order: Vec<u64> = models.iter().map(|model| model.bytes).collect();
        assert_eq!(order, [300, 100, 200, 500, 400], "then wanted models, and pinned ones last");
    }

    #[test]
    fn of_two_equally_urgent_models_the_larger_is_asked_first() {
        let mut changes = 0;
        let mut models = [100, 1000].map(|bytes| Entitlement::new(false, bytes, 0));
        models[0].set_urgency(urgency(Priority::Normal, false), &mut changes);
        models[1].set_urgency(urgency(Priority::Normal, true), &mut changes);
        models.sort_by_cached_key(Entitlement::eviction_key);
        assert_eq!(
            models[0].bytes, 1000,
            "it needs each of its parts once while the smaller one needs all of its parts all the time"
        );
    }
}
