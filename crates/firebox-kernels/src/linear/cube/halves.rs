//! Products of many rows by tiles of f16, with sums in f32, for devices with matrix units.
//!
//! Rows of activations are divided by a power of two near their largest number, so that they fit f16 whatever their range.
//! Both operands are rounded to f16. Matrix units are those of SPIR-V, CUDA and Metal; WGSL has none. Without them the same
//! tiles are multiplied in f32, which only tests use.

use burn::tensor::{DType, Shape};
use burn_cubecl::cubecl::features::MmaConfig;
use burn_cubecl::cubecl::ir::{ElemType, FloatKind};
use burn_cubecl::cubecl::{self, client::Client, cmma, prelude::*};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::tiles::{TILE_FOURS, TILE_INPUTS, TILE_OUTPUTS, UNITS, load_weights, load_words, tile_words};
use super::{Operand, is_packed, nibbles, stored};
use crate::cube::{INFINITE, cubes, dims, element, magnitude, plane_size, room, signed_bytes};

/// Rows of a tile.
const TILE_ROWS: u32 = 64;
/// Fours of a row of a staged tile: two more than it has, so that neighbouring rows lie in different banks.
const STRIDE: u32 = TILE_FOURS + 2;
/// Rows, outputs and inputs that a plane multiplies at once.
const SIDE: u32 = 16;
/// Units of a plane. Each of a cube's planes has a quarter of the results.
const PLANE: u32 = 32;
const QUARTER: u32 = TILE_ROWS / 2;

const HALF: ElemType = ElemType::Float(FloatKind::F16);

/// The form of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct HalfForm {
    grouped: bool,
    /// Inputs of a group.
    group: u32,
    four_bits: bool,
    packed: bool,
}

/// Rows that are rounded to f16, and the number that each is multiplied with afterwards.
#[derive(Clone)]
pub(super) struct HalfRows {
    rows: CubeTensor,
    scales: CubeTensor,
}

/// Returns whether kernels can round rows of so many inputs to f16 on a device.
pub(super) fn supports_halves(client: &Client, inputs: usize) -> bool {
    client.properties().features.supports_type(HALF) && inputs.is_multiple_of(4)
}

/// Returns whether a device multiplies f16 with matrix units, in planes of a known size.
pub(super) fn has_matrix_units(client: &Client) -> bool {
    let config = MmaConfig {
        a_type: HALF,
        b_type: HALF,
        cd_type: ElemType::Float(FloatKind::F32),
        m: SIDE,
        n: SIDE,
        k: SIDE,
    };
    client.properties().features.matmul.cmma.contains(&config) && plane_size(client) == PLANE
}

impl HalfRows {
    /// Rounds rows in f32. Requires [`supports_halves`].
    pub fn new(x: CubeTensor) -> Self {
        let [count, inputs] = dims(&x);
        let (client, device) = (x.client.clone(), x.device.clone());
        let rows =
            empty_device_contiguous_dtype(client.clone(), device, Shape::new([count, inputs]), DType::F16);
        let scales = room(&x, [count]);
        round_rows::launch(
            &client,
            cubes(count),
            CubeDim::new_1d(UNITS),
            x.into_buffer_arg(),
            rows.clone().into_buffer_arg(),
            scales.clone().into_buffer_arg(),
            count as u32,
            (inputs / 4) as u32,
            HALF,
        );
        Self { rows, scales }
    }

