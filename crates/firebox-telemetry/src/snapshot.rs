//! Snapshots of all metrics.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Counter, Distribution, Gauge, Histogram, Meters};
use firebox_memory::PageFaults;
use firebox_memory::{Account, Budget, process};

/// All metrics at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The process as a whole, as the system reports it.
    pub process: ProcessSnapshot,
    /// The budgets.
    pub budgets: Vec<BudgetSnapshot>,
    /// The models, by name.
    pub models: Vec<ModelSnapshot>,
}

impl Snapshot {
    /// Returns the snapshot of a model.
    pub fn model(&self, name: &str) -> Option<&ModelSnapshot> {
        self.models.iter().find(|model| model.name == name)
    }
}

/// The memory of the process, where the system reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSnapshot {
    /// Resident bytes.
    pub resident_bytes: Option<u64>,
    /// The most resident bytes so far.
    pub peak_resident_bytes: Option<u64>,
    /// Resident bytes that no file backs.
    pub anonymous_bytes: Option<u64>,
    /// Resident bytes of mapped files.
    pub mapped_file_bytes: Option<u64>,
    /// Page faults without a read from disk.
    pub minor_faults: Option<u64>,
    /// Page faults with a read from disk.
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
    /// Its name.
    pub name: String,
    /// Its size in bytes; `None` if it is unlimited or a slice of another.
    pub total: Option<u64>,
    /// Its reserved bytes, if it is a slice of another.
    pub reserved: Option<u64>,
    /// The most bytes that were held at once.
    pub most_held: u64,
    /// The bytes that each account holds.
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
    /// The counters and distributions of the model and all its sessions, including those that ended.
    #[serde(flatten)]
    pub meters: MeterSnapshot,
    /// The gauges.
    pub gauges: BTreeMap<Gauge, u64>,
    /// Whether each part of the weights is resident, if they can be streamed.
    pub kept: Vec<bool>,
    /// Its sessions, by name.
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

    /// Adds to a counter.
    pub fn add(&mut self, counter: Counter, amount: u64) {
        *self.meters.counters.entry(counter).or_default() += amount;
    }

    /// Returns the value of a counter.
    pub fn count(&self, counter: Counter) -> u64 {
        self.meters.counters.get(&counter).copied().unwrap_or(0)
    }
}

/// The counters and distributions of a model or a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeterSnapshot {
    /// The counters: events, bytes, or nanoseconds.
    pub counters: BTreeMap<Counter, u64>,
    /// The distributions.
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
