//! A day on a device that is not there, in seconds.
//!
//! The scheduler, queues, governors, plans, budget and thermometer are the real ones; models, disk, heat, other programs
//! and the clock are made. A [`Profile`] says what the device is like and a [`Mix`] what is asked of it. After every
//! layer it is checked that nothing is as it must never be; see [`Report::violations`].
//!
//! What is simulated is who has to wait for whom. How fast a real device is depends on the numbers in its profile, of
//! which some are published and others assumed, as each file says.

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

/// Runs a mix on a device for so many hours, from midnight on. The same seed gives the same report.
pub fn simulate(profile: &Profile, mix: &Mix, hours: f64, seed: u64) -> Result<Report, ScheduleError> {
    if !(hours.is_finite() && hours > 0.0 && hours <= 24.0 * 366.0) {
        let (setting, value) = ("hours", hours.to_string());
        return Err(ScheduleError::Setting { setting, value, reason: "should be above 0 and within a year" });
    }
    simulate_from(profile, mix, Duration::ZERO, Duration::from_secs_f64(hours * 3600.0), seed)
}

/// The same from another time of the day on.
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
