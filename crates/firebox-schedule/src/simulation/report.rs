//! The report of a simulation.

use std::time::Duration;

use serde::Serialize;

use crate::{Priority, ScheduleCounters};
use firebox_memory::thermal::Heat;

/// The result of a simulation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The name of the device.
    pub device: String,
    /// Its cores.
    pub cores: u32,
    /// Simulated hours.
    pub hours: f64,
    /// The seed.
    pub seed: u64,
    /// The work that was asked for, as a share of what the device could do if it stayed cool, held everything in memory and
    /// ran one request after the other.
    pub asked: f64,
    /// The share of the time in which a model ran.
    pub busy: f64,
    /// The share of the time in which there was work and none of it was in memory.
    pub waiting: f64,
    /// Results of each priority, the least urgent first.
    pub classes: Vec<ClassReport>,
    /// Results of each model.
    pub models: Vec<ModelReport>,
    /// The share of the time in each thermal state.
    pub heat: Vec<(Heat, f64)>,
    /// The highest temperature in degrees.
    pub hottest: f64,
    /// Bytes of the budget.
    pub budget: u64,
    /// The most bytes held.
    pub most_held: u64,
    /// Memory warnings.
    pub warnings: u64,
    /// Seconds in which memory was short.
    pub short_seconds: u64,
    /// The most seconds in a row in which more memory was in use than existed.
    pub longest_overcommitment: u64,
    /// Predictable changes of the model whose first layer was in memory.
    pub ready_at_once: u64,
    /// Predictable changes of the model: those that had occurred before.
    pub changes: u64,
    /// Counters of the scheduler.
    pub schedule: ScheduleCounters,
    /// Deadlines of pinned tasks that the scheduler could have met and did not.
    pub unexcused: u64,
    /// Violated invariants.
    pub violations: u64,
    /// Descriptions of the first ones.
    pub examples: Vec<String>,
}

/// Results of the requests of one priority.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassReport {
    /// The priority.
    pub priority: Priority,
    /// Requests that arrived.
    pub arrived: u64,
    /// Requests that finished.
    pub done: u64,
    /// Requests that were refused because too many waited.
    pub refused: u64,
    /// Requests that ran or waited at the end.
    pub open: u64,
    /// Tokens of their answers.
    pub tokens: u64,
    /// The share of deadlines that were met.
    pub met: f64,
    /// The time to the first token: the median and the 99th percentile.
    pub first_token: (Duration, Duration),
}

/// Results of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelReport {
    /// Its name.
    pub name: String,
    /// Its layers.
    pub layers: usize,
    /// Layers that the plan keeps resident.
    pub planned: usize,
    /// The fewest resident layers.
    pub fewest_kept: usize,
    /// Resident layers at the end.
    pub kept: usize,
    /// Tokens it generated.
    pub tokens: u64,
    /// Bytes streamed from disk.
    pub streamed_bytes: u64,
    /// Evictions because of memory pressure or slow steps.
    pub sheds: u64,
    /// Layers that were loaded again.
    pub growths: u64,
}

/// Returns the quantile of sorted values.
pub(super) fn quantile(sorted: &[Duration], share: f64) -> Duration {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or_default()
}
