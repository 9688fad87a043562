//! Hooks through which a model's passes and pages notify the weight cache.

use std::sync::{Arc, Weak};
use std::time::Duration;

use firebox_cache::{PageLedger, Reclaimable};
use firebox_model::{StepHook, StreamedWeights};

use super::weights::CachedModel;

/// Lets the weight cache act between a model's steps.
#[derive(Debug)]
pub(super) struct ResidencyHook(pub Arc<CachedModel>);

impl StepHook for ResidencyHook {
    fn after_pass(&self, weights: &StreamedWeights, rows: usize, time: Duration) {
        self.0.pass_ended(weights, rows, time);
    }

    fn retains(&self, weights: &StreamedWeights, part: usize) -> bool {
        self.0.retain(weights, part)
    }

    fn retain_failed(&self, weights: &StreamedWeights, part: usize) {
        self.0.retain_failed(weights, part);
    }
}

/// Charges a model's pages of keys and values. Parts are evicted for them.
#[derive(Debug)]
pub(super) struct ChargedPages(pub Arc<CachedModel>);

impl PageLedger for ChargedPages {
    fn may_allocate(&self, bytes: usize) -> bool {
        self.0.charge_page(bytes as u64)
    }

    fn has_headroom(&self, bytes: usize) -> bool {
        self.0.budget.left() >= bytes as u64
    }

    fn freed(&self, bytes: usize) {
        self.0.release_pages(bytes as u64);
    }

    fn grew(&self, bytes: usize) {
        self.0.page_filled(bytes as u64);
    }

    fn shrank(&self, bytes: usize) {
        self.0.page_emptied(bytes as u64);
    }

    fn register_reclaimable(&self, reclaimable: &Weak<dyn Reclaimable>) {
        self.0.register_idle_pages(reclaimable);
    }

    fn reclaim_from_others(&self) -> bool {
        self.0.is_shared() && self.0.release_idle_page()
    }
}
