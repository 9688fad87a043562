//! Rotation with a backward pass of its own.

use burn::backend::Flex;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::Tensor;

use super::{RopeOps, reference};
use crate::graph::{operand, record};

/// See [`rotate`](super::rotate).
pub(super) fn rotate(heads: Tensor<3>, cos: Tensor<3>, sin: Tensor<3>, interleaved: bool) -> Tensor<3> {
    let [cos_operand, sin_operand] = [&cos, &sin].map(|angles| operand(angles.clone()));
    if cos_operand.is_tracked() || sin_operand.is_tracked() {
        return reference::rotate(heads, cos, sin, interleaved);
    }
    let heads = operand(heads);
    let (cos, sin) = (cos_operand, sin_operand);
    let (cos, sin) = (cos.numbers(), sin.numbers());
    let rotated = Flex::rotate(heads.numbers(), cos.clone(), sin.clone(), interleaved);
    record([heads], rotated, move |gradient, _| {
        // The inverse rotation: the same angles with the sine negated.
        let back = Flex::float_neg(sin.clone());
        [Some(Flex::rotate(gradient, cos.clone(), back, interleaved))]
    })
}
