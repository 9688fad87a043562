//! Histograms and their distributions.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Buckets of equal width per power of two, so that a quantile is precise to a quarter.
const BUCKETS_PER_POWER: usize = 4;
/// Values below this have a bucket each.
const EXACT_BELOW: u64 = 2 * BUCKETS_PER_POWER as u64;
/// The power of two at which the last bucket begins: twelve days in microseconds.
const HIGHEST_POWER: u32 = 40;

const BUCKETS: usize =
    EXACT_BELOW as usize + (HIGHEST_POWER - EXACT_BELOW.ilog2()) as usize * BUCKETS_PER_POWER + 1;

/// Counts values by their size.
#[derive(Debug, Default)]
pub(super) struct Buckets {
    /// Created with the first value: most histograms of most sessions stay empty.
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
    if value < EXACT_BELOW {
        return value as usize;
    }
    let power = value.ilog2();
    if power >= HIGHEST_POWER {
        return BUCKETS - 1;
    }
    let step = (value >> (power - BUCKETS_PER_POWER.ilog2())) as usize % BUCKETS_PER_POWER;
    EXACT_BELOW as usize + (power - EXACT_BELOW.ilog2()) as usize * BUCKETS_PER_POWER + step
}

/// Returns the least value of a bucket.
fn lower_bound(bucket: usize) -> u64 {
    let Some(beyond) = bucket.checked_sub(EXACT_BELOW as usize) else { return bucket as u64 };
    let (octave, step) = (beyond / BUCKETS_PER_POWER, beyond % BUCKETS_PER_POWER);
    (1 << (octave as u32 + EXACT_BELOW.ilog2())) / BUCKETS_PER_POWER as u64
        * (BUCKETS_PER_POWER + step) as u64
}

/// The distribution of a value: times in microseconds, other values unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Distribution {
    /// The number of values in each bucket, up to the last that is not empty.
    counts: Vec<u64>,
    sum: u64,
}

impl Distribution {
    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of the values.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Returns the mean; `None` if there are no values.
    pub fn mean(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum as f64 / count as f64)
    }

    /// Returns the value that a `share` of the values do not exceed, 0.99 for the 99th percentile. It is precise to a
    /// quarter, and exact below eight. `None` if there are no values.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let rank = (share.clamp(0.0, 1.0) * count as f64).ceil().max(1.0) as u64;
        let mut before = 0;
        for (bucket, &inside) in self.counts.iter().enumerate() {
            if before + inside >= rank {
                let (low, high) = (lower_bound(bucket), lower_bound(bucket + 1));
                // A bucket of one integer holds exactly that value.
                let width = (high - low).saturating_sub(1) as f64;
                return Some(low as f64 + width * (rank - before) as f64 / inside as f64);
            }
            before += inside;
        }
        None
    }

    /// Returns how many values are below each power of two. The bounds are always the same: a series that appeared with its
    /// first value would hide that value from a monitor.
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
    fn buckets_are_contiguous() {
        for at in 0..BUCKETS {
            assert_eq!(bucket(lower_bound(at)), at);
            assert!(at == 0 || bucket(lower_bound(at) - 1) == at - 1, "{at}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    proptest! {
        /// Compares with the quantile of the sorted values, to within the width of a bucket.
        #[test]
        fn quantiles_match_those_of_the_values(
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
            prop_assert!((found - exact).abs() <= exact / BUCKETS_PER_POWER as f64, "{found} instead of {exact}");
            prop_assert_eq!(distribution.count(), values.len() as u64);
            prop_assert_eq!(distribution.sum(), values.iter().sum::<u64>());
            for (bound, below) in distribution.below_powers() {
                prop_assert_eq!(below, values.iter().filter(|value| **value < bound).count() as u64);
            }
        }
    }

    #[test]
    fn an_empty_distribution_has_no_quantile() {
        let nothing = Buckets::default().distribution();
        assert_eq!((nothing.quantile(0.5), nothing.mean(), nothing.count()), (None, None, 0));
    }
}
