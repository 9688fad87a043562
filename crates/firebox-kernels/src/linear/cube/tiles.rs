//! Products of many rows, by tiles of both sides.

use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};
use burn_cubecl::tensor::CubeTensor;

use super::{four_weights, is_packed, nibbles, stored};
use crate::cube::{dims, element, room, signed_bytes};
use crate::linear::Grouping;

/// Rows of `x`, outputs and inputs of a tile.
const TILE_ROWS: u32 = 32;
const TILE_OUTPUTS: u32 = 64;
const TILE_INPUTS: u32 = 32;
/// A tile's inputs in fours, which is how they are staged.
const TILE_FOURS: u32 = TILE_INPUTS / 4;
/// A row of a staged tile: one more than its fours, so that the same inputs of neighbouring rows lie in different
/// banks.
const TILE_STRIDE: u32 = TILE_FOURS + 1;
/// Units of a cube across outputs and across rows; each computes four by four results.
const TILE_UNITS: (u32, u32) = (TILE_OUTPUTS / 4, TILE_ROWS / 4);
const TILE_THREADS: u32 = TILE_UNITS.0 * TILE_UNITS.1;

/// The products with a weight of floats.
pub(super) fn plain(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let ([rows, inputs], [outputs, _]) = (dims(&x), dims(&weight));
    let (client, out) = (x.client.clone(), room(&x, [rows, outputs]));
    let (packed, weight_element) = (is_packed(&weight), stored(&weight));
    let vector = if inputs.is_multiple_of(4) { 4 } else { 1 };
    plain_tiles::launch(
        &client,
        tile_cubes(rows, outputs),
        CubeDim::new_2d(TILE_UNITS.0, TILE_UNITS.1),
        vector,
        if packed && vector > 1 { vector / 2 } else { vector },
        x.into_buffer_arg(),
        weight.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        rows as u32,
        inputs as u32,
        outputs as u32,
        inputs.is_multiple_of(4),
        packed,
        weight_element,
    );
    out
}

/// The same with a weight of small integers, its words and scales.
pub(super) fn grouped(
    x: CubeTensor,
    words: CubeTensor,
    scales: CubeTensor,
    grouping: Grouping,
) -> CubeTensor {
    let Grouping { inputs, group, four_bits, .. } = grouping;
    let ([rows, _], [outputs, row_words], [_, groups]) = (dims(&x), dims(&words), dims(&scales));
    let (client, out) = (x.client.clone(), room(&x, [rows, outputs]));
    let scale_element = element(&scales);
    grouped_tiles::launch(
        &client,
        tile_cubes(rows, outputs),
        CubeDim::new_2d(TILE_UNITS.0, TILE_UNITS.1),
        if inputs.is_multiple_of(4) { 4 } else { 1 },
        x.into_buffer_arg(),
        words.into_buffer_arg(),
        scales.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        rows as u32,
        inputs as u32,
        outputs as u32,
        row_words as u32,
        groups as u32,
        group as u32,
        four_bits,
        inputs.is_multiple_of(4),
        scale_element,
    );
    out
}

fn tile_cubes(rows: usize, outputs: usize) -> CubeCount {
    CubeCount::Static(
        outputs.div_ceil(TILE_OUTPUTS as usize) as u32,
        rows.div_ceil(TILE_ROWS as usize) as u32,
        1,
    )
}

#[cube(launch)]
fn plain_tiles<F: Numeric, V: Size, M: Size>(
    x: &[Vector<f32, V>],
    weight: &[Vector<F, M>],
    out: &mut [f32],
    rows: u32,
    inputs: u32,
    outputs: u32,
    #[comptime] whole: bool,
    #[comptime] packed: bool,
    #[define(F)] _element: ElemType,
) {
    let mut x_tile = tile(TILE_ROWS);
    let mut weight_tile = tile(TILE_OUTPUTS);
    let (row, output) = (CUBE_POS_Y * TILE_ROWS, CUBE_POS_X * TILE_OUTPUTS);
    let mut sums = no_sums();
    let mut start = 0u32;
    while start < inputs {
        stage::<f32, V>(x, &mut x_tile, row, rows, start, inputs, TILE_ROWS, whole, false);
        stage::<F, M>(weight, &mut weight_tile, output, outputs, start, inputs, TILE_OUTPUTS, whole, packed);
        sync_cube();
        add_products(&x_tile, &weight_tile, &mut sums);
        sync_cube();
        start += TILE_INPUTS;
    }
    write_sums(&sums, out, rows, outputs);
}

