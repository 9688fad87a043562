//! Examples as batches.

use crate::error::TrainError;
use crate::examples::Examples;
use crate::format::Sample;
use crate::network::Source;
use crate::packing::{pack, shuffled};

/// The epoch whose order decides what is held out; no run comes to it.
const HELD_OUT_EPOCH: u64 = u64::MAX;

/// Batches of examples: the samples with their numbers, as many as have no more than so many tokens together.
#[derive(Debug)]
pub struct Packed {
    examples: Examples,
    budget: usize,
    seed: u64,
    training: Vec<usize>,
    /// The held-out examples, packed in the order of the file.
    held_out: Vec<Vec<usize>>,
    /// An epoch's batches, by places in `training`.
    epoch: Option<(u64, Vec<Vec<usize>>)>,
}

impl Packed {
    /// All examples, none held out.
    pub fn new(examples: Examples, budget: usize, seed: u64) -> Self {
        let training = (0..examples.len()).collect();
        Self { examples, budget, seed, training, held_out: Vec::new(), epoch: None }
    }

    /// Holds `count` examples, chosen by the seed, out of training. At least one is left to train on.
    pub fn hold_out(mut self, count: usize) -> Self {
        let mut order = shuffled(self.examples.len(), self.seed, HELD_OUT_EPOCH);
        let mut held_out = order.split_off(order.len() - count.min(order.len() - 1));
        self.training = order;
        held_out.sort_unstable();
        self.training.sort_unstable();
        let lengths = self.examples.lengths();
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let mut room = 0;
        for sample in held_out {
            match batches.last_mut() {
                Some(batch) if room >= lengths[sample] => batch.push(sample),
                _ => {
                    room = self.budget;
                    batches.push(vec![sample]);
                }
            }
            room = room.saturating_sub(lengths[sample]);
        }
        self.held_out = batches;
        self.epoch = None;
        self
    }

    fn batches(&mut self, epoch: u64) -> &[Vec<usize>] {
        if self.epoch.as_ref().is_none_or(|(known, _)| *known != epoch) {
            let lengths = self.examples.lengths();
            let lengths: Vec<usize> = self.training.iter().map(|&sample| lengths[sample]).collect();
            self.epoch = Some((epoch, pack(&lengths, self.budget, self.seed, epoch)));
        }
        self.epoch.as_ref().map_or(&[], |(_, batches)| batches)
    }

    fn samples(&mut self, indices: &[usize]) -> Result<Vec<(usize, Sample)>, TrainError> {
        indices.iter().map(|&index| Ok((index, self.examples.sample(index)?))).collect()
    }
}

impl Source for Packed {
    type Batch = Vec<(usize, Sample)>;

    fn len(&mut self, epoch: u64) -> usize {
        self.batches(epoch).len()
    }

    fn batch(&mut self, epoch: u64, index: usize) -> Result<Self::Batch, TrainError> {
        let places = self.batches(epoch)[index].clone();
        let indices: Vec<usize> = places.into_iter().map(|place| self.training[place]).collect();
        self.samples(&indices)
    }

    fn held_out_len(&self) -> usize {
        self.held_out.len()
    }

    fn held_out(&mut self, index: usize) -> Result<Self::Batch, TrainError> {
        let indices = self.held_out[index].clone();
        self.samples(&indices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples::ExamplesConfig;
    use crate::format::Format;
    use crate::format::tests::tokenizer;

    #[test]
    fn an_epoch_has_every_sample_once_and_none_that_is_held_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        let line = |number: usize| {
            format!("{{\"prompt\": \"{}\", \"completion\": \"x\"}}\n", "p".repeat(number % 9))
        };
        std::fs::write(&path, (0..100).map(line).collect::<String>()).unwrap();
        let format = Format { tokenizer: tokenizer(), template: None, thinking: None };
        let examples = Examples::open(&path, format, ExamplesConfig::new(64)).unwrap();
        let lengths = examples.lengths();
        let mut packed = Packed::new(examples, 64, 5).hold_out(30);
        let mut held_out = Vec::new();
        for index in 0..packed.held_out_len() {
            let batch = packed.held_out(index).unwrap();
            assert!(batch.iter().map(|(_, sample)| sample.tokens.len()).sum::<usize>() <= 64);
            held_out.extend(batch.into_iter().map(|(index, _)| index));
        }
        assert_eq!(held_out.len(), 30);
        let mut orders = Vec::new();
        for epoch in [0, 1] {
            let mut seen = Vec::new();
            for index in 0..packed.len(epoch) {
                for (index, sample) in packed.batch(epoch, index).unwrap() {
                    assert_eq!(sample.tokens.len(), lengths[index]);
                    seen.push(index);
                }
            }
            orders.push(seen.clone());
            seen.extend(&held_out);
            seen.sort_unstable();
            assert_eq!(seen, (0..100).collect::<Vec<_>>());
        }
        assert_ne!(orders[0], orders[1]);
    }
}
