//! Reference implementation in Burn's operations.

use burn::tensor::Tensor;

/// See [`rms_norm`](super::rms_norm).
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f64, offset: f32) -> Tensor<2> {
    let mean_square = x.clone().square().mean_dim(1);
    let weight = if offset == 0.0 { weight } else { weight.add_scalar(offset) };
    x.div(mean_square.add_scalar(epsilon).sqrt()).mul(weight.unsqueeze())
}
