//! Simulates a day on a device within seconds.
//!
//! The scheduler, queues, governors, plans, budget and thermometer are the real ones; models, disk, heat, other programs and
//! the clock are simulated. A [`Profile`] describes the device and a [`Mix`] its load. Invariants are checked after every
//! layer; see [`Report::violations`].
//!
//! The simulation shows which requests wait for which. Its absolute speed depends on the numbers of the profile, some of
//! which are published and others assumed, as each file says.

mod device;
mod mix;
mod profile;
mod random;
mod report;
mod served;
mod tally;
mod world;

pub use mix::{Mix, SimulatedModel, Traffic};
pub use profile::{HeatProfile, OthersProfile, Profile};
pub use report::{ClassReport, ModelReport, Report};

use std::time::Duration;

use crate::ScheduleError;
use world::World;

/// Simulates a number of hours from midnight on. The same seed gives the same report.
pub fn simulate(profile: &Profile, mix: &Mix, hours: f64, seed: u64) -> Result<Report, ScheduleError> {
    if !(hours.is_finite() && hours > 0.0 && hours <= 24.0 * 366.0) {
        let (setting, value) = ("hours", hours.to_string());
        return Err(ScheduleError::Setting { setting, value, reason: "should be above 0 and within a year" });
    }
    simulate_from(profile, mix, Duration::ZERO, Duration::from_secs_f64(hours * 3600.0), seed)
}

/// Simulates a span of time that begins at another time of day.
pub fn simulate_from(
    profile: &Profile,
    mix: &Mix,
    begin: Duration,
    length: Duration,
    seed: u64,
) -> Result<Report, ScheduleError> {
    let mut world = World::new(profile, mix, begin, seed)?;
    world.run(length);
    Ok(world.report(seed))
}

#[cfg(test)]
mod tests;
