use std::time::Duration;

use serde::Serialize;

/// What should stay in memory, and what that is expected to be worth.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ResidencyPlan {
    /// The layers to keep, in the order in which they are to be kept.
    pub keep: Vec<usize>,
    /// What a step is expected to take when they are kept.
    pub step_time: Duration,
    /// What a step is expected to take when nothing is. Rather too little than too much: at worst that costs a moment
    /// without kept layers to find out, while too much lets steps be as slow until something else gives them away.
    pub streaming_step_time: Duration,
}

/// How often a governor looks, and how careful it is. Time is the sum of what steps took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GovernorConfig {
    /// Tokens from one check to the next.
    pub check_tokens: usize,
    /// Time from one check to the next, where that is shorter.
    pub check_time: Duration,
    /// Tokens from one look at memory to the next: reading files costs a tenth of a millisecond, which a small model
    /// would notice after every token.
    pub poll_tokens: usize,
    /// Time from one look at memory to the next, where that is shorter: systems kill within seconds.
    pub poll_time: Duration,
    /// Bytes that must be available beyond what a layer takes before it is kept.
    pub margin: u64,
}

impl Default for GovernorConfig {
    fn default() -> Self {
        Self {
            check_tokens: 64,
            check_time: Duration::from_secs(10),
            poll_tokens: 16,
            poll_time: Duration::from_millis(250),
            margin: 64 << 20,
        }
    }
}
