//! Training data: samples, with the hidden states that a frozen trunk computes from them.

use std::path::PathBuf;

use burn::tensor::{Device, Tensor, TensorData};
use firebox_model::{Decoder, Fed};

use crate::boundary::{BoundaryCache, BoundaryKey, Stored};
use crate::error::TrainError;
use crate::examples::Examples;
use crate::format::Sample;
use crate::network::Source;
use crate::packed::Packed;
use crate::packing::shuffled;
use crate::training_batch::{Goal, TrainingBatch};

/// One of the things to learn: samples, each of whose targets is to come of the token before it.
#[derive(Debug)]
pub struct Subject {
    /// In batches.
    pub samples: Packed,
    /// The trunk's hidden states of the samples, if a head is trained.
    pub states: Option<BoundaryCache>,
}

/// Returns the hidden states that a model's trunk, its layers before `split`, computes from samples. States that are not in
/// `folder` yet are computed. `trunk` is the trunk's hash.
pub fn boundary_states(
    examples: &mut Examples,
    folder: impl Into<PathBuf>,
    decoder: &Decoder,
    trunk: &str,
    split: usize,
    stored: Stored,
) -> Result<BoundaryCache, TrainError> {
    let key = BoundaryKey {
        trunk: trunk.to_owned(),
        samples: examples.fingerprint(),
        layer: split,
        width: decoder.config().hidden_size,
        stored,
    };
    let count = examples.len();
    BoundaryCache::fill(
        folder,
        key,
        count,
        |sample| Ok(examples.sample(sample)?.tokens),
        |tokens| {
            let states = decoder.hidden_after(tokens, split).map_err(TrainError::network)?;
            let numbers = states.try_into_vec_as::<f32>();
            numbers.map_err(|error| TrainError::Readback { reason: error.to_string() })
        },
    )
}

impl Subject {
    fn training_batch(
        &self,
        samples: &[(usize, Sample)],
        device: &Device,
    ) -> Result<TrainingBatch, TrainError> {
        let (mut tokens, mut lengths) = (Vec::new(), Vec::with_capacity(samples.len()));
        let (mut rows, mut targets) = (Vec::new(), Vec::new());
        for (_, sample) in samples {
            let first = tokens.len();
            for target in (1..sample.tokens.len()).filter(|&at| sample.learn[at]) {
                rows.push((first + target - 1) as u32);
                targets.push(sample.tokens[target]);
            }
            lengths.push(sample.tokens.len());
            tokens.extend_from_slice(&sample.tokens);
        }
        let fed = match &self.states {
            Some(cache) => {
                let mut states = Vec::new();
                for (index, _) in samples {
                    states.extend(cache.states(*index)?);
                }
                Fed::States(rows_of(states, tokens.len(), device))
            }
            None => Fed::Tokens(tokens),
        };
        let weights = vec![1.0; rows.len()];
        Ok(TrainingBatch { fed, lengths, rows, weights, goal: Goal::Tokens(targets) })
    }
}

fn rows_of(states: Vec<f32>, rows: usize, device: &Device) -> Tensor<2> {
    let width = states.len() / rows.max(1);
    Tensor::from_data(TensorData::new(states, [rows, width]), device)
}

/// Batches of one subject or the other, in shuffled order.
#[derive(Debug)]
pub struct TrainingData {
    subjects: Vec<Subject>,
    seed: u64,
    device: Device,
    /// Those of an epoch: a subject and its batch.
    order: Option<(u64, Vec<(usize, usize)>)>,
}

impl TrainingData {
    /// Batches of all subjects.
    pub fn new(subjects: Vec<Subject>, seed: u64, device: &Device) -> Self {
        Self { subjects, seed, device: device.clone().without_autodiff(), order: None }
    }

    fn order(&mut self, epoch: u64) -> &[(usize, usize)] {
        if self.order.as_ref().is_none_or(|(there, _)| *there != epoch) {
            let counts = self.subjects.iter_mut().map(|subject| subject.samples.len(epoch)).enumerate();
            let all: Vec<_> =
                counts.flat_map(|(subject, count)| (0..count).map(move |batch| (subject, batch))).collect();
            let order = shuffled(all.len(), self.seed, epoch).into_iter().map(|at| all[at]).collect();
            self.order = Some((epoch, order));
        }
        self.order.as_ref().map_or(&[], |(_, order)| order)
    }
}

impl Source for TrainingData {
    type Batch = TrainingBatch;

    fn len(&mut self, epoch: u64) -> usize {
        self.order(epoch).len()
    }

    fn batch(&mut self, epoch: u64, index: usize) -> Result<TrainingBatch, TrainError> {
        let (subject, batch) = self.order(epoch)[index];
        let subject = &mut self.subjects[subject];
        let samples = subject.samples.batch(epoch, batch)?;
        subject.training_batch(&samples, &self.device)
    }

    fn held_out_len(&self) -> usize {
        self.subjects.iter().map(|subject| subject.samples.held_out_len()).sum()
    }

    fn held_out(&mut self, index: usize) -> Result<TrainingBatch, TrainError> {
        let mut at = index;
        for subject in &mut self.subjects {
            let count = subject.samples.held_out_len();
            if at < count {
                let samples = subject.samples.held_out(at)?;
                return subject.training_batch(&samples, &self.device);
            }
            at -= count;
        }
        let reason = format!("batch {index} of {}", self.held_out_len());
        Err(TrainError::NoData { what: "what is held out".into(), reason })
    }
}
