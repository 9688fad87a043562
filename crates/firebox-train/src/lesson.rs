//! What a tower learns from.

use burn::tensor::{Device, Int, Tensor, TensorData};
use firebox_kernels::cross_entropy::{cross_entropy, divergence};
use firebox_model::{Fed, Tower};

use crate::error::TrainError;
use crate::network::Network;

/// Sequences, and what is to come of some of their rows.
#[derive(Debug, Clone)]
pub struct Lesson {
    /// Tokens, or what a trunk made of them.
    pub fed: Fed,
    /// How long each sequence is.
    pub lengths: Vec<usize>,
    /// The rows that something is to come of, counted through all sequences.
    pub rows: Vec<u32>,
    /// What each of them counts.
    pub weights: Vec<f32>,
    /// What.
    pub goal: Goal,
}

/// What is to come of rows.
#[derive(Debug, Clone)]
pub enum Goal {
    /// These tokens, or labels.
    Tokens(Vec<u32>),
    /// What a teacher says, `[rows, vocab_size]`.
    Teacher(Tensor<2>),
}

impl Network for Tower {
    type Batch = Lesson;

    fn loss(&self, lesson: &Lesson) -> Result<(Tensor<1>, usize), TrainError> {
        let count = lesson.rows.len();
        let reached = self.reached(lesson.fed.clone(), &lesson.lengths).map_err(TrainError::network)?;
        let device = reached.last.device();
        let weights = TensorData::new(lesson.weights.clone(), [count]);
        let weights = Tensor::from_data(weights, &device.clone().without_autodiff());
        let rows = integers(&lesson.rows, &device);
        let loss_of = |logits| match &lesson.goal {
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
