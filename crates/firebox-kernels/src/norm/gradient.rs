//! RMS normalisation with a backward pass of its own.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;

use super::NormOps;
use super::flex::{PIECE_ELEMENTS, sum_of_squares};
use crate::flex::{dims, elements, tensor};
use crate::graph::{operand, record};
use crate::simd::{Kernel, Lanes, dispatch};

/// See [`rms_norm`](super::rms_norm).
pub(super) fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f64, offset: f32) -> Tensor<2> {
    let (x, weight) = (operand(x), operand(weight));
    let (numbers, weights) = (x.numbers(), weight.numbers());
    let normed = <Flex as NormOps>::rms_norm(numbers.clone(), weights.clone(), epsilon, offset);
    record([x, weight], normed, move |gradient, [x_grad, weight_grad]| {
        let (x_grads, weight_grads) = backward(gradient, &numbers, &weights, epsilon, offset);
        [x_grad.then_some(x_grads), weight_grad.then_some(weight_grads)]
    })
}

fn backward(
    gradient: FlexTensor,
    x: &FlexTensor,
    weight: &FlexTensor,
    epsilon: f64,
    offset: f32,
) -> (FlexTensor, FlexTensor) {
    let (gradient, x, weight) = (gradient.to_contiguous(), x.to_contiguous(), weight.to_contiguous());
    let [rows, width] = dims(&x);
    let (gradient, x, weight): (&[f32], &[f32], &[f32]) =
        (elements(&gradient), elements(&x), elements(&weight));
    let mut x_grad = vec![0.0; rows * width];
    let mut weight_grad = vec![0.0; width];
    if rows * width > 0 {
        let piece = PIECE_ELEMENTS.div_ceil(width) * width;
        // Contributions of the pieces to the weight's gradient, added in order.
        let mut parts = vec![0.0; (rows * width).div_ceil(piece) * width];
        let pieces = gradient.par_chunks(piece).zip(x.par_chunks(piece)).zip(x_grad.par_chunks_mut(piece));
        pieces.zip(parts.par_chunks_mut(width)).for_each(|(((gradient, x), x_grad), weight_grad)| {
            dispatch(Rows { gradient, x, x_grad, weight_grad, weight, epsilon, offset });
        });
        for part in parts.chunks_exact(width) {
            for (sum, part) in weight_grad.iter_mut().zip(part) {
                *sum += part;
            }
        }
    }
    (tensor(x_grad, [rows, width]), tensor(weight_grad, [width]))
}

struct Rows<'a> {
    gradient: &'a [f32],
    x: &'a [f32],
    x_grad: &'a mut [f32],
    weight_grad: &'a mut [f32],
    weight: &'a [f32],
    epsilon: f64,
    offset: f32,
}

impl Kernel for Rows<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { gradient, x, x_grad, weight_grad, weight, epsilon, offset } = self;
        let width = weight.len();
        let rows = gradient.chunks_exact(width).zip(x.chunks_exact(width));
        for ((gradient, x), x_grad) in rows.zip(x_grad.chunks_exact_mut(width)) {
            let mean_square = sum_of_squares::<L>(x) / width as f32;
            let scale = 1.0 / (mean_square + epsilon as f32).sqrt();
            // The gradient without the part that flows through the scale.
            let numbers = gradient.iter().zip(x).zip(weight);
            for ((x_grad, weight_grad), ((gradient, x), weight)) in
                x_grad.iter_mut().zip(weight_grad.iter_mut()).zip(numbers)
            {
                *weight_grad += gradient * x * scale;
                *x_grad = gradient * (weight + offset);
            }
            let output_dot = dot::<L>(x_grad, x) * scale * scale / width as f32;
            for (x_grad, x) in x_grad.iter_mut().zip(x) {
                *x_grad = (*x_grad - x * output_dot) * scale;
            }
        }
    }
}

#[inline(always)]
fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks(), b.as_chunks());
    let (mut even, mut odd) = (L::zero(), L::zero());
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        if index % 2 == 0 {
            even = even.mul_add(L::load(a), L::load(b));
        } else {
            odd = odd.mul_add(L::load(a), L::load(b));
        }
    }
    let mut sum = even.add(odd).sum();
    for (a, b) in a_rest.iter().zip(b_rest) {
        sum += a * b;
    }
    sum
}
