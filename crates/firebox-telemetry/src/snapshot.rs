use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Counter, Distribution, Gauge, Histogram, Meters};
use firebox_memory::PageFaults;
use firebox_memory::{Account, Budget, process};

/// Everything that is known at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Of the process as a whole, as the system says.
    pub process: ProcessSnapshot,
    /// What memory is charged to.
    pub budgets: Vec<BudgetSnapshot>,
    /// Of every model, by name.
    pub models: Vec<ModelSnapshot>,
}

impl Snapshot {
    /// The model of that name.
    pub fn model(&self, name: &str) -> Option<&ModelSnapshot> {
        self.models.iter().find(|model| model.name == name)
    }
}

/// What the system says of the process, where it does.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSnapshot {
    /// Bytes that are resident.
    pub resident_bytes: Option<u64>,
    /// The most that were.
    pub peak_resident_bytes: Option<u64>,
    /// Bytes that no file backs.
    pub anonymous_bytes: Option<u64>,
    /// Bytes of mapped files.
    pub mapped_file_bytes: Option<u64>,
    /// Pages that were missing and found in memory.
    pub minor_faults: Option<u64>,
    /// Pages that had to come from the disk.
    pub major_faults: Option<u64>,
}

impl ProcessSnapshot {
    pub(super) fn now() -> Self {
        let faults = PageFaults::of_process();
        Self {
            resident_bytes: process::resident_bytes(),
            peak_resident_bytes: process::peak_resident_bytes(),
            anonymous_bytes: process::anonymous_bytes(),
            mapped_file_bytes: process::mapped_file_bytes(),
            minor_faults: faults.map(|faults| faults.minor),
            major_faults: faults.map(|faults| faults.major),
        }
    }
}

/// A budget.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetSnapshot {
    /// What it is called.
    pub name: String,
    /// Bytes in all; absent where it refuses nothing, and where it is a part of another.
    pub total: Option<u64>,
    /// Bytes that are kept for it whatever others take, where it is a part of another.
    pub reserved: Option<u64>,
    /// The most that was ever held at once.
    pub most_held: u64,
    /// Bytes that each account holds.
    pub held: BTreeMap<Account, u64>,
}

impl BudgetSnapshot {
    pub(super) fn of(name: &str, budget: &Budget) -> Self {
        let reserved = budget.reserved();
        Self {
            name: name.to_owned(),
            total: Some(budget.total()).filter(|total| *total < u64::MAX && reserved.is_none()),
            reserved,
            most_held: budget.most_held(),
            held: Account::ALL.into_iter().map(|account| (account, budget.held(account))).collect(),
        }
    }
}

/// A model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSnapshot {
    /// Its name.
    pub name: String,
    /// What it and all its sessions have counted, those that are gone too.
    #[serde(flatten)]
    pub meters: MeterSnapshot,
    /// What is now.
    pub gauges: BTreeMap<Gauge, u64>,
    /// Which parts of its weights are kept in memory, where they can be read from disk instead.
    pub kept: Vec<bool>,
    /// The sessions it has, by name.
    pub sessions: BTreeMap<String, MeterSnapshot>,
}

impl ModelSnapshot {
    pub(super) fn of(meters: &Meters, sessions: &[Arc<Meters>]) -> Self {
        let mut gauges: BTreeMap<_, _> =
            Gauge::ALL.iter().map(|&gauge| (gauge, meters.level(gauge))).collect();
        gauges.insert(Gauge::Sessions, sessions.len() as u64);
        Self {
            name: meters.name().to_owned(),
            meters: MeterSnapshot::of(meters),
            gauges,
            kept: Vec::new(),
            sessions: sessions
                .iter()
                .map(|session| (session.name().to_owned(), MeterSnapshot::of(session)))
                .collect(),
        }
    }

    /// Adds to what was counted.
    pub fn add(&mut self, counter: Counter, amount: u64) {
        *self.meters.counters.entry(counter).or_default() += amount;
    }

    /// What was counted.
    pub fn count(&self, counter: Counter) -> u64 {
        self.meters.counters.get(&counter).copied().unwrap_or(0)
    }
}

/// What was counted and measured of a model or a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeterSnapshot {
    /// What was counted: things, bytes, or nanoseconds.
    pub counters: BTreeMap<Counter, u64>,
    /// What was measured again and again.
    pub histograms: BTreeMap<Histogram, Distribution>,
}

impl MeterSnapshot {
    fn of(meters: &Meters) -> Self {
        Self {
            counters: Counter::ALL.iter().map(|&counter| (counter, meters.count(counter))).collect(),
            histograms: Histogram::ALL
                .iter()
                .map(|&histogram| (histogram, meters.distribution(histogram)))
                .collect(),
        }
    }
}
