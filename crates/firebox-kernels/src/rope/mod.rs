//! Rotary position embeddings.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod flex;
#[cfg(feature = "autodiff")]
mod gradient;
pub mod reference;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::Tensor;

use crate::flex::{DispatchBackend, has_native_ops};
#[cfg(feature = "autodiff")]
use crate::graph;
use crate::norm::rms_norm;

/// Rotates the first `2 * pairs` elements of every head of `[rows, heads, head_dim]`. `cos` and `sin` are
/// `[rows, 1, pairs]`. A pair is element `i` with element `i + pairs`, or element `2i` with element `2i + 1`
/// if `interleaved`.
pub fn rotate(heads: Tensor<3>, cos: Tensor<3>, sin: Tensor<3>, interleaved: bool) -> Tensor<3> {
    #[cfg(feature = "autodiff")]
    if graph::records(&heads.device()) {
        return gradient::rotate(heads, cos, sin, interleaved);
    }
    if !has_native_ops(&heads.device()) {
        return reference::rotate(heads, cos, sin, interleaved);
    }
    Tensor::from_dispatch(<DispatchBackend as RopeOps>::rotate(
        heads.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
        interleaved,
    ))
}

/// [Normalises](rms_norm) and then [rotates](rotate) heads, in one launch on accelerators.
pub fn rotate_normed(
    heads: Tensor<3>,
    weight: Tensor<1>,
    epsilon: f64,
    offset: f32,
    [cos, sin]: [Tensor<3>; 2],
    interleaved: bool,
) -> Tensor<3> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if [heads.device(), weight.device()].iter().all(crate::cube::is_cube) && heads.shape().num_elements() > 0
    {
        return cube::rotate_normed(heads, weight, epsilon, offset, [cos, sin], interleaved);
    }
    rotate(rms_norm(heads, weight, epsilon, offset), cos, sin, interleaved)
}

/// Rotates cached keys `[kv_heads, positions, head_dim]` by the same angles, whose `cos` and `sin` are
/// `[pairs]`. Pairs are those of [`rotate`].
///
/// Rotating a key by the angles of a distance moves it by that distance, so gaps in a cache can be closed
/// without recomputing keys.
pub fn rotate_by(keys: Tensor<3>, cos: Tensor<1>, sin: Tensor<1>, interleaved: bool) -> Tensor<3> {
    if !has_native_ops(&keys.device()) || keys.shape().num_elements() == 0 {
        return reference::rotate_by(keys, cos, sin, interleaved);
    }
    Tensor::from_dispatch(<DispatchBackend as RopeOps>::rotate_by(
        keys.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
        interleaved,
    ))
}

#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub(crate) trait RopeOps: Backend {
    fn rotate(
        heads: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        interleaved: bool,
    ) -> FloatTensor<Self>;

    fn rotate_by(
        keys: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        interleaved: bool,
    ) -> FloatTensor<Self>;
}
