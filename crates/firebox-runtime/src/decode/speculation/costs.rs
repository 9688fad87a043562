//! The cost of passes by their number of rows.

use std::collections::VecDeque;
use std::time::Duration;

/// The assumed cost of a row, as a share of a pass of one row, until rows are measured. It is less than on most devices,
/// so that drafts are tried.
const ASSUMED_ROW_COST: f64 = 0.1;

/// Measurements that are kept of each number of rows.
const MEASUREMENTS: usize = 8;

/// Passes after which a measurement is dropped: it may be out of date, or was unlucky.
const MEASUREMENT_LIFETIME: u64 = 512;

/// Measured times of passes by their number of rows. A batch keeps them for its own passes.
#[derive(Debug, Clone, Default)]
pub struct PassCosts {
    /// By the number of rows.
    times: Vec<RecentTimes>,
    /// Passes that were measured.
    count: u64,
}

/// The last measurements of one kind.
#[derive(Debug, Clone, Default)]
pub(super) struct RecentTimes {
    /// The index of each measurement among all, and its seconds.
    last: VecDeque<(u64, f64)>,
    seconds: Option<f64>,
}

impl RecentTimes {
    pub fn push(&mut self, index: u64, seconds: f64) {
        self.last.push_back((index, seconds));
        if self.last.len() > MEASUREMENTS {
            self.last.pop_front();
        }
        self.estimate();
    }

    pub fn seconds(&self) -> Option<f64> {
        self.seconds
    }

    fn drop_before(&mut self, index: u64) {
        let known = self.last.len();
        while self.last.front().is_some_and(|&(at, _)| at < index) {
            self.last.pop_front();
        }
        if self.last.len() < known {
            self.estimate();
        }
    }

    /// Other work on the machine makes passes slower and never faster, so the estimate is that of the quicker ones.
    fn estimate(&mut self) {
        let mut seconds: Vec<f64> = self.last.iter().map(|&(_, seconds)| seconds).collect();
        seconds.sort_unstable_by(f64::total_cmp);
        self.seconds = seconds.get(seconds.len() / 3).copied();
    }
}

impl PassCosts {
    /// Records how long a pass of `rows` took.
    pub fn record(&mut self, rows: usize, took: Duration) {
        if self.times.len() <= rows {
            self.times.resize_with(rows + 1, RecentTimes::default);
        }
        self.count += 1;
        self.times[rows].push(self.count, took.as_secs_f64());
        for times in &mut self.times {
            times.drop_before(self.count.saturating_sub(MEASUREMENT_LIFETIME));
        }
    }

    /// Returns the seconds that passes of `rows` took, if there were any lately.
    pub(super) fn measured(&self, rows: usize) -> Option<f64> {
        self.times.get(rows)?.seconds()
    }

    /// Returns the seconds that a pass of `rows` takes, measured or estimated: between measured numbers of rows in proportion,
    /// at most as long as passes of more rows, and beyond the measured ones by what rows cost there.
    pub fn seconds(&self, rows: usize) -> f64 {
        let of_more =
            (rows..self.times.len()).filter_map(|rows| self.measured(rows)).fold(f64::MAX, f64::min);
        if self.measured(rows).is_some() {
            return of_more;
        }
        let next = || (rows..self.times.len()).find_map(|more| Some((more, self.measured(more)?)));
        let of_fewer = (1..rows).rev().find_map(|fewer| {
            let seconds = self.measured(fewer)?;
            let (fewest, least) = (1..=fewer).find_map(|rows| Some((rows, self.measured(rows)?)))?;
            let single = least / (1.0 + ASSUMED_ROW_COST * (fewest - 1) as f64);
            let row = match next() {
                Some((more, slower)) => (slower - seconds) / (more - fewer) as f64,
                None if fewest == fewer => ASSUMED_ROW_COST * single,
                None => ((seconds - least) / (fewer - fewest) as f64).max(ASSUMED_ROW_COST * single),
            };
            Some(seconds + (rows - fewer) as f64 * row.max(0.0))
        });
        of_fewer.unwrap_or_default().min(of_more)
    }
}
