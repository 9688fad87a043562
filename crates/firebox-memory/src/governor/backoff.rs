//! The wait before more layers are loaded again.

/// Calm checks in a row before the first layer is loaded again.
const FIRST_WAIT_CHECKS: u32 = 3;
/// The longest wait in calm checks: some thousand tokens, or twenty minutes of slow ones. A failed attempt costs the time of
/// tens of streamed tokens.
const LONGEST_WAIT_CHECKS: u32 = 128;
/// Waits that pass before a number of layers that failed is tried again.
const CEILING_WAITS: u32 = 4;
/// Waits without an incident after which earlier failures are forgotten.
const FORGIVING_WAITS: u32 = 16;
/// Passes that have to go by for each pass that a relapse has cost. They bound the loss to about four percent, however often
/// checks occur.
const PASSES_PER_LOST_PASS: f64 = 25.0;
/// The most lost passes that count for one change: a machine that was suspended may report thousands.
const MAX_LOST_PASSES: f64 = 64.0;

/// A backoff: how long to wait before more layers are loaded, and how many may be.
///
/// Every relapse doubles the wait. It also sets a ceiling: the number of layers resident at the relapse is tried again only
/// after a longer wait, and then one layer at a time. Residency thus settles just below what is possible and rarely tries for
/// more. Waits are counted in checks, of which a slow model has many to a hundred passes; therefore the time lost by a
/// relapse has to be earned back in passes as well.
#[derive(Debug)]
pub(super) struct Backoff {
    owed: f64,
    calm: u32,
    wait: u32,
    ceiling: Option<usize>,
    tried: bool,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { owed: 0.0, calm: 0, wait: FIRST_WAIT_CHECKS, ceiling: None, tried: false }
    }
}

impl Backoff {
    /// Counts a pass.
    pub fn count_pass(&mut self) {
        self.owed = (self.owed - 1.0).max(0.0);
    }

    /// Charges the time of so many streamed passes.
    pub fn charge(&mut self, passes: f64) {
        self.owed += passes.min(MAX_LOST_PASSES) * PASSES_PER_LOST_PASS;
    }

    /// Counts a check without an incident.
    pub fn count_calm_check(&mut self) {
        self.calm = self.calm.saturating_add(1);
        if self.calm >= self.wait * CEILING_WAITS {
            self.ceiling = self.ceiling.map(|ceiling| ceiling.saturating_add(1));
        }
        if self.calm >= self.wait * FORGIVING_WAITS {
            *self = Self { calm: self.calm, owed: self.owed, ..Self::default() };
        }
    }

    /// Restarts the wait because of an incident that no eviction could have prevented.
    pub fn restart_wait(&mut self) {
        self.calm = 0;
    }

    /// Records that memory became short with `kept` resident layers. While it stays short, lower numbers tell nothing new:
    /// another process may take the memory.
    pub fn pressure_rose(&mut self, kept: usize) {
        self.calm = 0;
        if self.tried || self.ceiling.is_none() {
            self.failed(kept);
        }
    }

    /// Records that `kept` layers cannot be resident.
    pub fn failed(&mut self, kept: usize) {
        self.calm = 0;
        self.ceiling = Some(kept);
        // If nothing was tried since the last failure, this is no relapse.
        if std::mem::take(&mut self.tried) {
            self.wait = (self.wait * 2).min(LONGEST_WAIT_CHECKS);
        }
    }

    /// Records that more layers are resident than before.
    pub fn grew(&mut self) {
        self.tried = true;
    }

    /// Returns how many more layers may be loaded now.
    pub fn allowance(&self, kept: usize) -> usize {
        if self.calm < self.wait || self.owed > 0.0 {
            return 0;
        }
        self.ceiling.map_or(usize::MAX, |ceiling| ceiling.saturating_sub(kept + 1))
    }
}
