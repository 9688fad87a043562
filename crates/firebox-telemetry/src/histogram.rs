use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Every power of two has four buckets of equal width, so that a quantile is known to within a quarter.
const STEPS: usize = 4;
/// Values below this have a bucket each.
const EXACT: u64 = 2 * STEPS as u64;
/// The last bucket begins here: beyond twelve days of microseconds nobody asks for a difference.
const HIGHEST_POWER: u32 = 40;

const BUCKETS: usize = EXACT as usize + (HIGHEST_POWER - EXACT.ilog2()) as usize * STEPS + 1;

/// Counts values by their size.
#[derive(Debug, Default)]
pub(super) struct Buckets {
    /// Made with the first value: most histograms of most sessions have none.
    counts: OnceLock<Box<[AtomicU64]>>,
    sum: AtomicU64,
}

impl Buckets {
    pub fn record(&self, value: u64) {
        let counts = self.counts.get_or_init(|| (0..BUCKETS).map(|_| AtomicU64::new(0)).collect());
        counts[bucket(value)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    pub fn distribution(&self) -> Distribution {
        let counts: Vec<u64> = match self.counts.get() {
            Some(counts) => counts.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            None => Vec::new(),
        };
        let used = counts.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        Distribution { counts: counts[..used].to_vec(), sum: self.sum.load(Ordering::Relaxed) }
    }
}

fn bucket(value: u64) -> usize {
    if value < EXACT {
        return value as usize;
    }
    let power = value.ilog2();
    if power >= HIGHEST_POWER {
        return BUCKETS - 1;
    }
    let step = (value >> (power - STEPS.ilog2())) as usize % STEPS;
    EXACT as usize + (power - EXACT.ilog2()) as usize * STEPS + step
}

/// The least value of a bucket.
fn least(bucket: usize) -> u64 {
    let Some(beyond) = bucket.checked_sub(EXACT as usize) else { return bucket as u64 };
    let (octave, step) = (beyond / STEPS, beyond % STEPS);
    (1 << (octave as u32 + EXACT.ilog2())) / STEPS as u64 * (STEPS + step) as u64
}

/// How values were distributed: times in microseconds, everything else as it was.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Distribution {
    /// How many values fell into each bucket, up to the last that has any.
    counts: Vec<u64>,
    sum: u64,
}

impl Distribution {
    /// How many values there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// All of them together.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Their mean; absent where there are none.
    pub fn mean(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum as f64 / count as f64)
    }

    /// What a `share` of the values is at most, 0.99 for all but one in a hundred: to within a quarter, and exact
    /// below eight. Absent where there are no values.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let rank = (share.clamp(0.0, 1.0) * count as f64).ceil().max(1.0) as u64;
        let mut before = 0;
        for (bucket, &inside) in self.counts.iter().enumerate() {
            if before + inside >= rank {
                let (low, high) = (least(bucket), least(bucket + 1));
                // Whole numbers: a bucket of one value has that value.
                let width = (high - low).saturating_sub(1) as f64;
                return Some(low as f64 + width * (rank - before) as f64 / inside as f64);
            }
            before += inside;
        }
        None
    }

    /// How many values were below powers of two: always the same ones, because who watches a bound from when it is first
    /// there misses what brought it.
    pub(super) fn below_powers(&self) -> Vec<(u64, u64)> {
        let below = |power: u32| {
            let bound = 1u64 << power;
            (bound, self.counts[..bucket(bound).min(self.counts.len())].iter().sum())
        };
        (0..=HIGHEST_POWER).map(below).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_meet() {
        for at in 0..BUCKETS {
            assert_eq!(bucket(least(at)), at);
            assert!(at == 0 || bucket(least(at) - 1) == at - 1, "{at}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    proptest! {
        /// The same quantile of the sorted values, to within what a bucket is wide.
        #[test]
        fn quantiles_are_those_of_the_values(
            mut values in prop::collection::vec((0u32..38).prop_flat_map(|power| 0..1u64 << power), 1..200),
            share in 0.0f64..1.0,
        ) {
            let buckets = Buckets::default();
            values.iter().for_each(|&value| buckets.record(value));
            let distribution = buckets.distribution();
            values.sort_unstable();
            let rank = ((share * values.len() as f64).ceil() as usize).max(1);
            let exact = values[rank - 1] as f64;
            let found = distribution.quantile(share).unwrap();
            prop_assert!((found - exact).abs() <= exact / STEPS as f64, "{found} instead of {exact}");
            prop_assert_eq!(distribution.count(), values.len() as u64);
            prop_assert_eq!(distribution.sum(), values.iter().sum::<u64>());
            for (bound, below) in distribution.below_powers() {
                prop_assert_eq!(below, values.iter().filter(|value| **value < bound).count() as u64);
            }
        }
    }

    #[test]
    fn nothing_has_no_quantile() {
        let nothing = Buckets::default().distribution();
        assert_eq!((nothing.quantile(0.5), nothing.mean(), nothing.count()), (None, None, 0));
    }
}
