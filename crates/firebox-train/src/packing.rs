//! Samples in batches of so many tokens.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The numbers below `count` in an order of their own for every seed and epoch.
pub(crate) fn shuffled(count: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    // One seed's epochs are streams of one generator: seed + epoch would make epoch 1 of seed 0 epoch 0 of seed 1.
    random.set_stream(epoch);
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        order.swap(last, below(&mut random, last + 1));
    }
    order
}

/// A number below `end`, each as likely as any other.
fn below(random: &mut ChaCha8Rng, end: usize) -> usize {
    let end = end as u64;
    // The top of the range, which does not hold every remainder as often, is drawn again.
    let fair = u64::MAX - u64::MAX % end;
    loop {
        let drawn = random.next_u64();
        if drawn < fair {
            return (drawn % end) as usize;
        }
    }
}

/// Batches of samples, by their numbers, with no more than `budget` tokens each, for one epoch.
///
/// Every sample is in one batch, once. Samples that are longer than the budget have a batch to themselves: leave them out
/// beforehand where that must not be. A sample goes into the fullest open batch that has room for it; samples are taken
/// and batches are given back in shuffled order, so that what is in a batch together, and when, is another thing in
/// every epoch.
///
/// ```
/// use firebox_train::pack;
///
/// let batches = pack(&[30, 70, 50, 50], 100, 7, 0);
/// assert_eq!(batches.len(), 2);
/// assert_eq!(batches, pack(&[30, 70, 50, 50], 100, 7, 0));
/// ```
pub fn pack(lengths: &[usize], budget: usize, seed: u64, epoch: u64) -> Vec<Vec<usize>> {
    /// More open batches than this find no better fit.
    const OPEN: usize = 64;

    let mut done: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<(usize, Vec<usize>)> = Vec::new();
    for sample in shuffled(lengths.len(), seed, epoch) {
        let length = lengths[sample];
        let fits = open.iter_mut().filter(|(room, _)| *room >= length).min_by_key(|(room, _)| *room);
        match fits {
            Some((room, samples)) => {
                *room -= length;
                samples.push(sample);
            }
            None => {
                if open.len() == OPEN {
                    // The fullest: the others have more to gain.
                    let fullest = (0..OPEN).min_by_key(|&at| open[at].0).unwrap_or(0);
                    done.push(open.swap_remove(fullest).1);
                }
                open.push((budget.saturating_sub(length), vec![sample]));
            }
        }
    }
    done.extend(open.into_iter().map(|(_, samples)| samples));
    let order = shuffled(done.len(), seed, epoch);
    order.into_iter().map(|at| std::mem::take(&mut done[at])).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_sample_is_in_one_batch_that_holds_it(
            lengths in proptest::collection::vec(1usize..120, 0..400), seed: u64, epoch in 0u64..3,
        ) {
            let batches = pack(&lengths, 100, seed, epoch);
            prop_assert_eq!(&batches, &pack(&lengths, 100, seed, epoch));
            let mut all: Vec<usize> = batches.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>());
            for batch in &batches {
                let tokens: usize = batch.iter().map(|&sample| lengths[sample]).sum();
                prop_assert!(tokens <= 100 || batch.len() == 1);
                prop_assert!(!batch.is_empty());
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_little_room_is_left() {
        let lengths: Vec<usize> = (0..3000).map(|sample| 5 + sample * 7919 % 90).collect();
        let batches = pack(&lengths, 512, 1, 0);
        assert_ne!(batches, pack(&lengths, 512, 1, 1));
        assert_ne!(batches, pack(&lengths, 512, 2, 0));
        assert_ne!(shuffled(50, 0, 1), shuffled(50, 1, 0));
        let fullest = lengths.iter().sum::<usize>().div_ceil(512);
        assert!(batches.len() as f64 <= fullest as f64 * 1.03, "{} instead of {fullest}", batches.len());
    }

    #[test]
    fn orders_are_even() {
        let mut first = [0; 5];
        for epoch in 0..5000 {
            first[shuffled(5, 3, epoch)[0]] += 1;
        }
        assert!(first.iter().all(|&count| (850..1150).contains(&count)), "{first:?}");
    }
}
