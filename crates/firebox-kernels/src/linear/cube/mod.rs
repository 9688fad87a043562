//! Products on accelerators.
//!
//! Up to [`FEW_ROWS`] rows ([`rows`]) a line of units goes along some rows of the weight and keeps its sums in registers:
//! the weight is read once per row, in 16-byte pieces that follow each other. A launch costs more than many a product of one
//! row, so weights that meet the same rows share one. With more rows ([`tiles`]), cubes stage
//! tiles of both sides in shared memory as f32, so that a weight is unpacked once per 32 rows and
//! never as a whole. Within either way a row's result does not depend on the rows beside it; the two add in
//! different orders, so across that limit it may differ in the last bits.

mod rows;
mod tiles;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, prelude::*};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::grouping::{Grouping, NIBBLE_CHUNK};
use super::ops::LinearOps;
use super::reference::in_rows;
use super::weight::Weight;
use crate::cube::{dims, floats, integers, primitive, zeroed};

/// Up to so many rows, reading the weight once for each, from a cache that the row before has filled, is faster than tiles
/// that are mostly empty: eight rows of a whole model 1.2 times on an H200.
const FEW_ROWS: usize = 16;

impl LinearOps for CubeBackend {
    fn multiply(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, weight) = (floats(x), into_contiguous(weight));
        let ([rows, inputs], [outputs, _]) = (dims(&x), dims(&weight));
        if rows * outputs * inputs == 0 {
            return zeroed(&x, [rows, outputs]);
        }
        if rows <= FEW_ROWS {
            return only(rows::plain(x, vec![weight]));
        }
        tiles::plain(x, weight)
    }

    fn multiply_grouped(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        scales: FloatTensor<Self>,
        grouping: Grouping,
    ) -> FloatTensor<Self> {
        let (x, words, scales) = (floats(x), into_contiguous(words), into_contiguous(scales));
        assert_eq!(words.dtype.size(), 4, "packed integers are 32-bit words, not {:?}", words.dtype);
        let ([rows, _], [outputs, _]) = (dims(&x), dims(&words));
        if rows * outputs * grouping.inputs == 0 {
            return zeroed(&x, [rows, outputs]);
        }
        if rows <= FEW_ROWS {
            return only(rows::grouped(x, vec![(words, scales)], grouping));
        }
        tiles::grouped(x, words, scales, grouping)
    }
}

/// See [`multiply_each`](super::multiply_each). Few rows meet weights of one form in one launch.
pub(super) fn multiply_each(x: Tensor<2>, weights: Vec<Weight>) -> Vec<Tensor<2>> {
    let [count, inputs] = x.dims();
    let form = weights.first().and_then(form);
    let alike = form.is_some() && weights.iter().all(|weight| self::form(weight) == form);
    if !alike || weights.len() == 1 || !(1..=FEW_ROWS).contains(&count) || inputs == 0 {
        return weights.into_iter().map(|weight| weight.multiply(x.clone())).collect();
    }
    let x = floats(primitive(x));
    let mut products = Vec::with_capacity(weights.len());
    let mut weights = weights.into_iter().peekable();
    while weights.peek().is_some() {
        let (mut dense, mut grouped) = (Vec::new(), Vec::new());
        for weight in weights.by_ref().take(rows::TOGETHER) {
            match weight {
                Weight::Dense(weight) => dense.push(into_contiguous(primitive(weight))),
                Weight::Grouped { words, scales, grouping } => {
                    let (words, scales, _) = in_rows(words, scales, grouping);
                    grouped.push((into_contiguous(integers(words)), into_contiguous(primitive(scales))));
                }
                Weight::Blocks { .. } => unreachable!("they have no form that is multiplied here"),
            }
        }
        products.extend(match form {
            Some(Form::Grouped(grouping, _)) => rows::grouped(x.clone(), grouped, grouping),
            _ => rows::plain(x.clone(), dense),
        });
    }
    products.into_iter().map(Tensor::from_primitive::<CubeBackend>).collect()
}

/// What weights have in common that one kernel multiplies with.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Dense(DType),
    /// With what scales are.
    Grouped(Grouping, DType),
}

/// The form of a weight that can be multiplied with beside others; absent where it has no outputs, or a layout of which the
/// reference is all that there is.
fn form(weight: &Weight) -> Option<Form> {
    match weight {
        Weight::Dense(weight) if weight.dims()[0] > 0 => Some(Form::Dense(weight.dtype())),
        Weight::Grouped { words, scales, grouping }
            if words.dims()[0] > 0 && grouping.group.is_multiple_of(NIBBLE_CHUNK) =>
        {
            Some(Form::Grouped(Grouping { tiled: false, ..*grouping }, scales.dtype()))
        }
        _ => None,
    }
}

fn only(products: Vec<CubeTensor>) -> CubeTensor {
    products.into_iter().next().unwrap_or_else(|| unreachable!("a product for every weight"))
}

/// Four inputs of the row that starts at element `row`; behind the row's end they are zero. Where the row is
/// `whole`, it has a multiple of four, and `at` is within.
#[cube]
fn four_inputs<F: Float, V: Size>(
    matrix: &[Vector<F, V>],
    row: u32,
    at: u32,
    inputs: u32,
    #[comptime] whole: bool,
) -> Vector<f32, Const<4>> {
    let mut values = Vector::<f32, Const<4>>::new(0.0f32);
    if comptime!(whole) {
        let piece = matrix[((row + at) / 4) as usize];
        #[unroll]
        for index in 0..4usize {
            values.insert(index, f32::cast_from(piece.extract(index)));
        }
    } else {
        #[unroll]
        for index in 0..4usize {
            if at + (index as u32) < inputs {
                let value = matrix[(row + at + index as u32) as usize];
                values.insert(index, f32::cast_from(value.extract(0usize)));
            }
        }
    }
    values
}

/// The numbers in every byte's four bits from `from` on.
#[cube]
fn nibbles(word: u32, from: u32) -> Vector<f32, Const<4>> {
    let mut numbers = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for byte in 0..4usize {
        let nibble = (word >> (from + 8 * byte as u32)) & 15;
        numbers.insert(byte, f32::cast_from(nibble) - 8.0f32);
    }
    numbers
}
