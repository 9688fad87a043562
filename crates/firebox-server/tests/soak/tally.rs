//! Counts actions and events.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use crate::stress::EventCounts;

/// Counters shared by all threads.
#[derive(Debug, Default)]
pub struct Tally(Mutex<BTreeMap<String, u64>>);

/// Occurs at least once in any soak.
const ALWAYS_EXPECTED: [&str; 16] = [
    "answer",
    "begin",
    "chat",
    "client left",
    "connection broken off",
    "evicted turn",
    "fact",
    "fork",
    "head",
    "hide",
    "pin",
    "restore",
    "restore after a restart",
    "rewind",
    "comparison",
    "shortage",
];

/// Occurs at least once in a long soak.
const EXPECTED_IN_LONG: [&str; 6] =
    ["branch dropped", "change of heat", "emergency", "promote", "supersede", "switch"];

impl Tally {
    pub fn add(&self, what: &str, count: u64) {
        *self.0.lock().unwrap().entry(what.to_owned()).or_default() += count;
    }

    pub fn one(&self, what: &str) {
        self.add(what, 1);
    }

    pub fn count(&self, what: &str) -> u64 {
        self.0.lock().unwrap().get(what).copied().unwrap_or_default()
    }

    pub fn stress(&self, happened: EventCounts) {
        let EventCounts { shortages, emergencies, heats } = happened;
        for (what, count) in [("shortage", shortages), ("emergency", emergencies), ("change of heat", heats)]
        {
            self.add(what, count);
        }
    }

    /// Asserts that everything expected occurred.
    pub fn expect_variety(&self, is_long: bool) {
        let seldom = EXPECTED_IN_LONG.into_iter().filter(|_| is_long);
        let missing: Vec<&str> =
            ALWAYS_EXPECTED.into_iter().chain(seldom).filter(|what| self.count(what) == 0).collect();
        assert!(missing.is_empty(), "never happened: {missing:?}");
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, count) in self.0.lock().unwrap().iter() {
            writeln!(f, "{count:>9}  {what}")?;
        }
        Ok(())
    }
}
