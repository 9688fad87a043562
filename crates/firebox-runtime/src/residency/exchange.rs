//! Chooses which parts of a model should be missing, so that they are far apart in a pass.

/// Returns the part of a block that should be missing instead of `part`, if there is one. All of `missing` are parts of blocks, and so
/// are parts below `block_parts`.
///
/// The result is farther from all other missing parts than `part` is, and `part` is closer to one of them, by more than
/// one, than if all were spread evenly. Distances wrap around: passes follow each other, so the first part comes after
/// the last. A part of the unembedding is always exchanged.
pub(super) fn better_missing(part: usize, missing: &[usize], block_parts: usize) -> Option<usize> {
    let others = || missing.iter().copied().filter(|other| *other != part);
    let distance = |part: usize| {
        let between = |other: usize| part.abs_diff(other).min(block_parts - part.abs_diff(other));
        others().map(between).min().unwrap_or(block_parts)
    };
    let own = if part < block_parts { distance(part) + 1 } else { 0 };
    if own >= block_parts / missing.len().max(1) && part < block_parts {
        return None;
    }
    let resident = (0..block_parts).filter(|other| *other != part && !missing.contains(other));
    let (farthest, other) = resident.map(|other| (distance(other), other)).max()?;
    (farthest >= own).then_some(other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::residency::config::CONFIG;

    /// Runs passes until nothing changes. Returns the number of exchanges.
    fn settle(missing: &mut [usize], layers: usize) -> usize {
        let mut exchanges = 0;
        loop {
            let before = exchanges;
            for at in 0..missing.len() {
                if let Some(other) = better_missing(missing[at], missing, layers) {
                    missing[at] = other;
                    exchanges += 1;
                }
            }
            if exchanges == before {
                return exchanges;
            }
        }
    }

    fn nearest(missing: &[usize], layers: usize) -> usize {
        let mut all = missing.to_vec();
        all.sort_unstable();
        all.push(all[0] + layers);
        all.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap()
    }

    #[test]
    fn missing_parts_spread_with_few_exchanges() {
        for layers in [12, 18, 32, 36, 80] {
            for count in 1..=layers / CONFIG.few_missing {
                for from in [0, layers - count] {
                    let mut missing: Vec<usize> = (from..from + count).collect();
                    let exchanges = settle(&mut missing, layers);
                    let most = layers / count;
                    assert!(2 * nearest(&missing, layers) >= most, "{missing:?} of {layers}");
                    assert!(exchanges <= 3 * count, "{exchanges} for {count} of {layers}");
                }
            }
        }
    }

    #[test]
    fn parts_that_are_far_apart_stay_missing() {
        for mut missing in [vec![3, 7, 11, 15, 19, 23, 27, 29, 31], vec![0, 16], vec![5], vec![1, 12, 23]] {
            assert_eq!(settle(&mut missing, 32), 0, "{missing:?}");
        }
    }

    #[test]
    fn a_layer_makes_room_for_the_unembedding() {
        assert_eq!(better_missing(33, &[0], 32), Some(16));
        assert!(better_missing(33, &[], 32).is_some());
    }
}
