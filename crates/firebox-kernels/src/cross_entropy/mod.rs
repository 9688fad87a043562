//! Losses of logits against targets or against a teacher.

#[cfg(feature = "autodiff")]
mod gradient;
#[cfg(feature = "autodiff")]
mod kernel;
pub mod reference;

use burn::tensor::{Int, Tensor};

#[cfg(feature = "autodiff")]
use crate::{flex::is_flex, graph};

/// Weighted mean over rows of the negative log-likelihood of `targets` (`[rows]`) under logits `[rows,
/// vocabulary]`. A weight of zero excludes a row; the loss is zero if all weights are.
///
/// Gradients flow to the logits only.
///
/// # Panics
/// If a target is beyond the vocabulary.
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>, weights: Tensor<1>) -> Tensor<1> {
    #[cfg(feature = "autodiff")]
    if is_flex(&logits.device()) || graph::records(&logits.device()) {
        return gradient::cross_entropy(logits, targets, weights);
    }
    reference::cross_entropy(logits, targets, weights)
}

/// Weighted mean over rows of the Kullback-Leibler divergence of a student's distribution from a teacher's,
/// for logits `[rows, vocabulary]` divided by the temperature.
///
/// Gradients flow to the student's logits only. They shrink with the square of the temperature: multiply the
/// result by it to keep their size.
pub fn divergence(student: Tensor<2>, teacher: Tensor<2>, weights: Tensor<1>, temperature: f32) -> Tensor<1> {
    #[cfg(feature = "autodiff")]
    if is_flex(&student.device()) || graph::records(&student.device()) {
        return gradient::divergence(student, teacher, weights, temperature);
    }
    reference::divergence(student, teacher, weights, temperature)
}