    /// Returns the products with a weight. `matrix_units` requires [`has_matrix_units`].
    pub fn multiply(&self, weight: Operand, matrix_units: bool) -> CubeTensor {
        let [count, inputs] = dims(&self.rows);
        let x = self.rows.clone();
        let (weight, words, scales, row_words, groups, form) = match weight {
            Operand::Dense(weight) => {
                let packed = is_packed(&weight);
                let form = HalfForm { grouped: false, group: 1, four_bits: false, packed };
                (weight.clone(), weight, self.scales.clone(), 0, 0, form)
            }
            Operand::Grouped(words, scales, grouping) => {
                let ([_, row_words], [_, groups]) = (dims(&words), dims(&scales));
                let form = HalfForm {
                    grouped: true,
                    group: grouping.group as u32,
                    four_bits: grouping.four_bits,
                    packed: false,
                };
                (scales.clone(), words, scales, row_words, groups, form)
            }
        };
        let [outputs, _] = dims(if form.grouped { &words } else { &weight });
        let (client, out) = (x.client.clone(), room(&self.scales, [count, outputs]));
        let (stored, scale_element) = (stored(&weight), element(&scales));
        let vector = if form.packed { 2 } else { 4 };
        half_tiles::launch(
            &client,
            CubeCount::Static(
                outputs.div_ceil(TILE_OUTPUTS as usize) as u32,
                count.div_ceil(TILE_ROWS as usize) as u32,
                1,
            ),
            CubeDim::new_2d(PLANE, UNITS / PLANE),
            if form.grouped { 1 } else { vector },
            x.into_buffer_arg(),
            self.scales.clone().into_buffer_arg(),
            weight.into_buffer_arg(),
            words.into_buffer_arg(),
            scales.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            count as u32,
            inputs as u32,
            outputs as u32,
            row_words as u32,
            groups as u32,
            form,
            matrix_units,
            HALF,
            stored,
            scale_element,
        );
        out
    }
}

#[cube(launch)]
fn round_rows<E: Float>(
    x: &[Vector<f32, Const<4>>],
    out: &mut [Vector<E, Const<4>>],
    scales: &mut [f32],
    rows: u32,
    row_vectors: u32,
    #[define(E)] _half: ElemType,
) {
    // Cubes beyond the rows go through the last one again, so that all units meet at the maximum.
    let row = min(CUBE_POS as u32, rows - 1);
    let start = row * row_vectors;
    let mut high = 0u32;
    let mut at = UNIT_POS;
    while at < row_vectors {
        let values = x[(start + at) as usize];
        #[unroll]
        for index in 0..4usize {
            let size = magnitude(values.extract(index));
            if size < INFINITE && size > high {
                high = size;
            }
        }
        at += UNITS;
    }
    let mut scratch = Shared::<[u32]>::new_slice(UNITS as usize);
    scratch[UNIT_POS as usize] = high;
    sync_cube();
    let mut half = comptime!(UNITS / 2).runtime();
    while half > 0 {
        if UNIT_POS < half {
            let other = scratch[(UNIT_POS + half) as usize];
            if other > scratch[UNIT_POS as usize] {
                scratch[UNIT_POS as usize] = other;
            }
        }
        sync_cube();
        half /= 2;
    }
    // The exponent, within 2¹⁰⁰ and 2⁻¹⁰⁰: it and its reciprocal are powers of two that no device takes for zero.
    let exponent = min(max(scratch[0usize] >> 23, 27u32), 227u32);
    let scale = f32::reinterpret(exponent << 23);
    let reciprocal = f32::reinterpret((254u32 - exponent) << 23);
    let mut at = UNIT_POS;
    while at < row_vectors {
        let scaled = x[(start + at) as usize] * Vector::new(reciprocal);
        out[(start + at) as usize] = Vector::<E, Const<4>>::cast_from(scaled);
        at += UNITS;
    }
    if UNIT_POS == 0 {
        scales[row as usize] = scale;
    }
}

