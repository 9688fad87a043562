//! Gates on the CPU.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;

use super::{GateOps, PIECE_ELEMENTS};
use crate::activation::{Activation, Curve, Gelu, GeluQuick, GeluTanh, Relu, ReluSquared, Silu, Tanh};
use crate::flex::{compact, contiguous, dims, elements, tensor};
use crate::simd::{Kernel, LANES, Lanes, dispatch};
use crate::thread_pool::parallel_for_each;

impl GateOps for Flex {
    fn gated(gate: FlexTensor, up: FlexTensor, activation: Activation) -> FlexTensor {
        assert_eq!(dims::<2>(&gate), dims::<2>(&up), "gate and up differ in shape");
        // Written over the gate if it is not shared.
        let (mut gate, up) = (compact(gate), contiguous(up));
        let up: &[f32] = elements(&up);
        let pieces = gate.storage_mut::<f32>().chunks_mut(PIECE_ELEMENTS).zip(up.chunks(PIECE_ELEMENTS));
        parallel_for_each(pieces, |(gate, up)| dispatch(Product { gate, up, activation }));
        gate
    }

    fn gated_halves(both: FlexTensor, activation: Activation) -> FlexTensor {
        let both = contiguous(both);
        let [rows, twice] = dims(&both);
        let width = twice / 2;
        let values: &[f32] = elements(&both);
        let mut product = vec![0.0; rows * width];
        if width > 0 {
            let rows_together = PIECE_ELEMENTS.div_ceil(width);
            let pieces = product.chunks_mut(rows_together * width);
            parallel_for_each(pieces.zip(values.chunks(rows_together * twice)), |(product, both)| {
                dispatch(Halves { both, product, width, activation });
            });
        }
        tensor(product, [rows, width])
    }
}

/// Overwrites a gate with the product.
struct Product<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
    activation: Activation,
}

impl Kernel for Product<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { gate, up, activation } = self;
        match activation {
            Activation::Silu => multiply::<L, Silu>(gate, up),
            Activation::Gelu => multiply::<L, Gelu>(gate, up),
            Activation::GeluTanh => multiply::<L, GeluTanh>(gate, up),
            Activation::GeluQuick => multiply::<L, GeluQuick>(gate, up),
            Activation::Relu => multiply::<L, Relu>(gate, up),
            Activation::ReluSquared => multiply::<L, ReluSquared>(gate, up),
            Activation::Tanh => multiply::<L, Tanh>(gate, up),
        }
    }
}

#[inline(always)]
fn multiply<L: Lanes, C: Curve>(gate: &mut [f32], up: &[f32]) {
    let (gate, gate_rest) = gate.as_chunks_mut::<LANES>();
    let (up, up_rest) = up.as_chunks::<LANES>();
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = C::value(L::load(gate)).mul(L::load(up)).store();
    }
    // The rest as a vector too, so that an element's bits do not depend on its index.
    let (mut last_gate, mut last_up) = ([0.0; LANES], [0.0; LANES]);
    last_gate[..gate_rest.len()].copy_from_slice(gate_rest);
    last_up[..up_rest.len()].copy_from_slice(up_rest);
    let product = C::value(L::load(&last_gate)).mul(L::load(&last_up)).store();
    gate_rest.copy_from_slice(&product[..gate_rest.len()]);
}

/// Rows of a gate followed by an up.
struct Halves<'a> {
    both: &'a [f32],
    product: &'a mut [f32],
    width: usize,
    activation: Activation,
}

impl Kernel for Halves<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { both, product, width, activation } = self;
        for (both, product) in both.chunks_exact(2 * width).zip(product.chunks_exact_mut(width)) {
            let (gate, up) = both.split_at(width);
            product.copy_from_slice(gate);
            Product { gate: product, up, activation }.run::<L>();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::on_each_instruction_set;

    fn exactly(activation: Activation, x: f64) -> f64 {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match activation {
            Activation::Silu => x * sigmoid(x),
            Activation::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                x * sigmoid(2.0 * inner)
            }
            Activation::GeluQuick => x * sigmoid(1.702 * x),
            Activation::Relu => x.max(0.0),
            Activation::ReluSquared => x.max(0.0).powi(2),
            Activation::Tanh => x.tanh(),
            // Tested beside `normal_cdf`.
            Activation::Gelu => f64::NAN,
        }
    }

    struct Check(Activation, &'static str);

    impl Kernel for Check {
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let Self(activation, name) = self;
            // Not a multiple of the lanes.
            let gate: Vec<f32> = (0..40_003).map(|i| i as f32 * 5e-4 - 10.0).collect();
            let up: Vec<f32> = (0..40_003).map(|i| (i % 7) as f32 - 3.0).collect();
            let mut product = gate.clone();
            Product { gate: &mut product, up: &up, activation }.run::<L>();
            for ((found, gate), up) in product.iter().zip(&gate).zip(&up) {
                let (x, found) = (f64::from(*gate), f64::from(*found));
                let expected = exactly(activation, x) * f64::from(*up);
                // The relative error of an exponential grows with its argument.
                let relative =
                    4e-7 + 2e-7 * x.abs().powi(if activation == Activation::GeluTanh { 3 } else { 1 });
                let close = (found - expected).abs() <= relative * expected.abs() + 1e-35;
                assert!(close, "{name}: {found} instead of {expected} for {activation:?} of {x}");
            }
        }
    }

    #[test]
    fn every_instruction_set_gates() {
        for activation in [
            Activation::Silu,
            Activation::GeluTanh,
            Activation::GeluQuick,
            Activation::Relu,
            Activation::ReluSquared,
            Activation::Tanh,
        ] {
            on_each_instruction_set(|name| Check(activation, name));
        }
    }
}
