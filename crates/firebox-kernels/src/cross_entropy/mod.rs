//! How far the logits of a model are from what they should be.

#[cfg(feature = "autodiff")]
mod gradient;
#[cfg(feature = "autodiff")]
mod kernel;
pub mod reference;

use burn::tensor::{Int, Tensor};

#[cfg(feature = "autodiff")]
use crate::{flex::is_flex, graph};

/// The mean over rows of the negative logarithm of the probability that `[rows, vocabulary]` logits give to the
/// `targets` of `[rows]`, each row counting as much as its weight says: zero for one that is not to be learned.
/// Zero where all weights are.
///
/// Gradients flow to the logits alone.
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

/// The mean over rows of the divergence (Kullback and Leibler's) of a student's distribution from a teacher's, both
/// of logits `[rows, vocabulary]` divided by the temperature, each row counting as much as its weight says.
///
/// Gradients flow to the student's logits alone. They shrink with the square of the temperature: multiply the result
/// by that square to keep them as large as those of other losses.
pub fn divergence(student: Tensor<2>, teacher: Tensor<2>, weights: Tensor<1>, temperature: f32) -> Tensor<1> {
    #[cfg(feature = "autodiff")]
    if is_flex(&student.device()) || graph::records(&student.device()) {
        return gradient::divergence(student, teacher, weights, temperature);
    }
    reference::divergence(student, teacher, weights, temperature)
}
