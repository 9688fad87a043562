use std::time::Duration;

use serde::Serialize;

use crate::{Priority, ScheduleCounters};
use firebox_memory::thermal::Heat;

/// What came of some hours on a device that is not there.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// What the device is called.
    pub device: String,
    /// Its cores.
    pub cores: u32,
    /// Hours that passed.
    pub hours: f64,
    /// What chance began with.
    pub seed: u64,
    /// What was asked for, as a share of what the device could do if it stayed cool, kept everything in memory and took
    /// one request after the other.
    pub asked: f64,
    /// The share of the time in which something ran.
    pub busy: f64,
    /// The share of the time in which there was work and none of it in memory.
    pub waiting: f64,
    /// By priority, the least urgent first.
    pub classes: Vec<ClassReport>,
    /// The models.
    pub models: Vec<ModelReport>,
    /// The share of the time in each state of heat.
    pub heat: Vec<(Heat, f64)>,
    /// Degrees.
    pub hottest: f64,
    /// Bytes that might be held.
    pub budget: u64,
    /// The most that were.
    pub most_held: u64,
    /// How often the system warned of short memory.
    pub warnings: u64,
    /// Seconds in which memory was short.
    pub short_seconds: u64,
    /// The most seconds in a row in which more memory was in use than there was.
    pub longest_overcommitment: u64,
    /// Requests to a model that has followed the one before at other times, and whose first layer was in memory.
    pub ready_at_once: u64,
    /// Of how many such requests.
    pub changes: u64,
    /// What the schedule has counted.
    pub schedule: ScheduleCounters,
    /// Deadlines of pinned tasks that were missed without a reason that no schedule can change.
    pub unexcused: u64,
    /// How often something was as it must never be.
    pub violations: u64,
    /// The first of these.
    pub examples: Vec<String>,
}

/// What came of the requests of one priority.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassReport {
    /// Which.
    pub priority: Priority,
    /// Requests that came.
    pub arrived: u64,
    /// That got all they wanted.
    pub done: u64,
    /// That were refused because too many waited.
    pub refused: u64,
    /// That ran or waited at the end.
    pub open: u64,
    /// Tokens they got.
    pub tokens: u64,
    /// The share of deadlines that were met.
    pub met: f64,
    /// Time to the first token: of half of them, and of all but one in a hundred.
    pub first_token: (Duration, Duration),
}

/// What came of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelReport {
    /// Its name.
    pub name: String,
    /// Layers it has.
    pub layers: usize,
    /// Layers that were to be kept in memory.
    pub planned: usize,
    /// The fewest that were.
    pub fewest_kept: usize,
    /// How many are at the end.
    pub kept: usize,
    /// Tokens it made.
    pub tokens: u64,
    /// Bytes that were read of it.
    pub streamed_bytes: u64,
    /// How often layers were let go because memory got short or steps too dear.
    pub sheds: u64,
    /// How often one came back.
    pub growths: u64,
}

/// The value that a share of all are not above.
pub(super) fn quantile(sorted: &[Duration], share: f64) -> Duration {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or_default()
}
