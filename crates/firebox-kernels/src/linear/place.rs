//! The rows of a weight that a panel holds, and the results that its sums are added to.

use super::panel::OUTPUTS;
use crate::simd::Lanes;

/// The outputs of a panel within a weight and within the results.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// First row of the weight in the panel.
    pub row: usize,
    /// Lanes before the first wanted output: the last panel of a weight overlaps the one before.
    pub skipped: usize,
    /// First wanted output, relative to the part.
    at: usize,
}

impl Place {
    #[inline(always)]
    pub fn new(first: usize, at: usize, weight_rows: usize) -> Self {
        let row = (first + at).min(weight_rows - OUTPUTS);
        Self { row, skipped: first + at - row, at }
    }

    /// Adds a panel's sums to a row of results, up to its end.
    #[inline(always)]
    pub fn add<L: Lanes>(self, results: &mut [f32], sums: L) {
        let Some(results) = results.get_mut(self.at..) else { return };
        match results.first_chunk_mut() {
            Some(whole) if self.skipped == 0 => *whole = L::load(whole).add(sums).store(),
            _ => {
                let sums = sums.store();
                for (result, sum) in results.iter_mut().zip(sums.iter().skip(self.skipped)) {
                    *result += sum;
                }
            }
        }
    }
}
