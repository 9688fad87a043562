//! The gate with a backward pass of its own.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;

use super::{GateOps, PIECE_ELEMENTS};
use crate::activation::{Activation, Curve, Gelu, GeluQuick, GeluTanh, Relu, ReluSquared, Silu, Tanh};
use crate::flex::{dims, elements, tensor};
use crate::graph::{operand, record};
use crate::simd::{Kernel, LANES, Lanes, dispatch};

/// See [`gated`](super::gated).
pub(super) fn gated(gate: Tensor<2>, up: Tensor<2>, activation: Activation) -> Tensor<2> {
    let (gate, up) = (operand(gate), operand(up));
    let (gates, ups) = (gate.numbers(), up.numbers());
    let product = Flex::gated(gates.clone(), ups.clone(), activation);
    record([gate, up], product, move |gradient, [gate_grad, up_grad]| {
        let (gate_grads, up_grads) = backward(gradient, &gates, &ups, activation);
        [gate_grad.then_some(gate_grads), up_grad.then_some(up_grads)]
    })
}

/// See [`gated_halves`](super::gated_halves).
pub(super) fn gated_halves(both: Tensor<2>, activation: Activation) -> Tensor<2> {
    let both = operand(both);
    let numbers = both.numbers();
    let product = Flex::gated_halves(numbers.clone(), activation);
    record([both], product, move |gradient, _| [Some(backward_of_halves(gradient, &numbers, activation))])
}

fn backward(
    gradient: FlexTensor,
    gate: &FlexTensor,
    up: &FlexTensor,
    activation: Activation,
) -> (FlexTensor, FlexTensor) {
    let (gradient, gate, up) = (gradient.to_contiguous(), gate.to_contiguous(), up.to_contiguous());
    let [rows, width] = dims(&gate);
    let (mut gate_grad, mut up_grad) = (vec![0.0; rows * width], vec![0.0; rows * width]);
    let read = elements::<f32>(&gradient)
        .par_chunks(PIECE_ELEMENTS)
        .zip(elements::<f32>(&gate).par_chunks(PIECE_ELEMENTS));
    let read = read.zip(elements::<f32>(&up).par_chunks(PIECE_ELEMENTS));
    let written = gate_grad.par_chunks_mut(PIECE_ELEMENTS).zip(up_grad.par_chunks_mut(PIECE_ELEMENTS));
    read.zip(written).for_each(|(((gradient, gate), up), (gate_grad, up_grad))| {
        dispatch(Slopes { gradient, gate, up, gate_grad, up_grad, activation });
    });
    (tensor(gate_grad, [rows, width]), tensor(up_grad, [rows, width]))
}

fn backward_of_halves(gradient: FlexTensor, both: &FlexTensor, activation: Activation) -> FlexTensor {
    let (gradient, both) = (gradient.to_contiguous(), both.to_contiguous());
    let [rows, twice] = dims(&both);
    let width = twice / 2;
    let mut both_grad = vec![0.0; rows * twice];
    if width > 0 {
        let rows_per_piece = PIECE_ELEMENTS.div_ceil(width);
        let read = elements::<f32>(&gradient).par_chunks(rows_per_piece * width);
        let read = read.zip(elements::<f32>(&both).par_chunks(rows_per_piece * twice));
        let pieces = read.zip(both_grad.par_chunks_mut(rows_per_piece * twice));
        pieces.for_each(|((gradient, both), both_grad)| {
            dispatch(SlopesOfHalves { gradient, both, both_grad, width, activation });
        });
    }
    tensor(both_grad, [rows, twice])
}

/// Gradients of some elements.
struct Slopes<'a> {
    gradient: &'a [f32],
    gate: &'a [f32],
    up: &'a [f32],
    gate_grad: &'a mut [f32],
    up_grad: &'a mut [f32],
    activation: Activation,
}

impl Kernel for Slopes<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        match self.activation {
            Activation::Silu => self.flow::<L, Silu>(),
            Activation::Gelu => self.flow::<L, Gelu>(),
            Activation::GeluTanh => self.flow::<L, GeluTanh>(),
            Activation::GeluQuick => self.flow::<L, GeluQuick>(),
            Activation::Relu => self.flow::<L, Relu>(),
            Activation::ReluSquared => self.flow::<L, ReluSquared>(),
            Activation::Tanh => self.flow::<L, Tanh>(),
        }
    }
}

impl Slopes<'_> {
    #[inline(always)]
    fn flow<L: Lanes, C: Curve>(self) {
        let Self { gradient, gate, up, gate_grad, up_grad, .. } = self;
        for start in (0..gradient.len()).step_by(LANES) {
            let count = LANES.min(gradient.len() - start);
            let gradient: L = load(&gradient[start..][..count]);
            let (gate, up): (L, L) = (load(&gate[start..][..count]), load(&up[start..][..count]));
            let (value, slope) = (C::value(gate), C::derivative(gate));
            store(&mut gate_grad[start..][..count], gradient.mul(up).mul(slope));
            store(&mut up_grad[start..][..count], gradient.mul(value));
        }
    }
}

/// Gradients of rows of a gate followed by an up.
struct SlopesOfHalves<'a> {
    gradient: &'a [f32],
    both: &'a [f32],
    both_grad: &'a mut [f32],
    width: usize,
    activation: Activation,
}

impl Kernel for SlopesOfHalves<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { gradient, both, both_grad, width, activation } = self;
        let rows = both.chunks_exact(2 * width).zip(both_grad.chunks_exact_mut(2 * width));
        for (gradient, (both, both_grad)) in gradient.chunks_exact(width).zip(rows) {
            let ((gate, up), (gate_grad, up_grad)) = (both.split_at(width), both_grad.split_at_mut(width));
            Slopes { gradient, gate, up, gate_grad, up_grad, activation }.run::<L>();
        }
    }
}

/// Loads up to sixteen numbers, padded with zeros.
#[inline(always)]
fn load<L: Lanes>(numbers: &[f32]) -> L {
    match numbers.first_chunk() {
        Some(whole) => L::load(whole),
        None => {
            let mut padded = [0.0; LANES];
            padded[..numbers.len()].copy_from_slice(numbers);
            L::load(&padded)
        }
    }
}

#[inline(always)]
fn store<L: Lanes>(numbers: &mut [f32], lanes: L) {
    match numbers.first_chunk_mut() {
        Some(whole) => *whole = lanes.store(),
        None => numbers.copy_from_slice(&lanes.store()[..numbers.len()]),
    }
}
