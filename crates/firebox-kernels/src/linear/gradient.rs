//! Products with a backward pass of their own.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Int, Tensor};
use rayon::prelude::*;

use super::blocks::BlockFormat;
use super::flex::{each, one};
use super::flex_weight::FlexWeight;
use super::ops::BlockOps;
use super::panel::OUTPUTS;
use super::place::Place;
use super::plain::{Bf16, Columns, F16, F32};
use super::prepared::PreparedWeight;
use super::weight::Weight;
use crate::flex::{bytes, dims, elements, tensor};
use crate::graph::{self, Operand, integers, operand};
use crate::matrix::{self, Left, RowMajor, Size};

/// Elements of a packed weight that are unpacked at a time, four bytes each.
const UNPACKED_NUMBERS: usize = 1 << 20;

/// See [`multiply_each`](super::multiply_each).
pub(super) fn multiply_each(x: Tensor<2>, weights: Vec<Weight>) -> Vec<Tensor<2>> {
    let x = operand(x);
    let (weights, operands): (Vec<FlexWeight>, Vec<Option<Operand>>) = weights.into_iter().map(taken).unzip();
    let prepared: Vec<PreparedWeight> = weights.iter().map(|weight| weight.clone().into()).collect();
    let products = each(x.numbers(), &prepared.iter().collect::<Vec<_>>());
    let parts = products.into_iter().zip(weights).zip(operands);
    parts.map(|((product, weight), operand)| record(x.clone(), weight, operand, product)).collect()
}

/// See [`multiply`](super::multiply).
pub(super) fn multiply(x: Tensor<2>, weight: Weight) -> Tensor<2> {
    let (x, (weight, operand)) = (operand(x), taken(weight));
    let product = one(x.numbers(), weight.clone());
    record(x, weight, operand, product)
}

/// See [`dequantize_blocks`](super::dequantize_blocks).
pub(super) fn dequantize_blocks(bytes: Tensor<2, Int>, format: BlockFormat) -> Tensor<2> {
    let strategy = bytes.device().gradient_checkpointing_strategy();
    let numbers = <Flex as BlockOps>::dequantize_blocks(integers(bytes), format);
    let numbers = Tensor::from_primitive::<Flex>(numbers);
    match strategy {
        Some(strategy) => numbers.autodiff().with_gradient_checkpointing_strategy(strategy),
        None => numbers,
    }
}

/// Returns the weight as tensors of Flex, and as an operand if it can have a gradient.
fn taken(weight: Weight) -> (FlexWeight, Option<Operand>) {
    match weight {
        Weight::Dense(weight) => {
            let weight = operand(weight);
            (FlexWeight::Dense(weight.numbers()), Some(weight))
        }
        Weight::Grouped { words, scales, grouping } => {
            let scales = operand(scales).numbers();
            (FlexWeight::Grouped { words: integers(words), scales, grouping }, None)
        }
        Weight::Blocks { bytes, format } => (FlexWeight::Blocks { bytes: integers(bytes), format }, None),
    }
}

fn record(x: Operand, weight: FlexWeight, operand: Option<Operand>, product: FlexTensor) -> Tensor<2> {
    match operand {
        Some(operand) => {
            // A frozen weight needs no gradient, so the activations need not be kept.
            let numbers = operand.is_tracked().then(|| x.numbers());
            let dtype = operand.numbers().dtype();
            graph::record([x, operand], product, move |gradient, [x_grad, weight_grad]| {
                let gradient = gradient.to_contiguous();
                let numbers = numbers.as_ref().filter(|_| weight_grad);
                [
                    x_grad.then(|| input_gradient(&gradient, &weight)),
                    numbers.map(|numbers| weight_gradient(&gradient, numbers, dtype)),
                ]
            })
        }
        None => graph::record([x], product, move |gradient, _| {
            [Some(input_gradient(&gradient.to_contiguous(), &weight))]
        }),
    }
}

/// `gradient · weight`, `[rows, inputs]`.
fn input_gradient(gradient: &FlexTensor, weight: &FlexWeight) -> FlexTensor {
    let [rows, outputs] = dims(gradient);
    let (_, inputs) = weight.shape();
    let left = Left::new(elements(gradient), outputs);
    let size = Size { rows, terms: outputs, columns: inputs };
    let product = match weight {
        FlexWeight::Dense(weight) => {
            let weight = weight.to_contiguous();
            match weight.dtype() {
                DType::F16 => matrix::multiply(left, &Columns::<F16>::new(bytes(&weight), inputs), size),
                DType::BF16 => matrix::multiply(left, &Columns::<Bf16>::new(bytes(&weight), inputs), size),
                _ => matrix::multiply(left, &Columns::<F32>::new(bytes(&weight), inputs), size),
            }
        }
        packed => packed_gradient(elements(gradient), packed, size),
    };
    tensor(product, [rows, inputs])
}

/// [`input_gradient`] for a packed weight, unpacked a few rows at a time.
fn packed_gradient(gradient: &[f32], weight: &FlexWeight, size: Size) -> Vec<f32> {
    let Size { rows, terms: outputs, columns: inputs } = size;
    let mut product = vec![0.0; rows * inputs];
    if product.is_empty() {
        return product;
    }
    let weight = PreparedWeight::from(weight.clone());
    let multiplicand = weight.multiplicand();
    let rows_per_piece = (UNPACKED_NUMBERS / inputs).max(1).next_multiple_of(OUTPUTS);
    let mut unpacked = vec![0.0; rows_per_piece.min(outputs) * inputs];
    for first in (0..outputs).step_by(rows_per_piece) {
        let count = rows_per_piece.min(outputs - first);
        let values = &mut unpacked[..count * inputs];
        values.par_chunks_mut(OUTPUTS * inputs).enumerate().for_each(|(panel, values)| {
            let place = Place::new(first + panel * OUTPUTS, 0, multiplicand.padded_rows(outputs));
            multiplicand.unpack(place, inputs, values);
        });
        let right = RowMajor { values, stride: inputs, columns: inputs };
        let left = Left::new(&gradient[first..], outputs);
        matrix::add_product(left, &right, Size { terms: count, ..size }, &mut product);
    }
    product
}

/// `gradientᵀ · x`, `[outputs, inputs]`.
fn weight_gradient(gradient: &FlexTensor, x: &FlexTensor, dtype: DType) -> FlexTensor {
    let x = x.to_contiguous();
    let ([rows, outputs], [_, inputs]) = (dims(gradient), dims(&x));
    let left = Left::transposed(elements(gradient), outputs);
    let right = RowMajor { values: elements(&x), stride: inputs, columns: inputs };
    let product = matrix::multiply(left, &right, Size { rows: outputs, terms: rows, columns: inputs });
    let product = tensor(product, [outputs, inputs]);
    if dtype == DType::F32 { product } else { Flex::float_cast(product, dtype.into()) }
}
