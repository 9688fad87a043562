//! Profiles of devices to simulate.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::ScheduleError;
use firebox_memory::planner::DeviceProfile;
use firebox_memory::thermal::{Heat, HeatMarks};

/// A device to simulate, read from a TOML file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The number of cores.
    pub cores: u32,
    /// Operations per second of each core on a prompt.
    pub core_operations_per_second: f64,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of it that Firebox may take.
    pub budget: u64,
    /// The speeds of memory and disk.
    pub speed: DeviceProfile,
    /// The thermal behaviour.
    pub heat: HeatProfile,
    /// Other programs.
    pub others: OthersProfile,
}

/// A body that work heats and that cools towards its surroundings.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeatProfile {
    /// Degrees at the sensor when idle.
    pub idle: f64,
    /// Degrees above that under full load without throttling.
    pub rise: f64,
    /// The time constant in seconds: two thirds of a change happen within it.
    pub seconds: f64,
    /// The temperatures of the states fair, serious and critical, and the hysteresis.
    pub marks: [f32; 4],
    /// The slowdown in each state: nominal, fair, serious and critical.
    pub slowdown: [f64; 4],
}

/// Other programs, which are opened and closed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OthersProfile {
    /// Bytes that the system always takes.
    pub system: u64,
    /// The most bytes of a program.
    pub largest: u64,
    /// Programs opened per hour.
    pub per_hour: f64,
    /// Minutes that one stays open, on average.
    pub minutes: f64,
    /// Whether the system sends memory warnings.
    pub warns: bool,
}

impl HeatProfile {
    pub(super) fn marks(&self) -> HeatMarks {
        let [fair, serious, critical, cooling] = self.marks;
        HeatMarks { fair, serious, critical, cooling }
    }

    pub(super) fn slowdown(&self, heat: Heat) -> f64 {
        self.slowdown[heat as usize]
    }
}

impl Profile {
    /// Reads a profile from a file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ScheduleError> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| refused(&name, error))?;
        Self::parse(&name, &text)
    }

    /// Parses the text of a file of that name.
    pub fn parse(name: &str, text: &str) -> Result<Self, ScheduleError> {
        let profile: Self = toml::from_str(text).map_err(|error| refused(name, error))?;
        profile.check().map_err(|reason| refused(name, reason))?;
        Ok(profile)
    }

    /// Returns the operations per second of all cores on a prompt.
    pub(super) fn operations_per_second(&self) -> f64 {
        self.core_operations_per_second * f64::from(self.cores)
    }

    fn check(&self) -> Result<(), String> {
        let positive = |setting: &str, value: f64| {
            let sound = value.is_finite() && value > 0.0;
            if sound { Ok(()) } else { Err(format!("{setting} = {value}: should be above 0")) }
        };
        positive("cores", f64::from(self.cores))?;
        positive("core_operations_per_second", self.core_operations_per_second)?;
        positive("speed.read_bytes_per_second", self.speed.read_bytes_per_second)?;
        positive("speed.weight_bytes_per_second", self.speed.weight_bytes_per_second)?;
        positive("speed.contention", self.speed.contention)?;
        positive("heat.rise", self.heat.rise)?;
        positive("heat.seconds", self.heat.seconds)?;
        positive("others.minutes", self.others.minutes)?;
        positive("budget", self.budget as f64)?;
        if !(self.others.per_hour.is_finite() && self.others.per_hour >= 0.0) {
            return Err(format!("others.per_hour = {}: should be 0 or more", self.others.per_hour));
        }
        let [fair, serious, critical, cooling] = self.heat.marks;
        if !(fair < serious && serious < critical && cooling >= 0.0) {
            return Err("heat.marks: should rise from fair over serious to critical, and end with how far \
                        it has to cool"
                .into());
        }
        if !self.heat.slowdown.iter().all(|slowdown| slowdown.is_finite() && *slowdown >= 1.0) {
            return Err("heat.slowdown: should be 1 or more in each of the four states".into());
        }
        let taken = self.others.system.saturating_add(self.budget);
        if taken > self.memory {
            return Err(format!(
                "{taken} bytes of others.system and budget are more than memory = {}",
                self.memory
            ));
        }
        Ok(())
    }
}

fn refused(name: &str, reason: impl ToString) -> ScheduleError {
    let reason = reason.to_string().trim_end().replace('\n', "; ");
    ScheduleError::SimulatedDevice { name: name.to_owned(), reason }
}
