//! The plan and the settings of a governor.

use std::time::Duration;

use serde::Serialize;

/// The layers that should stay in memory, and the step times that are expected with and without them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ResidencyPlan {
    /// The layers to keep, in order of preference.
    pub keep: Vec<usize>,
    /// The expected time of a step with all of them resident.
    pub step_time: Duration,
    /// The expected time of a step with none of them resident. Better too low than too high: too low costs a moment without
    /// resident layers to find out, while too high tolerates steps that are as slow.
    pub streaming_step_time: Duration,
}

/// How often a governor checks, and how careful it is. Time is the sum of step times.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GovernorConfig {
    /// Tokens between two checks.
    pub check_tokens: usize,
    /// Time between two checks, if that is shorter.
    pub check_time: Duration,
    /// Tokens between two readings of memory pressure. A reading takes a tenth of a millisecond, too much for every token of
    /// a small model.
    pub poll_tokens: usize,
    /// Time between two readings, if that is shorter: systems kill within seconds.
    pub poll_time: Duration,
    /// Bytes that must remain available after a layer is loaded.
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
