//! Products on accelerators.
//!
//! Up to [`FEW_ROWS`] rows ([`rows`]) a line of units goes along some rows of the weight and keeps its sums in registers: it
//! unpacks a piece of the weight once for a group of rows. A launch costs more than many a product of one
//! row, so weights that meet the same rows share one. With more rows ([`tiles`]), cubes stage
//! tiles of both sides in shared memory as f32, so that a weight is unpacked once per 32 or 64 rows and
//! never as a whole. Within either way a row's result does not depend on the rows beside it; the two add in
//! different orders, so across that limit it may differ in the last bits. Devices with matrix units multiply many rows with
//! weights of 16 bits or less in f16 ([`halves`]), with sums in f32.

mod gather;
mod halves;
mod line_results;
mod lines;
mod rows;
mod tiles;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::ir::{ElemType, FloatKind, UIntKind};
use burn_cubecl::cubecl::{self, client::Client, prelude::*};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::grouping::{Grouping, NIBBLE_CHUNK};
use super::ops::LinearOps;
use super::reference::in_rows;
use super::row_norm::RowNorm;
use super::weight::Weight;
use crate::activation::Activation;
use crate::cube::{dims, element, floats, integers, is_cube, primitive, zeroed};
pub(super) use gather::{gather, gather_grouped};
use halves::{HalfRows, has_matrix_units, supports_halves};
use rows::{FusedOps, supports_fusion};

/// Up to so many rows, unpacking the weight once for every eight is faster than tiles, of which a product has too few for a
/// large device.
pub(super) const FEW_ROWS: usize = 32;

impl LinearOps for CubeBackend {
    fn multiply(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, weight) = (floats(x), into_contiguous(weight));
        let ([rows, inputs], [outputs, _]) = (dims(&x), dims(&weight));
        if rows * outputs * inputs == 0 {
            return zeroed(&x, [rows, outputs]);
        }
        if rows <= FEW_ROWS {
            return only(rows::plain(x, vec![weight], &FusedOps::default()));
        }
        only(multiply_many(x, vec![Operand::Dense(weight)]))
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
            return only(rows::grouped(x, vec![(words, scales)], grouping, &FusedOps::default()));
        }
        only(multiply_many(x, vec![Operand::Grouped(words, scales, grouping)]))
    }
}

/// A weight with something in it, as kernels read it.
enum Operand {
    Dense(CubeTensor),
    /// Words and scales.
    Grouped(CubeTensor, CubeTensor, Grouping),
}

impl Operand {
    /// `None` for a weight that only the reference multiplies with.
    fn new(weight: Weight) -> Option<Self> {
        form(&weight)?;
        match weight {
            Weight::Dense(weight) => Some(Self::Dense(into_contiguous(primitive(weight)))),
            Weight::Grouped { words, scales, grouping } => {
                let (words, scales, grouping) = in_rows(words, scales, grouping);
                let (words, scales) = (integers(words), primitive(scales));
                Some(Self::Grouped(into_contiguous(words), into_contiguous(scales), grouping))
            }
            Weight::Blocks { .. } => None,
        }
    }

    /// Whether its numbers have 16 bits or less, so that products of f16 lose little.
    fn fits_halves(&self) -> bool {
        match self {
            Self::Dense(weight) => weight.dtype.size() <= 2,
            Self::Grouped(..) => true,
        }
    }
}

/// The products of many rows in f32, which are rounded to f16 once where a device has matrix units.
fn multiply_many(x: CubeTensor, weights: Vec<Operand>) -> Vec<CubeTensor> {
    let [_, inputs] = dims(&x);
    let in_halves = has_matrix_units(&x.client) && supports_halves(&x.client, inputs);
    let mut halves: Option<HalfRows> = None;
    let product = |weight: Operand| {
        if in_halves && weight.fits_halves() {
            return halves.get_or_insert_with(|| HalfRows::new(x.clone())).multiply(weight, true);
        }
        match weight {
            Operand::Dense(weight) => tiles::plain(x.clone(), weight),
            Operand::Grouped(words, scales, grouping) => tiles::grouped(x.clone(), words, scales, grouping),
        }
    };
    weights.into_iter().map(product).collect()
}

/// See [`multiply_in_halves`](super::multiply_in_halves).
pub(super) fn multiply_in_halves(x: Tensor<2>, weight: Weight, matrix_units: bool) -> Option<Tensor<2>> {
    let x = floats(primitive(x));
    let [rows, inputs] = dims(&x);
    let supported = supports_halves(&x.client, inputs) && (!matrix_units || has_matrix_units(&x.client));
    let weight = Operand::new(weight).filter(|_| supported && rows * inputs > 0)?;
    Some(Tensor::from_primitive::<CubeBackend>(HalfRows::new(x).multiply(weight, matrix_units)))
}

/// See [`multiply_each`](super::multiply_each). Few rows meet weights of one form in one launch; many rows are rounded once.
pub(super) fn multiply_each(x: Tensor<2>, weights: Vec<Weight>) -> Vec<Tensor<2>> {
    if weights.len() > 1 && same_form(&x, &weights) {
        return multiply_same_form(x, weights, &FusedOps::default());
    }
    let [rows, inputs] = x.dims();
    if weights.len() > 1
        && rows > FEW_ROWS
        && inputs > 0
        && weights.iter().all(|weight| weight.device() == x.device() && form(weight).is_some())
    {
        let operands = weights.into_iter().filter_map(Operand::new).collect();
        let products = multiply_many(floats(primitive(x)), operands);
        return products.into_iter().map(Tensor::from_primitive::<CubeBackend>).collect();
    }
    weights.into_iter().map(|weight| weight.multiply(x.clone())).collect()
}

