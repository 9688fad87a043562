//! The gate of a feed-forward network.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cube;
mod flex;
#[cfg(feature = "autodiff")]
mod gradient;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::Tensor;

use crate::activation::Activation;
use crate::flex::{DispatchBackend, has_native_ops};
#[cfg(feature = "autodiff")]
use crate::graph;

/// Elements below which a second thread costs more than it gains.
const PIECE_ELEMENTS: usize = 1 << 16;

/// Returns `activation(gate) * up` for two tensors `[rows, width]`.
///
/// On the CPU the error of the activation is below 3e-7, and an element's bits depend only on its own gate
/// and up.
pub fn gated(gate: Tensor<2>, up: Tensor<2>, activation: Activation) -> Tensor<2> {
    #[cfg(feature = "autodiff")]
    if graph::records(&gate.device()) || graph::records(&up.device()) {
        return gradient::gated(gate, up, activation);
    }
    if ![&gate, &up].iter().all(|half| has_native_ops(&half.device())) {
        return reference(gate, up, activation);
    }
    Tensor::from_dispatch(<DispatchBackend as GateOps>::gated(
        gate.into_dispatch(),
        up.into_dispatch(),
        activation,
    ))
}

/// [`gated`] for one tensor `[rows, 2 * width]` whose rows are a gate followed by an up.
pub fn gated_halves(both: Tensor<2>, activation: Activation) -> Tensor<2> {
    #[cfg(feature = "autodiff")]
    if graph::records(&both.device()) {
        return gradient::gated_halves(both, activation);
    }
    if !has_native_ops(&both.device()) {
        let width = both.dims()[1] / 2;
        return reference(both.clone().narrow(1, 0, width), both.narrow(1, width, width), activation);
    }
    Tensor::from_dispatch(<DispatchBackend as GateOps>::gated_halves(both.into_dispatch(), activation))
}

/// Reference implementation in Burn's operations.
pub fn reference(gate: Tensor<2>, up: Tensor<2>, activation: Activation) -> Tensor<2> {
    activation.forward(gate).mul(up)
}

#[backend_extension(Flex, Cube: cfg(any(feature = "wgpu", feature = "cuda")))]
pub(crate) trait GateOps: Backend {
    fn gated(gate: FloatTensor<Self>, up: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;

    fn gated_halves(both: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;
}
