//! Division by the root of the mean square.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, backend_extension};
use burn::tensor::Tensor;

use crate::flex::{Dispatched, dims, elements, is_flex, tensor};

/// `x / sqrt(mean(x²) + epsilon) * (weight + offset)` over the last dimension of `[rows, width]`.
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f64, offset: f32) -> Tensor<2> {
    if !is_flex(&x.device()) {
        return reference(x, weight, epsilon, offset);
    }
    Tensor::from_dispatch(<Dispatched as NormOps>::rms_norm(
        x.into_dispatch(),
        weight.into_dispatch(),
        epsilon,
        offset,
    ))
}

/// The same in Burn's operations.
pub fn reference(x: Tensor<2>, weight: Tensor<1>, epsilon: f64, offset: f32) -> Tensor<2> {
    let mean_square = x.clone().square().mean_dim(1);
    let weight = if offset == 0.0 { weight } else { weight.add_scalar(offset) };
    x.div(mean_square.add_scalar(epsilon).sqrt()).mul(weight.unsqueeze())
}

#[backend_extension(Flex)]
pub(crate) trait NormOps: Backend {
    fn rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        offset: f32,
    ) -> FloatTensor<Self>;
}

impl NormOps for Flex {
    fn rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        offset: f32,
    ) -> FloatTensor<Self> {
        let (x, weight) = (x.to_contiguous(), weight.to_contiguous());
        let [rows, width] = dims(&x);
        let (values, weight): (&[f32], &[f32]) = (elements(&x), elements(&weight));
        let mut normed = Vec::with_capacity(rows * width);
        for row in values.chunks_exact(width.max(1)) {
            let mean_square = sum_of_squares(row) / width as f32;
            let divisor = (mean_square + epsilon as f32).sqrt();
            normed.extend(row.iter().zip(weight).map(|(value, weight)| value / divisor * (weight + offset)));
        }
        tensor(normed, [rows, width])
    }
}

/// In sixteen interleaved sums, so that it vectorizes; the order does not depend on the processor.
fn sum_of_squares(row: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    let (chunks, rest) = row.as_chunks::<16>();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += value * value;
        }
    }
    for (sum, value) in sums.iter_mut().zip(rest) {
        *sum += value * value;
    }
    sums.iter().sum()
}
