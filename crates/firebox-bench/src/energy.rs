//! Energy, where the machine counts it.

use std::fs;
use std::path::{Path, PathBuf};

/// Counters of what the processors have taken.
#[derive(Debug, Clone)]
pub struct Energy(Vec<Counter>);

#[derive(Debug, Clone)]
struct Counter {
    file: PathBuf,
    /// Where it begins at zero again.
    range: u64,
}

/// The values of the counters at one moment.
#[derive(Debug, Clone)]
pub struct Reading(Vec<u64>);

impl Energy {
    /// The counters of this machine, if it has any that may be read.
    pub fn of_machine() -> Option<Self> {
        Self::below(Path::new("/sys/class/powercap"))
    }

    /// One for each processor: counters within one are parts of it and would count twice.
    fn below(folder: &Path) -> Option<Self> {
        let zones = fs::read_dir(folder).ok()?.flatten().filter(|entry| {
            let name = entry.file_name();
            name.to_str().is_some_and(|name| name.matches(':').count() == 1)
        });
        let counters = zones.filter_map(|zone| {
            let (file, range) = (zone.path().join("energy_uj"), zone.path().join("max_energy_range_uj"));
            number(&file)?;
            Some(Counter { range: number(&range)?, file })
        });
        let counters: Vec<_> = counters.collect();
        (!counters.is_empty()).then_some(Self(counters))
    }

    /// Reads the counters.
    pub fn read(&self) -> Option<Reading> {
        self.0.iter().map(|counter| number(&counter.file)).collect::<Option<_>>().map(Reading)
    }

    /// Joules since then.
    pub fn since(&self, before: &Reading) -> Option<f64> {
        let now = self.read()?;
        let taken = self.0.iter().zip(&before.0).zip(&now.0).map(|((counter, &before), &now)| {
            now.checked_sub(before).unwrap_or_else(|| now + counter.range.saturating_sub(before))
        });
        Some(taken.sum::<u64>() as f64 / 1e6)
    }
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_added_and_may_begin_again() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Energy::below(folder.path()).is_none(), "nothing is counted");
        let write = |zone: &str, energy: u64| {
            let zone = folder.path().join(zone);
            fs::create_dir_all(&zone).unwrap();
            fs::write(zone.join("energy_uj"), energy.to_string()).unwrap();
            fs::write(zone.join("max_energy_range_uj"), "10000000").unwrap();
        };
        let all = |one, other| {
            write("intel-rapl:0", one);
            write("intel-rapl:1", other);
            // The cores of the first.
            write("intel-rapl:0:0", one / 2);
        };
        all(1_000_000, 9_000_000);
        let energy = Energy::below(folder.path()).unwrap();
        let before = energy.read().unwrap();
        all(3_000_000, 500_000);
        assert_eq!(energy.since(&before).unwrap(), 2.0 + 1.5);
    }
}