#[cube(launch)]
fn half_tiles<E: Float, F: Numeric, M: Size, S: Float>(
    x: &[Vector<E, Const<4>>],
    row_scales: &[f32],
    weight: &[Vector<F, M>],
    words: &[u32],
    scales: &[S],
    out: &mut [f32],
    rows: u32,
    inputs: u32,
    outputs: u32,
    row_words: u32,
    groups: u32,
    #[comptime] form: HalfForm,
    #[comptime] matrix_units: bool,
    #[define(E)] _half: ElemType,
    #[define(F)] _element: ElemType,
    #[define(S)] _scale: ElemType,
) {
    let mut x_tile =
        Shared::<[Vector<E, Const<4>>]>::new_aligned_slice(comptime!((TILE_ROWS * STRIDE) as usize), 32usize);
    let mut weight_tile = Shared::<[Vector<E, Const<4>>]>::new_aligned_slice(
        comptime!((TILE_OUTPUTS * STRIDE) as usize),
        32usize,
    );
    let mut results =
        Shared::<[f32]>::new_aligned_slice(comptime!((TILE_ROWS * TILE_OUTPUTS) as usize), 32usize);
    let (row, output) = (CUBE_POS_Y * TILE_ROWS, CUBE_POS_X * TILE_OUTPUTS);
    // The first row and output of the plane's quarter of a tile.
    let (own_row, own_output) = (UNIT_POS_Y / 2 * QUARTER, UNIT_POS_Y % 2 * QUARTER);
    let turns = comptime!((TILE_OUTPUTS * TILE_FOURS / UNITS) as usize);
    let unit_words = comptime!((TILE_OUTPUTS * tile_words(form.four_bits) / UNITS) as usize);
    let mut x_next = Array::<Vector<E, Const<4>>>::new(comptime!((TILE_ROWS * TILE_FOURS / UNITS) as usize));
    let mut fours = Array::<Vector<f32, Const<4>>>::new(turns);
    let mut bits = Array::<u32>::new(unit_words);
    let mut factors = Array::<f32>::new(unit_words);

    load_halves::<E>(x, &mut x_next, row, rows, 0u32, inputs);
    load_outputs::<F, M, S>(
        weight,
        words,
        scales,
        &mut fours,
        &mut bits,
        &mut factors,
        output,
        outputs,
        0u32,
        inputs,
        row_words,
        groups,
        form,
    );
    let own = own_row * TILE_OUTPUTS + own_output;
    let mut start = 0u32;
    if comptime!(matrix_units) {
        let sums_00 = no_sums();
        let sums_01 = no_sums();
        let sums_10 = no_sums();
        let sums_11 = no_sums();
        while start < inputs {
            stage_halves::<E>(&x_next, &mut x_tile);
            stage_outputs::<E>(&fours, &bits, &factors, &mut weight_tile, form);
            sync_cube();
            start += TILE_INPUTS;
            load_halves::<E>(x, &mut x_next, row, rows, start, inputs);
            load_outputs::<F, M, S>(
                weight,
                words,
                scales,
                &mut fours,
                &mut bits,
                &mut factors,
                output,
                outputs,
                start,
                inputs,
                row_words,
                groups,
                form,
            );
            #[unroll]
            for step in 0..comptime!(TILE_INPUTS / SIDE) {
                let rows_0 = side_of_rows::<E>(&x_tile, own_row, step);
                let rows_1 = side_of_rows::<E>(&x_tile, own_row + SIDE, step);
                let outputs_0 = side_of_outputs::<E>(&weight_tile, own_output, step);
                let outputs_1 = side_of_outputs::<E>(&weight_tile, own_output + SIDE, step);
                cmma::execute(&rows_0, &outputs_0, &sums_00, &sums_00);
                cmma::execute(&rows_0, &outputs_1, &sums_01, &sums_01);
                cmma::execute(&rows_1, &outputs_0, &sums_10, &sums_10);
                cmma::execute(&rows_1, &outputs_1, &sums_11, &sums_11);
            }
            sync_cube();
        }
        write_side(&mut results, &sums_00, own);
        write_side(&mut results, &sums_01, own + SIDE);
        write_side(&mut results, &sums_10, own + SIDE * TILE_OUTPUTS);
        write_side(&mut results, &sums_11, own + SIDE * TILE_OUTPUTS + SIDE);
    } else {
        // A unit has an output of its plane's quarter, for all of its rows.
        let mut sums = Array::<f32>::new(QUARTER as usize);
        #[unroll]
        for index in 0..comptime!(QUARTER as usize) {
            sums[index] = 0.0f32;
        }
        while start < inputs {
            stage_halves::<E>(&x_next, &mut x_tile);
            stage_outputs::<E>(&fours, &bits, &factors, &mut weight_tile, form);
            sync_cube();
            start += TILE_INPUTS;
            load_halves::<E>(x, &mut x_next, row, rows, start, inputs);
            load_outputs::<F, M, S>(
                weight,
                words,
                scales,
                &mut fours,
                &mut bits,
                &mut factors,
                output,
                outputs,
                start,
                inputs,
                row_words,
                groups,
                form,
            );
            for four in 0..TILE_FOURS {
                let of_output = weight_tile[((own_output + UNIT_POS_X) * STRIDE + four) as usize];
                #[unroll]
                for index in 0..comptime!(QUARTER as usize) {
                    let of_row = x_tile[((own_row + index as u32) * STRIDE + four) as usize];
                    let mut sum = sums[index];
                    #[unroll]
                    for input in 0..4usize {
                        let number = f32::cast_from(of_row.extract(input));
                        sum = fma(number, f32::cast_from(of_output.extract(input)), sum);
                    }
                    sums[index] = sum;
                }
            }
            sync_cube();
        }
        #[unroll]
        for index in 0..comptime!(QUARTER as usize) {
            results[(own + index as u32 * TILE_OUTPUTS + UNIT_POS_X) as usize] = sums[index];
        }
    }
    sync_cube();
    for turn in 0..comptime!(TILE_ROWS * TILE_OUTPUTS / UNITS) {
        let index = UNIT_POS + turn * UNITS;
        let (to, column) = (row + index / TILE_OUTPUTS, output + index % TILE_OUTPUTS);
        if to < rows && column < outputs {
            out[(to * outputs + column) as usize] = results[index as usize] * row_scales[to as usize];
        }
    }
}

