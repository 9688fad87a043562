//! What was done, and how often.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use crate::weather::Happened;

/// Counts, from all threads.
#[derive(Debug, Default)]
pub struct Tally(Mutex<BTreeMap<String, u64>>);

/// What a soak that is worth its name has done at least once.
const OFTEN: [&str; 16] = [
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
    "shadow",
    "shortage",
];

/// What comes in a long one as well.
const SELDOM: [&str; 6] = ["branch dropped", "change of heat", "emergency", "promote", "supersede", "switch"];

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

    pub fn weather(&self, happened: Happened) {
        let Happened { shortages, emergencies, heats } = happened;
        for (what, count) in [("shortage", shortages), ("emergency", emergencies), ("change of heat", heats)]
        {
            self.add(what, count);
        }
    }

    /// Refuses a soak in which something did not happen at all.
    pub fn expect_variety(&self, is_long: bool) {
        let seldom = SELDOM.into_iter().filter(|_| is_long);
        let missing: Vec<&str> =
            OFTEN.into_iter().chain(seldom).filter(|what| self.count(what) == 0).collect();
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
