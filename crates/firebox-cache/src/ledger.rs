//! The account of a pool's pages, and the holders of idle ones.

use std::sync::Weak;

/// Approves pages before they are made, and is notified when they are freed.
pub trait PageLedger: std::fmt::Debug + Send + Sync {
    /// Approves a page of `bytes` and counts it as made.
    fn may_allocate(&self, bytes: usize) -> bool;
    /// Returns whether a page of `bytes` could be made without evicting anything.
    fn has_headroom(&self, bytes: usize) -> bool;
    /// Pages of `bytes` in total were freed.
    fn freed(&self, bytes: usize);
    /// Approved pages have allocated `bytes` more: buffers grow as they are filled.
    fn grew(&self, bytes: usize) {
        let _ = bytes;
    }
    /// Approved pages have released `bytes`.
    fn shrank(&self, bytes: usize) {
        let _ = bytes;
    }
    /// Registers a holder of idle pages of a pool with this ledger.
    fn register_reclaimable(&self, reclaimable: &Weak<dyn Reclaimable>) {
        let _ = reclaimable;
    }
    /// Asks other holders that draw on the same memory to free an idle page, because a sequence needs one. Returns whether any
    /// page was freed. Called without holding a pool's lock.
    fn reclaim_from_others(&self) -> bool {
        false
    }
}

/// Holds pages that no sequence is using.
pub trait Reclaimable: std::fmt::Debug + Send + Sync {
    /// Frees one page. Returns whether it went back to its pool.
    fn reclaim_page(&self) -> bool;
    /// Frees all pages, including those that sequences still read.
    fn reclaim_all(&self);
}
