//! From available memory to a level of pressure.

use super::{Level, Pressure};

/// Below this percentage memory is short. earlyoom, where installed, kills processes at a tenth if swap is as full.
const SHORT_PERCENT: u64 = 10;
/// The most that counts as short: on a large machine a tenth is much more than any process takes at once.
const SHORT_MAX_BYTES: u64 = 1 << 30;
/// Below this percentage a kill is near: at about one percent the kernel has no free pages.
const CRITICAL_PERCENT: u64 = 4;
/// The most that counts as critical: a few of the largest allocations that programs make at once.
const CRITICAL_MAX_BYTES: u64 = 256 << 20;

/// Divides the marks for a control group, whose remaining memory no other group takes.
const GROUP_DIVISOR: u64 = 2;

/// Memory that is available, out of a total.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headroom {
    /// Bytes that can be taken.
    pub available: u64,
    /// Bytes in all.
    pub total: u64,
    /// Whether other processes take from it too.
    pub is_shared: bool,
}

impl Headroom {
    /// Returns the pressure under some strain.
    ///
    /// Strain alone does not mean that memory is short: reading files larger than memory, as a streamed model does, makes the
    /// kernel reclaim pages and wait although nothing lacks memory. Strain raises the marks instead, because with little left
    /// it means that memory which seems available is in use.
    pub fn pressure_under(self, strain: Level) -> Pressure {
        let factor = match strain {
            Level::None => 1,
            Level::Some => 2,
            Level::Critical => 3,
        };
        let share = if self.is_shared { 1 } else { GROUP_DIVISOR };
        let mark = |percent: u64, most: u64| (self.total / 100 * percent).min(most) * factor / share;
        let short = mark(SHORT_PERCENT, SHORT_MAX_BYTES);
        let level = if self.available < mark(CRITICAL_PERCENT, CRITICAL_MAX_BYTES) {
            Level::Critical
        } else if self.available < short {
            Level::Some
        } else {
            Level::None
        };
        Pressure { level, available: Some(self.available.saturating_sub(short)) }
    }
}