/// Loads a unit's share of some rows' inputs from `start` on, with zeros where there are none.
#[cube]
fn load_halves<E: Float>(
    x: &[Vector<E, Const<4>>],
    next: &mut Array<Vector<E, Const<4>>>,
    first: u32,
    rows: u32,
    start: u32,
    inputs: u32,
) {
    #[unroll]
    for turn in 0..comptime!(TILE_ROWS * TILE_FOURS / UNITS) {
        let index = UNIT_POS + turn * UNITS;
        let row = first + index / TILE_FOURS;
        let at = start + index % TILE_FOURS * 4;
        let mut values = Vector::<E, Const<4>>::new(E::from_int(0));
        if row < rows && at < inputs {
            values = x[((row * inputs + at) / 4) as usize];
        }
        next[turn as usize] = values;
    }
}

/// Loads a unit's share of some outputs' inputs from `start` on.
#[cube]
fn load_outputs<F: Numeric, M: Size, S: Float>(
    weight: &[Vector<F, M>],
    words: &[u32],
    scales: &[S],
    fours: &mut Array<Vector<f32, Const<4>>>,
    bits: &mut Array<u32>,
    factors: &mut Array<f32>,
    first: u32,
    outputs: u32,
    start: u32,
    inputs: u32,
    row_words: u32,
    groups: u32,
    #[comptime] form: HalfForm,
) {
    if comptime!(form.grouped) {
        load_words::<S>(
            words,
            scales,
            bits,
            factors,
            first,
            outputs,
            start,
            row_words,
            groups,
            form.group,
            form.four_bits,
        );
    } else {
        load_weights::<F, M>(weight, fours, first, outputs, start, inputs, true, form.packed);
    }
}

/// Puts what units have loaded of rows into their tile.
#[cube]
fn stage_halves<E: Float>(next: &Array<Vector<E, Const<4>>>, tile: &mut Shared<[Vector<E, Const<4>>]>) {
    #[unroll]
    for turn in 0..comptime!(TILE_ROWS * TILE_FOURS / UNITS) {
        let index = UNIT_POS + turn * UNITS;
        tile[(index / TILE_FOURS * STRIDE + index % TILE_FOURS) as usize] = next[turn as usize];
    }
}

