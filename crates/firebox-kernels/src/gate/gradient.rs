//! The gate that gradients flow back through.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;

use super::{GateOps, PIECE};
use crate::activation::{Activation, Curve, Gelu, GeluQuick, GeluTanh, Relu, ReluSquared, Silu, Tanh};
use crate::flex::{dims, elements, tensor};
use crate::graph::{operand, record};
use crate::simd::{Kernel, LANES, Lanes, dispatch};

/// See [`gated`](super::gated).
pub(super) fn gated(gate: Tensor<2>, up: Tensor<2>, activation: Activation) -> Tensor<2> {
    let (gate, up) = (operand(gate), operand(up));
    let (gates, ups) = (gate.numbers(), up.numbers());
    let product = Flex::gated(gates.clone(), ups.clone(), activation);
    record([gate, up], product, move |gradient, [of_gate, of_up]| {
        let (of_gates, of_ups) = backward(gradient, &gates, &ups, activation);
        [of_gate.then_some(of_gates), of_up.then_some(of_ups)]
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
    let (mut of_gate, mut of_up) = (vec![0.0; rows * width], vec![0.0; rows * width]);
    let read = elements::<f32>(&gradient).par_chunks(PIECE).zip(elements::<f32>(&gate).par_chunks(PIECE));
    let read = read.zip(elements::<f32>(&up).par_chunks(PIECE));
    let written = of_gate.par_chunks_mut(PIECE).zip(of_up.par_chunks_mut(PIECE));
    read.zip(written).for_each(|(((gradient, gate), up), (of_gate, of_up))| {
        dispatch(Slopes { gradient, gate, up, of_gate, of_up, activation });
    });
    (tensor(of_gate, [rows, width]), tensor(of_up, [rows, width]))
}

fn backward_of_halves(gradient: FlexTensor, both: &FlexTensor, activation: Activation) -> FlexTensor {
    let (gradient, both) = (gradient.to_contiguous(), both.to_contiguous());
    let [rows, twice] = dims(&both);
    let width = twice / 2;
    let mut of_both = vec![0.0; rows * twice];
    if width > 0 {
        let together = PIECE.div_ceil(width);
        let read = elements::<f32>(&gradient).par_chunks(together * width);
        let read = read.zip(elements::<f32>(&both).par_chunks(together * twice));
        let pieces = read.zip(of_both.par_chunks_mut(together * twice));
        pieces.for_each(|((gradient, both), of_both)| {
            dispatch(SlopesOfHalves { gradient, both, of_both, width, activation });
        });
    }
    tensor(of_both, [rows, twice])
}

/// Some elements.
struct Slopes<'a> {
    gradient: &'a [f32],
    gate: &'a [f32],
    up: &'a [f32],
    of_gate: &'a mut [f32],
    of_up: &'a mut [f32],
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
        let Self { gradient, gate, up, of_gate, of_up, .. } = self;
        for start in (0..gradient.len()).step_by(LANES) {
            let count = LANES.min(gradient.len() - start);
            let gradient: L = load(&gradient[start..][..count]);
            let (gate, up): (L, L) = (load(&gate[start..][..count]), load(&up[start..][..count]));
            let (value, slope) = (C::at(gate), C::slope(gate));
            store(&mut of_gate[start..][..count], gradient.mul(up).mul(slope));
            store(&mut of_up[start..][..count], gradient.mul(value));
        }
    }
}

/// Some rows of a gate and an up.
struct SlopesOfHalves<'a> {
    gradient: &'a [f32],
    both: &'a [f32],
    of_both: &'a mut [f32],
    width: usize,
    activation: Activation,
}

impl Kernel for SlopesOfHalves<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { gradient, both, of_both, width, activation } = self;
        let rows = both.chunks_exact(2 * width).zip(of_both.chunks_exact_mut(2 * width));
        for (gradient, (both, of_both)) in gradient.chunks_exact(width).zip(rows) {
            let ((gate, up), (of_gate, of_up)) = (both.split_at(width), of_both.split_at_mut(width));
            Slopes { gradient, gate, up, of_gate, of_up, activation }.run::<L>();
        }
    }
}

/// Up to sixteen numbers, with zeros behind them.
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
