//! Products on the CPU.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};

use super::activations::Activations;
use super::blocks::BlockFormat;
use super::flex_weight::{FlexWeight, ON_FLEX};
use super::grouping::Grouping;
use super::multiplicand::Multiplicand;
use super::multiply;
use super::ops::{BlockOps, LinearOps};
use super::panel::CHUNK;
use super::prepared::PreparedWeight;
use super::weight::Weight;
use crate::flex::{contiguous, dims, elements, tensor};

impl LinearOps for Flex {
    fn multiply(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        one(x, FlexWeight::Dense(weight))
    }

    fn multiply_grouped(
        x: FlexTensor,
        words: FlexTensor,
        scales: FlexTensor,
        grouping: Grouping,
    ) -> FlexTensor {
        one(x, FlexWeight::Grouped { words, scales, grouping })
    }
}

impl BlockOps for Flex {
    fn multiply_blocks(x: FlexTensor, bytes: FlexTensor, format: BlockFormat) -> FlexTensor {
        one(x, FlexWeight::Blocks { bytes, format })
    }

    fn dequantize_blocks(bytes: FlexTensor, format: BlockFormat) -> FlexTensor {
        let weight = PreparedWeight::from(FlexWeight::Blocks { bytes, format });
        let (outputs, inputs) = weight.shape();
        tensor(weight.decode_blocks().unwrap_or_default(), [outputs, inputs])
    }
}

/// See [`multiply_each`](super::multiply_each).
///
/// # Panics
/// If the tensors are not all on Flex, as Burn's operations do for tensors of different devices.
pub(super) fn multiply_each(x: Tensor<2>, weights: Vec<Weight>) -> Vec<Tensor<2>> {
    let prepared: Vec<PreparedWeight> =
        weights.into_iter().map(|weight| FlexWeight::from(weight).into()).collect();
    multiply_prepared(x, &prepared.iter().collect::<Vec<_>>())
}

/// See [`multiply_prepared`](super::multiply_prepared).
pub(super) fn multiply_prepared(x: Tensor<2>, weights: &[&PreparedWeight]) -> Vec<Tensor<2>> {
    let products = each(x.try_into_primitive::<Flex>().expect(ON_FLEX), weights);
    products.into_iter().map(Tensor::from_primitive::<Flex>).collect()
}

/// See [`multiply_heads`](super::multiply_heads).
///
/// # Panics
/// As [`each`] does, and if there are other heads than weights, or weights differ in outputs.
pub(super) fn multiply_heads(x: Tensor<3>, weights: &[&PreparedWeight]) -> Tensor<3> {
    let x = contiguous(x.try_into_primitive::<Flex>().expect(ON_FLEX));
    assert_eq!(x.dtype(), DType::F32, "activations are f32");
    let [rows, heads, inputs] = dims(&x);
    let outputs = weights.first().map_or(0, |weight| weight.shape().0);
    assert_eq!(heads, weights.len(), "every head has a weight");
    assert!(
        weights.iter().all(|weight| weight.shape() == (outputs, inputs)),
        "weights of heads differ in shape"
    );
    let padded = inputs.next_multiple_of(CHUNK);
    let mut by_heads = vec![0.0; heads * rows * padded];
    for (index, from) in elements::<f32>(&x).chunks_exact(inputs.max(1)).enumerate() {
        let at = (index % heads * rows + index / heads) * padded;
        by_heads[at..at + inputs].copy_from_slice(from);
    }
    let of_head = |head: usize| &by_heads[head * rows * padded..][..rows * padded];
    let activations: Vec<_> =
        (0..heads).map(|head| Activations { rows, padded, values: of_head(head) }).collect();
    let multiplicands: Vec<_> = weights.iter().map(|weight| weight.multiplicand()).collect();
    let factors: Vec<(&dyn Multiplicand, usize)> =
        multiplicands.iter().map(|multiplicand| (&**multiplicand, outputs)).collect();
    let products = multiply::multiply_own(&activations, &factors);
    let mut by_rows = Vec::with_capacity(rows * heads * outputs);
    for row in 0..rows {
        products.iter().for_each(|product| by_rows.extend_from_slice(&product[row * outputs..][..outputs]));
    }
    Tensor::from_primitive::<Flex>(tensor(by_rows, [rows, heads, outputs]))
}

pub(super) fn one(x: FlexTensor, weight: FlexWeight) -> FlexTensor {
    let mut products = each(x, &[&weight.into()]);
    // There is one weight, so there is one product.
    products.swap_remove(0)
}

/// # Panics
/// If `x` is not f32, or its rows and those of a weight differ in length.
pub(super) fn each(x: FlexTensor, weights: &[&PreparedWeight]) -> Vec<FlexTensor> {
    assert_eq!(x.dtype(), DType::F32, "activations are f32");
    let x = contiguous(x);
    let [rows, inputs] = dims(&x);
    let padded = inputs.next_multiple_of(CHUNK);
    let mut with_zeros = Vec::new();
    let mut values: &[f32] = elements(&x);
    if padded != inputs {
        with_zeros.resize(rows * padded, 0.0);
        for (to, from) in with_zeros.chunks_exact_mut(padded).zip(values.chunks_exact(inputs)) {
            to[..inputs].copy_from_slice(from);
        }
        values = &with_zeros;
    }
    let multiplicands: Vec<_> = weights.iter().map(|weight| weight.multiplicand()).collect();
    let mut factors: Vec<(&dyn Multiplicand, usize)> = Vec::with_capacity(weights.len());
    for (weight, multiplicand) in weights.iter().zip(&multiplicands) {
        let (outputs, weight_inputs) = weight.shape();
        assert_eq!(inputs, weight_inputs, "the rows of x and of the weight differ in length");
        factors.push((&**multiplicand, outputs));
    }
    let products = multiply::multiply(&Activations { rows, padded, values }, &factors);
    let products = products.into_iter().zip(factors);
    products.map(|(values, (_, outputs))| tensor(values, [rows, outputs])).collect()
}