/// Returns whether there are few rows and all weights have one form that has a kernel.
fn same_form(x: &Tensor<2>, weights: &[Weight]) -> bool {
    let [count, inputs] = x.dims();
    let form = weights.first().and_then(form);
    form.is_some()
        && weights.iter().all(|weight| self::form(weight) == form)
        && (1..=FEW_ROWS).contains(&count)
        && inputs > 0
}

/// Multiplies few rows with weights of one form. Every launch fuses the same steps.
fn multiply_same_form(x: Tensor<2>, weights: Vec<Weight>, fused: &FusedOps) -> Vec<Tensor<2>> {
    let form = weights.first().and_then(form);
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
            Some(Form::Grouped(grouping, _)) => rows::grouped(x.clone(), grouped, grouping, fused),
            _ => rows::plain(x.clone(), dense, fused),
        });
    }
    products.into_iter().map(Tensor::from_primitive::<CubeBackend>).collect()
}

/// Returns whether [`multiply_fused`] supports these rows and weights: few rows, and weights of one form on the same device.
pub(super) fn can_fuse(x: &Tensor<2>, weights: &[Weight]) -> bool {
    is_cube(&x.device())
        && weights.iter().all(|weight| weight.device() == x.device())
        && same_form(x, weights)
        && supports_fusion(&primitive(x.clone()).client)
}

/// Multiplies few rows with fused steps, in one launch for every three weights: see
/// [`multiply_each_normed`](super::multiply_each_normed), [`multiply_gated`](super::multiply_gated) and
/// [`multiply_added`](super::multiply_added). Requires [`can_fuse`].
///
/// # Panics
/// If something is added to several products, or a gate has other than two.
pub(super) fn multiply_fused(
    x: Tensor<2>,
    weights: Vec<Weight>,
    norm: Option<RowNorm>,
    gated: Option<Activation>,
    added: Option<Tensor<2>>,
) -> Vec<Tensor<2>> {
    assert!(added.is_none() || weights.len() == 1, "something is added to one product");
    assert!(gated.is_none() || weights.len() == 2, "a gate has two products");
    let norm =
        norm.map(|RowNorm { weight, epsilon, offset }| (floats(primitive(weight)), epsilon as f32, offset));
    let added = added.map(|added| floats(primitive(added)));
    multiply_same_form(x, weights, &FusedOps { norm, gated, added })
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

/// Returns whether a weight holds bf16 numbers on a device without that type: kernels read two of them from a word.
fn is_packed(weight: &CubeTensor) -> bool {
    weight.dtype == DType::BF16 && !has_bf16(&weight.client)
}

fn has_bf16(client: &Client) -> bool {
    let kind = ElemType::Float(FloatKind::BF16);
    client.properties().features.supports_type(kind)
}

/// The element type that kernels read a weight as.
fn stored(weight: &CubeTensor) -> ElemType {
    if is_packed(weight) { ElemType::UInt(UIntKind::U32) } else { element(weight) }
}

/// Returns whether kernels multiply with bf16 weights on a device, as they are or as words of two.
pub(super) fn supports_bf16(device: &Device, inputs: usize) -> bool {
    is_cube(device) && inputs.is_multiple_of(2)
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

/// [`four_inputs`] of a weight whose elements hold two numbers each if it is `packed`.
#[cube]
fn four_weights<F: Numeric, V: Size>(
    matrix: &[Vector<F, V>],
    row: u32,
    at: u32,
    inputs: u32,
    #[comptime] whole: bool,
    #[comptime] packed: bool,
) -> Vector<f32, Const<4>> {
    let mut values = Vector::<f32, Const<4>>::new(0.0f32);
    if comptime!(whole) {
        values = unpack::<F, V, Const<4>>(matrix[((row + at) / 4) as usize], packed);
    } else {
        #[unroll]
        for index in 0..4usize {
            if at + (index as u32) < inputs {
                let place = row + at + index as u32;
                if comptime!(packed) {
                    let word = u32::cast_from(matrix[(place / 2) as usize].extract(0usize));
                    // bf16 is the upper half of an f32.
                    values.insert(index, f32::reinterpret((word >> (16 * (place % 2))) << 16));
                } else {
                    values.insert(index, f32::cast_from(matrix[place as usize].extract(0usize)));
                }
            }
        }
    }
    values
}

/// Converts `M` elements to `N` numbers, four at most; `packed` elements are words of two bf16 numbers.
#[cube]
fn unpack<F: Numeric, M: Size, N: Size>(stored: Vector<F, M>, #[comptime] packed: bool) -> Vector<f32, N> {
    let numbers = N::value();
    let mut values = Vector::<f32, N>::new(0.0f32);
    if comptime!(packed) {
        let word = u32::cast_from(stored.extract(0usize));
        values.insert(0usize, f32::reinterpret(word << 16));
        values.insert(1usize, f32::reinterpret(word & 0xFFFF_0000u32));
        if comptime!(numbers > 2) {
            let word = u32::cast_from(stored.extract(1usize));
            values.insert(2usize, f32::reinterpret(word << 16));
            values.insert(3usize, f32::reinterpret(word & 0xFFFF_0000u32));
        }
    } else {
        #[unroll]
        for index in 0..numbers {
            values.insert(index, f32::cast_from(stored.extract(index)));
        }
    }
    values
}

/// The numbers in every byte's four bits from `from` on. A nibble in the lowest bits of 2²³ as f32 is that much larger, so
/// no conversion is needed.
#[cube]
fn nibbles(word: u32, from: u32) -> Vector<f32, Const<4>> {
    let mut numbers = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for byte in 0..4usize {
        let nibble = (word >> (from + 8 * byte as u32)) & 15;
        numbers.insert(byte, f32::reinterpret(nibble | 0x4B00_0000u32) - 8_388_616.0f32);
    }
    numbers
}
