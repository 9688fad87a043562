use super::{Level, Pressure};

/// From here on memory is short. Where earlyoom is installed it ends programs at a tenth, if swap is as full.
const SHORT_PERCENT: u64 = 10;
/// On a large machine a tenth is much; nothing that wants memory suddenly wants more than this at once.
const SHORT_MOST: u64 = 1 << 30;
/// From here on little is between us and being killed: at about one percent the kernel is out of free pages.
const CRITICAL_PERCENT: u64 = 4;
/// A few of the largest allocations that programs make at once.
const CRITICAL_MOST: u64 = 256 << 20;

/// A group has its limit for itself: nobody else takes what is left of it, so that half of that will do.
const GROUP_SHARE: u64 = 2;

/// What can still be taken, out of how much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes that can be taken.
    pub available: u64,
    /// Bytes in all.
    pub total: u64,
    /// Whether others take from it too.
    pub is_shared: bool,
}

impl Room {
    /// How short memory is under some strain.
    ///
    /// Strain alone is no shortness: whoever reads files larger than memory, as a streamed model is, makes the kernel
    /// reclaim and wait without anybody lacking anything. It moves the marks up, because where little is left it
    /// means that what seems available is in use.
    pub fn under(self, strain: Level) -> Pressure {
        let factor = match strain {
            Level::None => 1,
            Level::Some => 2,
            Level::Critical => 3,
        };
        let share = if self.is_shared { 1 } else { GROUP_SHARE };
        let mark = |percent: u64, most: u64| (self.total / 100 * percent).min(most) * factor / share;
        let short = mark(SHORT_PERCENT, SHORT_MOST);
        let level = if self.available < mark(CRITICAL_PERCENT, CRITICAL_MOST) {
            Level::Critical
        } else if self.available < short {
            Level::Some
        } else {
            Level::None
        };
        Pressure { level, available: Some(self.available.saturating_sub(short)) }
    }
}
