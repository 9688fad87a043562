//! The training batches of a tower.

use burn::tensor::{Device, Int, Tensor, TensorData};
use firebox_kernels::cross_entropy::{cross_entropy, divergence};
use firebox_model::{Fed, Tower};

use crate::error::TrainError;
use crate::network::Network;

/// Sequences, and what is to come of some of their rows.
#[derive(Debug, Clone)]
pub struct TrainingBatch {
    /// Tokens, or what a trunk made of them.
    pub fed: Fed,
    /// The length of each sequence.
    pub lengths: Vec<usize>,
    /// The rows that enter the loss, counted through all sequences.
    pub rows: Vec<u32>,
    /// The weight of each of these rows in the loss.
    pub weights: Vec<f32>,
    /// The target of these rows.
    pub goal: Goal,
}

/// The target that rows are trained towards.
#[derive(Debug, Clone)]
pub enum Goal {
    /// These tokens, or labels.
    Tokens(Vec<u32>),
    /// The outputs of a teacher, `[rows, vocab_size]`.
    Teacher(Tensor<2>),
}

impl Network for Tower {
    type Batch = TrainingBatch;

    fn loss(&self, batch: &TrainingBatch) -> Result<(Tensor<1>, usize), TrainError> {
        let count = batch.rows.len();
        let reached = self.reached(batch.fed.clone(), &batch.lengths).map_err(TrainError::network)?;
        let device = reached.last.device();
        let weights = TensorData::new(batch.weights.clone(), [count]);
        let weights = Tensor::from_data(weights, &device.clone().without_autodiff());
        let rows = integers(&batch.rows, &device);
        let loss_of = |logits| match &batch.goal {
            Goal::Tokens(tokens) => cross_entropy(logits, integers(tokens, &device), weights.clone()),
            Goal::Teacher(teacher) => divergence(logits, teacher.clone(), weights.clone(), 1.0),
        };
        // Only what is to be learned is worth an unembedding.
        let mut loss = loss_of(self.scored(reached.last.select(0, rows.clone())));
        let at_exit = reached.exit.and_then(|hidden| self.scored_at_exit(hidden.select(0, rows)));
        if let Some((logits, weight)) = at_exit {
            loss = loss.add(loss_of(logits).mul_scalar(weight));
        }
        Ok((loss, count))
    }
}

/// Small numbers on the device of what they are to select from.
pub(crate) fn integers(numbers: &[u32], device: &Device) -> Tensor<1, Int> {
    let numbers: Vec<i32> = numbers.iter().map(|&number| number as i32).collect();
    let count = numbers.len();
    Tensor::from_data(TensorData::new(numbers, [count]), device)
}
