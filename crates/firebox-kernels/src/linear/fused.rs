//! Products fused with the steps before and after them in a layer.

use burn::tensor::Tensor;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::cube;
use super::row_norm::RowNorm;
use super::{Weight, multiply_each};
use crate::activation::Activation;
use crate::gate::gated;

/// Returns the products of normalised rows with several weights: [`rms_norm`](crate::norm::rms_norm), then [`multiply_each`].
///
/// On accelerators a few rows and weights of one form take one launch for every three weights.
pub fn multiply_each_normed(x: Tensor<2>, norm: RowNorm, weights: Vec<Weight>) -> Vec<Tensor<2>> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if cube::can_fuse(&x, &weights) {
        return cube::multiply_fused(x, weights, Some(norm), None, None);
    }
    multiply_each(norm.apply(x), weights)
}

/// Returns `activation(gate(x)) * up(x)` of normalised rows: [`rms_norm`](crate::norm::rms_norm), [`multiply_each`], then [`gated`].
///
/// On accelerators a few rows and weights of one form take one launch.
pub fn multiply_gated(
    x: Tensor<2>,
    norm: RowNorm,
    weights: [Weight; 2],
    activation: Activation,
) -> Tensor<2> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if cube::can_fuse(&x, &weights) {
        let mut products = cube::multiply_fused(x, weights.into(), Some(norm), Some(activation), None);
        return products.swap_remove(0);
    }
    let mut products = multiply_each(norm.apply(x), weights.into());
    let up = products.swap_remove(1);
    gated(products.swap_remove(0), up, activation)
}

/// Returns a product with something added to it, both `[rows, outputs]`.
///
/// On accelerators a few rows take one launch.
pub fn multiply_added(x: Tensor<2>, weight: Weight, added: Tensor<2>) -> Tensor<2> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if cube::can_fuse(&x, std::slice::from_ref(&weight)) {
        let mut products = cube::multiply_fused(x, vec![weight], None, None, Some(added));
        return products.swap_remove(0);
    }
    weight.multiply(x).add(added)
}

/// Returns whether products of these rows are fused with other steps: few rows on an accelerator.
pub fn fuses_rows(x: &Tensor<2>) -> bool {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    return crate::cube::is_cube(&x.device()) && (1..=cube::FEW_ROWS).contains(&x.dims()[0]);
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    {
        let _ = x;
        false
    }
}