#[cube(launch)]
fn grouped_tiles<S: Float, V: Size>(
    x: &[Vector<f32, V>],
    words: &[u32],
    scales: &[S],
    out: &mut [f32],
    rows: u32,
    inputs: u32,
    outputs: u32,
    row_words: u32,
    groups: u32,
    #[comptime] group: u32,
    #[comptime] four_bits: bool,
    #[comptime] whole: bool,
    #[define(S)] _scale: ElemType,
) {
    let mut x_tile = tile(TILE_ROWS);
    let mut weight_tile = tile(TILE_OUTPUTS);
    let mut sums = no_sums();
    let per_word = comptime!(if four_bits { 8u32 } else { 4u32 });
    let tile_words = comptime!(TILE_INPUTS / per_word);
    let mut start = 0u32;
    while start < inputs {
        stage::<f32, V>(x, &mut x_tile, CUBE_POS_Y * TILE_ROWS, rows, start, inputs, TILE_ROWS, whole, false);
        for turn in 0..comptime!(TILE_OUTPUTS * tile_words / TILE_THREADS) {
            let index = UNIT_POS + turn * TILE_THREADS;
            let (row, word) = (index / tile_words, index % tile_words);
            let output = CUBE_POS_X * TILE_OUTPUTS + row;
            let at = start / per_word + word;
            let mut bits = 0u32;
            let mut scale = 0.0f32;
            if output < outputs && at < row_words {
                bits = words[(output * row_words + at) as usize];
                // A group is a whole number of tiles' inputs, so this is the scale of all of them.
                scale = f32::cast_from(scales[(output * groups + start / group) as usize]);
            }
            let to = row * TILE_STRIDE + word;
            let scale = Vector::<f32, Const<4>>::new(scale);
            if comptime!(four_bits) {
                weight_tile[to as usize] = nibbles(bits, 0u32) * scale;
                weight_tile[(to + TILE_FOURS / 2) as usize] = nibbles(bits, 4u32) * scale;
            } else {
                weight_tile[to as usize] = signed_bytes(bits) * scale;
            }
        }
        sync_cube();
        add_products(&x_tile, &weight_tile, &mut sums);
        sync_cube();
        start += TILE_INPUTS;
    }
    write_sums(&sums, out, rows, outputs);
}

/// Room for so many rows of a tile.
#[cube]
fn tile(#[comptime] rows: u32) -> Shared<[Vector<f32, Const<4>>]> {
    Shared::<[Vector<f32, Const<4>>]>::new_slice(comptime!((rows * TILE_STRIDE) as usize))
}

/// Puts some rows' inputs from `start` on into a tile, with zeros where the matrix has none.
#[cube]
fn stage<F: Numeric, V: Size>(
    matrix: &[Vector<F, V>],
    tile: &mut Shared<[Vector<f32, Const<4>>]>,
    first: u32,
    rows: u32,
    start: u32,
    inputs: u32,
    #[comptime] tile_rows: u32,
    #[comptime] whole: bool,
    #[comptime] packed: bool,
) {
    for turn in 0..comptime!(tile_rows * TILE_FOURS / TILE_THREADS) {
        let index = UNIT_POS + turn * TILE_THREADS;
        let (row, four) = (index / TILE_FOURS, index % TILE_FOURS);
        let at = start + four * 4;
        let mut values = Vector::<f32, Const<4>>::new(0.0f32);
        if first + row < rows && at < inputs {
            values = four_weights::<F, V>(matrix, (first + row) * inputs, at, inputs, whole, packed);
        }
        tile[(row * TILE_STRIDE + four) as usize] = values;
    }
}

/// Four by four sums, those of an output after each other.
#[cube]
fn no_sums() -> Array<f32> {
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for index in 0..16usize {
        sums[index] = 0.0f32;
    }
    sums
}

/// Adds the products of two tiles, which are summed by themselves first: errors grow with the number of tiles
/// and not of inputs. A unit's rows and outputs lie apart by the number of units, so that neighbours read
/// neighbouring rows of the weight.
#[cube]
fn add_products(
    x_tile: &Shared<[Vector<f32, Const<4>>]>,
    weight_tile: &Shared<[Vector<f32, Const<4>>]>,
    sums: &mut Array<f32>,
) {
    let mut of_tile = no_sums();
    for four in 0..TILE_FOURS {
        let mut values = Array::<Vector<f32, Const<4>>>::new(4usize);
        #[unroll]
        for row in 0..4usize {
            let at = (UNIT_POS_Y + TILE_UNITS.1 * row as u32) * TILE_STRIDE + four;
            values[row] = x_tile[at as usize];
        }
        #[unroll]
        for output in 0..4usize {
            let at = (UNIT_POS_X + TILE_UNITS.0 * output as u32) * TILE_STRIDE + four;
            let weights = weight_tile[at as usize];
            #[unroll]
            for row in 0..4usize {
                of_tile[output * 4 + row] += values[row].dot(weights);
            }
        }
    }
    #[unroll]
    for index in 0..16usize {
        sums[index] += of_tile[index];
    }
}

#[cube]
fn write_sums(sums: &Array<f32>, out: &mut [f32], rows: u32, outputs: u32) {
    #[unroll]
    for output in 0..4usize {
        let column = CUBE_POS_X * TILE_OUTPUTS + UNIT_POS_X + TILE_UNITS.0 * output as u32;
        #[unroll]
        for row in 0..4usize {
            let at = CUBE_POS_Y * TILE_ROWS + UNIT_POS_Y + TILE_UNITS.1 * row as u32;
            if at < rows && column < outputs {
                out[(at * outputs + column) as usize] = sums[output * 4 + row];
            }
        }
    }
}
