//! Losses with a backward pass of their own.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{DType, FloatDType, Int, IntDType, Tensor};

use super::kernel::{Rows, Target};
use crate::flex::{dims, elements, tensor};
use crate::graph::{integers, operand, record};

/// See [`cross_entropy`](super::cross_entropy).
pub(super) fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>, weights: Tensor<1>) -> Tensor<1> {
    let vocabulary = logits.dims()[1];
    let targets = Flex::int_cast(integers(targets), IntDType::I64).to_contiguous();
    let targets: Vec<usize> = elements::<i64>(&targets)
        .iter()
        .map(|target| {
            let index = usize::try_from(*target).unwrap_or(usize::MAX);
            assert!(index < vocabulary, "target {target} of a vocabulary of {vocabulary}");
            index
        })
        .collect();
    loss(logits, OwnedTarget::Targets(targets), weights, 1.0)
}

/// See [`divergence`](super::divergence).
pub(super) fn divergence(
    student: Tensor<2>,
    teacher: Tensor<2>,
    weights: Tensor<1>,
    temperature: f32,
) -> Tensor<1> {
    assert_eq!(student.dims(), teacher.dims(), "logits of a student and a teacher differ in shape");
    let teacher = single(operand(teacher).numbers());
    loss(student, OwnedTarget::Teacher(teacher), weights, 1.0 / temperature)
}

enum OwnedTarget {
    Targets(Vec<usize>),
    Teacher(FlexTensor),
}

impl OwnedTarget {
    fn target(&self) -> Target<'_> {
        match self {
            Self::Targets(targets) => Target::Targets(targets),
            Self::Teacher(logits) => Target::Teacher(elements(logits)),
        }
    }
}

fn loss(
    logits: Tensor<2>,
    owned_target: OwnedTarget,
    weights: Tensor<1>,
    inverse_temperature: f32,
) -> Tensor<1> {
    let [rows, vocabulary] = logits.dims();
    assert_eq!(weights.dims(), [rows], "a weight for every row");
    let logits = operand(logits);
    let weights = single(operand(weights).numbers());
    let total: f64 = elements::<f32>(&weights).iter().map(|weight| f64::from(*weight)).sum();
    let total = if total == 0.0 { 1.0 } else { total };
    let numbers = logits.numbers();
    let dtype = numbers.dtype();
    let numbers = single(numbers);
    let compared =
        Rows { logits: elements(&numbers), vocabulary, target: owned_target.target(), inverse_temperature };
    let losses = compared.losses(elements(&weights));
    let sum: f64 = losses
        .iter()
        .zip(elements::<f32>(&weights))
        .map(|(loss, weight)| f64::from(*loss) * f64::from(*weight))
        .sum();
    let mean = tensor(vec![(sum / total) as f32], [1]);
    record([logits], mean, move |gradient, _| {
        let factor = elements::<f32>(&gradient.to_contiguous())[0] / total as f32;
        let loss_grads: Vec<f32> = elements::<f32>(&weights).iter().map(|weight| weight * factor).collect();
        let compared = Rows {
            logits: elements(&numbers),
            vocabulary,
            target: owned_target.target(),
            inverse_temperature,
        };
        let logit_grads = tensor(compared.gradient(&loss_grads), dims::<2>(&numbers));
        [Some(if dtype == DType::F32 { logit_grads } else { Flex::float_cast(logit_grads, dtype.into()) })]
    })
}

/// Returns the tensor in f32 with contiguous elements.
fn single(numbers: FlexTensor) -> FlexTensor {
    let numbers =
        if numbers.dtype() == DType::F32 { numbers } else { Flex::float_cast(numbers, FloatDType::F32) };
    numbers.to_contiguous()
}
