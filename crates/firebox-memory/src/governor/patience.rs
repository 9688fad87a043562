/// Calm checks in a row before the first layer is kept again.
const FIRST_WAIT: u32 = 3;
/// Some thousand tokens, or twenty minutes where tokens are slow: an attempt that fails costs what tens of streamed
/// tokens do.
const LONGEST_WAIT: u32 = 128;
/// What went wrong before is tried again only after that many times the usual wait.
const CEILING_WAITS: u32 = 4;
/// After that many times the usual wait in peace, what was is forgotten.
const FORGIVING_WAITS: u32 = 16;
/// Passes that go by for each that was lost to a change for the worse: what is lost stays within about four percent,
/// however often checks are made.
const PASSES_FOR_EACH_LOST: f64 = 25.0;
/// One change is not held against a model for longer than that many lost passes: a machine that slept has lost
/// thousands at once.
const MOST_LOST: f64 = 64.0;

/// How long to wait before more is kept, and how much.
///
/// Every relapse doubles the wait. And it leaves a ceiling: as many layers as were kept when things went wrong are not
/// kept again before a longer wait, and then one layer more at a time. So a residency settles just below what is
/// possible, and seldom tries for more. Waits are counted in checks, of which there are many to a hundred passes where
/// passes are slow; that is why what a relapse has cost has to be earned back in passes as well.
#[derive(Debug)]
pub(super) struct Patience {
    owed: f64,
    calm: u32,
    wait: u32,
    ceiling: Option<usize>,
    tried: bool,
}

impl Default for Patience {
    fn default() -> Self {
        Self { owed: 0.0, calm: 0, wait: FIRST_WAIT, ceiling: None, tried: false }
    }
}

impl Patience {
    /// Another pass is over.
    pub fn passed(&mut self) {
        self.owed = (self.owed - 1.0).max(0.0);
    }

    /// What was kept has cost the time of so many streamed passes.
    pub fn lost(&mut self, passes: f64) {
        self.owed += passes.min(MOST_LOST) * PASSES_FOR_EACH_LOST;
    }

    /// Another check found nothing wrong.
    pub fn calm(&mut self) {
        self.calm = self.calm.saturating_add(1);
        if self.calm >= self.wait * CEILING_WAITS {
            self.ceiling = self.ceiling.map(|ceiling| ceiling.saturating_add(1));
        }
        if self.calm >= self.wait * FORGIVING_WAITS {
            *self = Self { calm: self.calm, owed: self.owed, ..Self::default() };
        }
    }

    /// Something is wrong, if nothing that could be helped.
    pub fn disturbed(&mut self) {
        self.calm = 0;
    }

    /// Memory got short with so many layers kept. While that goes on, fewer layers say nothing new: it may be
    /// somebody else who takes it.
    pub fn pressed(&mut self, kept: usize) {
        self.calm = 0;
        if self.tried || self.ceiling.is_none() {
            self.failed(kept);
        }
    }

    /// It turned out that so many layers cannot be kept.
    pub fn failed(&mut self, kept: usize) {
        self.calm = 0;
        self.ceiling = Some(kept);
        // Where nothing was tried since the last time, this is no relapse.
        if std::mem::take(&mut self.tried) {
            self.wait = (self.wait * 2).min(LONGEST_WAIT);
        }
    }

    /// More is kept than before.
    pub fn tried(&mut self) {
        self.tried = true;
    }

    /// How many more layers may be kept now.
    pub fn room(&self, kept: usize) -> usize {
        if self.calm < self.wait || self.owed > 0.0 {
            return 0;
        }
        self.ceiling.map_or(usize::MAX, |ceiling| ceiling.saturating_sub(kept + 1))
    }
}
