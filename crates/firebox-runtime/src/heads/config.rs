//! The configuration of a pool of heads.

use std::time::Duration;

use firebox_schedule::Succession as HeadHistory;

use crate::Budget;

/// The name of the head that replaces heads that cannot be used. It is loaded when the pool is created and stays in memory.
pub const FALLBACK: &str = "universal";

/// Configures a pool of heads.
#[derive(Debug, Clone)]
pub struct HeadPoolConfig {
    /// How long a sequence waits for a head that is not in memory before it takes the fallback.
    pub max_wait: Duration,
    /// The most bytes of heads in memory.
    pub max_bytes: u64,
    /// The budget that heads in memory are charged to. The default is the budget that their model was
    /// [fitted](crate::Model::open_within) into.
    pub budget: Option<Budget>,
    /// Which head usually follows which, for prefetching.
    pub history: HeadHistory,
}

impl HeadPoolConfig {
    /// Waits up to a minute for a head, rather than taking the fallback.
    pub fn patient() -> Self {
        Self { max_wait: Duration::from_secs(60), ..Self::default() }
    }
}

impl Default for HeadPoolConfig {
    fn default() -> Self {
        Self {
            max_wait: Duration::from_millis(500),
            max_bytes: u64::MAX,
            budget: None,
            history: HeadHistory::default(),
        }
    }
}
