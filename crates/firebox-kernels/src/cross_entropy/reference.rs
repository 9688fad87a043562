//! Reference implementation of the losses in Burn's operations.

use burn::tensor::{Int, Tensor, activation};

/// See [`cross_entropy`](super::cross_entropy).
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>, weights: Tensor<1>) -> Tensor<1> {
    let rows = targets.dims()[0];
    let surprise = activation::log_softmax(logits, 1).gather(1, targets.reshape([rows, 1])).neg();
    weighted_mean(surprise, weights)
}

/// See [`divergence`](super::divergence).
pub fn divergence(student: Tensor<2>, teacher: Tensor<2>, weights: Tensor<1>, temperature: f32) -> Tensor<1> {
    let student = activation::log_softmax(student.div_scalar(temperature), 1);
    let teacher = activation::log_softmax(teacher.detach().div_scalar(temperature), 1);
    weighted_mean(teacher.clone().exp().mul(teacher.sub(student)).sum_dim(1), weights)
}

/// Returns the weighted mean of `[rows, 1]`.
fn weighted_mean(losses: Tensor<2>, weights: Tensor<1>) -> Tensor<1> {
    let rows = weights.dims()[0];
    let total = weights.clone().sum();
    let nothing = total.clone().equal_elem(0.0);
    losses.reshape([rows]).mul(weights).sum().div(total.mask_fill(nothing, 1.0))
}
