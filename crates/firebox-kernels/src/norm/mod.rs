//! RMS normalisation.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cube;
mod flex;
#[cfg(feature = "autodiff")]
mod gradient;
pub mod reference;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::Tensor;

use crate::flex::{DispatchBackend, has_native_ops, is_flex};
#[cfg(feature = "autodiff")]
use crate::graph;

/// Returns `x / sqrt(mean(x²) + epsilon) * (weight + offset)` over the last dimension.
///
/// On the CPU and on accelerators a row's bits do not depend on the other rows.
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, epsilon: f64, offset: f32) -> Tensor<D> {
    if is_flex(&x.device()) && is_flex(&weight.device()) {
        let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
        return Tensor::from_dispatch(<DispatchBackend as NormOps>::rms_norm(x, weight, epsilon, offset));
    }
    let dims = x.dims();
    let (outer, width) = dims.split_at(D - 1);
    let rows = x.reshape([outer.iter().product(), width[0]]);
    normed_rows(rows, weight, epsilon, offset).reshape(dims)
}

fn normed_rows(x: Tensor<2>, weight: Tensor<1>, epsilon: f64, offset: f32) -> Tensor<2> {
    #[cfg(feature = "autodiff")]
    if graph::records(&x.device()) || graph::records(&weight.device()) {
        return gradient::rms_norm(x, weight, epsilon, offset);
    }
    if !has_native_ops(&x.device()) {
        return reference::rms_norm(x, weight, epsilon, offset);
    }
    Tensor::from_dispatch(<DispatchBackend as NormOps>::rms_norm(
        x.into_dispatch(),
        weight.into_dispatch(),
        epsilon,
        offset,
    ))
}

/// Returns the sum of two tensors `[rows, width]`, and the [normalised](rms_norm) sum.
pub fn add_rms_norm(
    x: Tensor<2>,
    residual: Tensor<2>,
    weight: Tensor<1>,
    epsilon: f64,
    offset: f32,
) -> (Tensor<2>, Tensor<2>) {
    #[cfg(feature = "autodiff")]
    if [x.device(), residual.device(), weight.device()].iter().any(graph::records) {
        let sum = x.add(residual);
        return (sum.clone(), gradient::rms_norm(sum, weight, epsilon, offset));
    }
    if !has_native_ops(&x.device()) {
        let sum = x.add(residual);
        return (sum.clone(), reference::rms_norm(sum, weight, epsilon, offset));
    }
    let (sum, normed) = <DispatchBackend as NormOps>::add_rms_norm(
        x.into_dispatch(),
        residual.into_dispatch(),
        weight.into_dispatch(),
        epsilon,
        offset,
    );
    (Tensor::from_dispatch(sum), Tensor::from_dispatch(normed))
}

#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub(crate) trait NormOps: Backend {
    /// Takes `[rows, width]`, on Flex any rank.
    fn rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        offset: f32,
    ) -> FloatTensor<Self>;

    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        offset: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
