//! The settings of a scheduler.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ScheduleError;
use firebox_memory::thermal::Heat;

/// Longer quanta are never useful, and bounded ones keep sums from overflowing.
const MAX_QUANTUM: Duration = Duration::from_secs(60);
/// A task that may be this late is never demoted.
const MAX_SLIPPAGE: f64 = 100.0;

/// Settings of a scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleConfig {
    /// How long a model runs before another one of the same urgency may run.
    pub quantum: Duration,
    /// The quantum on a hot machine.
    pub quantum_hot: Duration,
    /// The average lateness, as a share of its period, from which on a task is demoted.
    pub slippage: f64,
    /// Tokens per second of interactive and pinned tasks that ask for no other pace.
    pub target: f64,
    /// The deadline of their first token, if they set none.
    pub first_token: Duration,
    /// The share of the quanta that goes to models in the order of their waiting, whatever else is urgent.
    pub share: f64,
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self {
            quantum: Heat::Nominal.quantum(),
            quantum_hot: Heat::Serious.quantum(),
            slippage: 0.3,
            target: 20.0,
            first_token: Duration::from_secs(2),
            // One quantum in ten: a task that is ahead of its pace by two quanta still meets its deadline.
            share: 0.1,
        }
    }
}

impl ScheduleConfig {
    /// Checks the settings.
    pub fn check(&self) -> Result<(), ScheduleError> {
        let refuse = |setting, value: String, reason| Err(ScheduleError::Setting { setting, value, reason });
        for (setting, quantum) in [("quantum", self.quantum), ("quantum_hot", self.quantum_hot)] {
            if quantum.is_zero() || quantum > MAX_QUANTUM {
                return refuse(setting, format!("{quantum:?}"), "should be above 0 and at most a minute");
            }
        }
        if !(self.slippage > 0.0 && self.slippage <= MAX_SLIPPAGE) {
            return refuse(
                "slippage",
                self.slippage.to_string(),
                "should be above 0, such as 0.3, and at most 100",
            );
        }
        if !(self.target.is_finite() && self.target > 0.0) {
            return refuse("target", self.target.to_string(), "should be above 0, in tokens a second");
        }
        if !(0.01..=0.5).contains(&self.share) {
            return refuse("share", self.share.to_string(), "should be from 0.01 to 0.5");
        }
        Ok(())
    }

    pub(super) fn quantum(&self, heat: Heat) -> Duration {
        if heat < Heat::Serious { self.quantum } else { self.quantum_hot }
    }
}
