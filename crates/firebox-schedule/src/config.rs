use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ScheduleError;
use firebox_memory::thermal::Heat;

/// Nobody wants to wait for longer, and what is reckoned from it stays far from the end of all numbers.
const LONGEST_QUANTUM: Duration = Duration::from_secs(60);
/// Who may be late by as much is never demoted.
const MOST_SLIPPAGE: f64 = 100.0;

/// How a schedule is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleConfig {
    /// How long a lane runs before one that is as urgent may have the machine.
    pub quantum: Duration,
    /// The same while the machine is hot.
    pub quantum_hot: Duration,
    /// The share of its period that a task may be late by, on average, before it is demoted.
    pub slippage: f64,
    /// Tokens a second of interactive and pinned tasks that ask for no other pace.
    pub target: f64,
    /// When such tasks should have their first token, if they do not say.
    pub first_token: Duration,
    /// The part of the machine that goes to lanes in the order of their waiting, whatever is more urgent.
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
            // One quantum in ten: what is ahead of its pace by two quanta does not miss a deadline for it.
            share: 0.1,
        }
    }
}

impl ScheduleConfig {
    /// Whether a schedule can be kept like this.
    pub fn check(&self) -> Result<(), ScheduleError> {
        let refuse = |setting, value: String, reason| Err(ScheduleError::Setting { setting, value, reason });
        for (setting, quantum) in [("quantum", self.quantum), ("quantum_hot", self.quantum_hot)] {
            if quantum.is_zero() || quantum > LONGEST_QUANTUM {
                return refuse(setting, format!("{quantum:?}"), "should be above 0 and at most a minute");
            }
        }
        if !(self.slippage > 0.0 && self.slippage <= MOST_SLIPPAGE) {
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