/// Puts what units have loaded of outputs into their tile.
#[cube]
fn stage_outputs<E: Float>(
    fours: &Array<Vector<f32, Const<4>>>,
    bits: &Array<u32>,
    factors: &Array<f32>,
    tile: &mut Shared<[Vector<E, Const<4>>]>,
    #[comptime] form: HalfForm,
) {
    if comptime!(form.grouped) {
        let of_tile = comptime!(tile_words(form.four_bits));
        #[unroll]
        for turn in 0..comptime!(TILE_OUTPUTS * of_tile / UNITS) {
            let index = UNIT_POS + turn * UNITS;
            let to = index / of_tile * STRIDE + index % of_tile;
            let word = bits[turn as usize];
            let factor = Vector::<f32, Const<4>>::new(factors[turn as usize]);
            if comptime!(form.four_bits) {
                let upper = to + comptime!(TILE_FOURS / 2);
                tile[to as usize] = Vector::<E, Const<4>>::cast_from(nibbles(word, 0u32) * factor);
                tile[upper as usize] = Vector::<E, Const<4>>::cast_from(nibbles(word, 4u32) * factor);
            } else {
                tile[to as usize] = Vector::<E, Const<4>>::cast_from(signed_bytes(word) * factor);
            }
        }
    } else {
        #[unroll]
        for turn in 0..comptime!(TILE_OUTPUTS * TILE_FOURS / UNITS) {
            let index = UNIT_POS + turn * UNITS;
            let to = index / TILE_FOURS * STRIDE + index % TILE_FOURS;
            tile[to as usize] = Vector::<E, Const<4>>::cast_from(fours[turn as usize]);
        }
    }
}

/// Sums of a matrix unit, all of them zero.
#[cube]
fn no_sums() -> cmma::Matrix<f32> {
    cmma::Matrix::<f32>::from_value(
        cmma::MatrixIdent::Accumulator,
        16usize,
        16usize,
        16usize,
        cmma::MatrixLayout::Undefined,
        0.0f32,
    )
}

/// Some rows of a tile, and the inputs of a step.
#[cube]
fn side_of_rows<E: Float>(
    tile: &Shared<[Vector<E, Const<4>>]>,
    row: u32,
    #[comptime] step: u32,
) -> cmma::Matrix<Vector<E, Const<4>>> {
    let from = (row * STRIDE + comptime!(step * SIDE / 4)) as usize;
    cmma::Matrix::<Vector<E, Const<4>>>::from_slice(
        cmma::MatrixIdent::A,
        16usize,
        16usize,
        16usize,
        cmma::MatrixLayout::RowMajor,
        tile.slice(from, comptime!((TILE_ROWS * STRIDE) as usize)),
        comptime!(4 * STRIDE),
    )
}

/// Some outputs of a tile, and the inputs of a step.
#[cube]
fn side_of_outputs<E: Float>(
    tile: &Shared<[Vector<E, Const<4>>]>,
    output: u32,
    #[comptime] step: u32,
) -> cmma::Matrix<Vector<E, Const<4>>> {
    let from = (output * STRIDE + comptime!(step * SIDE / 4)) as usize;
    cmma::Matrix::<Vector<E, Const<4>>>::from_slice(
        cmma::MatrixIdent::B,
        16usize,
        16usize,
        16usize,
        cmma::MatrixLayout::ColMajor,
        tile.slice(from, comptime!((TILE_OUTPUTS * STRIDE) as usize)),
        comptime!(4 * STRIDE),
    )
}

/// Writes sums to a tile of results.
#[cube]
fn write_side(results: &mut Shared<[f32]>, sums: &cmma::Matrix<f32>, at: u32) {
    cmma::store(
        results.slice_mut(at as usize, comptime!((TILE_ROWS * TILE_OUTPUTS) as usize)),
        sums,
        TILE_OUTPUTS,
        cmma::MatrixLayout::RowMajor,
    );
}
