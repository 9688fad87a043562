//! The charge for the program's own memory when several models share a budget: measured at intervals, with headroom.

use std::time::Instant;

use super::config::CONFIG;
use crate::{Charge, MemoryError};

/// The charge for the program's own memory, and the measurements that it follows.
#[derive(Debug)]
pub(super) struct ProgramUsage {
    charge: Charge,
    /// The charge never falls below this.
    least: u64,
    measured_at: Instant,
    /// The largest and the smallest upper bound since `measurements` measurements.
    max: u64,
    min: u64,
    measurements: u32,
    /// Bytes that the program may grow until the next measurement.
    headroom: u64,
}

/// A charge that has to grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Growth {
    /// The new charge.
    pub charged: u64,
    /// Bytes in use already.
    pub used: u64,
}

/// Bounds of the memory that the program takes beside its models.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measured {
    /// The lower bound: everything that is charged for models may be resident.
    pub at_least: u64,
    /// The upper bound: some of what is charged need not be resident.
    pub at_most: u64,
}

impl ProgramUsage {
    pub fn new(charge: Charge, least: u64) -> Self {
        let (min, headroom) = (u64::MAX, CONFIG.program_headroom);
        Self { charge, least, measured_at: Instant::now(), max: 0, min, measurements: 0, headroom }
    }

    /// Bytes that are charged.
    pub fn charged(&self) -> u64 {
        self.charge.bytes()
    }

    /// Returns whether a measurement is due. If so, the next one is due only after the interval.
    pub fn begin_measurement(&mut self) -> bool {
        let is_due = self.measured_at.elapsed() >= CONFIG.program_interval;
        if is_due {
            self.measured_at = Instant::now();
        }
        is_due
    }

    /// Takes a measurement into account. Returns the growth if more should be charged. Reduces the charge by itself,
    /// once the usage has stayed below it for some measurements.
    pub fn settle(&mut self, measured: Measured) -> Option<Growth> {
        let charged = self.charge.bytes();
        self.max = self.max.max(measured.at_most);
        self.min = self.min.min(measured.at_most);
        self.measurements += 1;
        if self.is_outgrown_by(measured.at_least) {
            self.restart();
            self.headroom = CONFIG.program_headroom;
            let used = measured.at_least;
            return Some(Growth { charged: used + CONFIG.program_headroom, used });
        }
        if self.measurements >= CONFIG.measurements_to_settle {
            let is_steady = self.max - self.min <= CONFIG.steady_program_headroom / 2;
            self.headroom = if is_steady { CONFIG.steady_program_headroom } else { CONFIG.program_headroom };
            let should = (self.max + self.headroom).max(self.least);
            self.restart();
            // A charge can always shrink.
            drop(self.charge.resize(should.min(charged)));
        }
        None
    }

    /// Returns whether the charge is too small for a program that takes `used` bytes.
    pub fn is_outgrown_by(&self, used: u64) -> bool {
        used + self.headroom > self.charge.bytes()
    }

    /// Charges at least `bytes`.
    pub fn grow_to(&mut self, bytes: u64) -> Result<(), MemoryError> {
        if bytes > self.charge.bytes() { self.charge.resize(bytes) } else { Ok(()) }
    }

    fn restart(&mut self) {
        (self.max, self.min, self.measurements) = (0, u64::MAX, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Account, Budget};

    #[test]
    fn the_charge_follows_what_is_measured() {
        const MB: u64 = 1 << 20;
        let budget = Budget::new(1000 * MB);
        let charge = budget.charge(Account::Program, 500 * MB).unwrap();
        let mut program = ProgramUsage::new(charge, 100 * MB);
        let mut charged_after = |measurements: &[(u64, u64)]| {
            for &(least, most) in measurements {
                let measured = Measured { at_least: least * MB, at_most: most * MB };
                if let Some(growth) = program.settle(measured) {
                    assert_eq!(growth.used, least * MB);
                    program.grow_to(growth.charged).unwrap();
                }
            }
            program.charged() / MB
        };
        let count = CONFIG.measurements_to_settle as usize;
        let exactly = |used| (used, used);
        assert_eq!(charged_after(&vec![exactly(200); count - 1]), 500, "too few measurements");
        assert_eq!(charged_after(&[exactly(300)]), 308, "the largest measurement with headroom");
        assert_eq!(charged_after(&[exactly(600)]), 608, "growth is charged at once");
        assert_eq!(charged_after(&vec![(50, 700); count]), 608, "what is charged need not be there");
        assert_eq!(charged_after(&vec![exactly(50); count]), 100, "the least charge");
        assert_eq!(charged_after(&vec![exactly(200); count]), 208, "it has just grown");
        assert_eq!(charged_after(&vec![exactly(200); count]), 206, "steady usage needs less headroom");
        assert_eq!(charged_after(&[exactly(201)]), 209, "not steady any more");
        let restless: Vec<_> = (0..count as u64).map(|at| exactly(190 + at % 6)).collect();
        assert_eq!(charged_after(&restless), 203);
    }
}
