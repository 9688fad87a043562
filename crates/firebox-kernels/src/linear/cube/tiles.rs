//! Products of many rows, by tiles of both sides in f32.
//!
//! A cube stages tiles of its rows and outputs in shared memory and loads the next ones while it multiplies. Half of its units
//! multiply the first inputs of a tile and half the others, so that small products have units enough; their sums meet at the end.

use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};
use burn_cubecl::tensor::CubeTensor;

use super::{four_inputs, four_weights, is_packed, nibbles, stored};
use crate::cube::{dims, element, room, signed_bytes};
use crate::linear::Grouping;

/// Outputs and inputs of a tile.
pub(super) const TILE_OUTPUTS: u32 = 64;
pub(super) const TILE_INPUTS: u32 = 32;
/// Rows of a tile: the fewest for which tiles are used, and the most.
const TILE_ROWS: (u32, u32) = (32, 64);
/// A tile's inputs in fours, which is how they are staged.
pub(super) const TILE_FOURS: u32 = TILE_INPUTS / 4;
/// A row of a staged tile: one more than its fours, so that the same inputs of neighbouring rows lie in different
/// banks.
const TILE_STRIDE: u32 = TILE_FOURS + 1;
/// Units of a cube across outputs, rows and inputs.
const ACROSS: u32 = 8;
const DOWN: u32 = 8;
const DEEP: u32 = 2;
pub(super) const UNITS: u32 = ACROSS * DOWN * DEEP;
/// Outputs of a unit.
const UNIT_OUTPUTS: u32 = TILE_OUTPUTS / ACROSS;

type Four = Vector<f32, Const<4>>;

/// The products with a weight of floats.
pub(super) fn plain(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let ([rows, inputs], [outputs, _]) = (dims(&x), dims(&weight));
    let (client, out) = (x.client.clone(), room(&x, [rows, outputs]));
    let (packed, weight_element) = (is_packed(&weight), stored(&weight));
    let vector = if inputs.is_multiple_of(4) { 4 } else { 1 };
    let tile_rows = tile_rows(rows);
    plain_tiles::launch(
        &client,
        tile_cubes(rows, outputs, tile_rows),
        CubeDim::new_3d(ACROSS, DOWN, DEEP),
        vector,
        if packed && vector > 1 { vector / 2 } else { vector },
        x.into_buffer_arg(),
        weight.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        rows as u32,
        inputs as u32,
        outputs as u32,
        tile_rows,
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
    let tile_rows = tile_rows(rows);
    grouped_tiles::launch(
        &client,
        tile_cubes(rows, outputs, tile_rows),
        CubeDim::new_3d(ACROSS, DOWN, DEEP),
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
        tile_rows,
        four_bits,
        inputs.is_multiple_of(4),
        scale_element,
    );
    out
}

/// Rows of a tile, so that little of the last one is empty. The bits of a result do not depend on it.
fn tile_rows(rows: usize) -> u32 {
    let (few, many) = TILE_ROWS;
    if (rows - 1) % many as usize >= few as usize || rows > 2 * many as usize { many } else { few }
}

fn tile_cubes(rows: usize, outputs: usize, tile_rows: u32) -> CubeCount {
    CubeCount::Static(
        outputs.div_ceil(TILE_OUTPUTS as usize) as u32,
        rows.div_ceil(tile_rows as usize) as u32,
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
    #[comptime] tile_rows: u32,
    #[comptime] whole: bool,
    #[comptime] packed: bool,
    #[define(F)] _element: ElemType,
) {
    let mut tiles = room_of_tiles(tile_rows);
    let mut sums = no_sums(tile_rows);
    let row = CUBE_POS_Y * tile_rows;
    let output = CUBE_POS_X * TILE_OUTPUTS;
    let mut x_next = Array::<Four>::new(comptime!((tile_rows * TILE_FOURS / UNITS) as usize));
    let mut weight_next = Array::<Four>::new(comptime!((TILE_OUTPUTS * TILE_FOURS / UNITS) as usize));
    load_rows::<V>(x, &mut x_next, row, rows, 0u32, inputs, tile_rows, whole);
    load_weights::<F, M>(weight, &mut weight_next, output, outputs, 0u32, inputs, whole, packed);
    let mut start = 0u32;
    while start < inputs {
        stage(&x_next, &mut tiles, 0u32, tile_rows);
        stage(&weight_next, &mut tiles, comptime!(tile_rows * TILE_STRIDE).runtime(), TILE_OUTPUTS);
        sync_cube();
        start += TILE_INPUTS;
        load_rows::<V>(x, &mut x_next, row, rows, start, inputs, tile_rows, whole);
        load_weights::<F, M>(weight, &mut weight_next, output, outputs, start, inputs, whole, packed);
        add_products(&tiles, &mut sums, tile_rows);
        sync_cube();
    }
    write_sums(&mut sums, &mut tiles, out, rows, outputs, tile_rows);
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
    #[comptime] tile_rows: u32,
    #[comptime] four_bits: bool,
    #[comptime] whole: bool,
    #[define(S)] _scale: ElemType,
) {
    let mut tiles = room_of_tiles(tile_rows);
    let mut sums = no_sums(tile_rows);
    let row = CUBE_POS_Y * tile_rows;
    let output = CUBE_POS_X * TILE_OUTPUTS;
    let unit_words = comptime!((TILE_OUTPUTS * tile_words(four_bits) / UNITS) as usize);
    let mut x_next = Array::<Four>::new(comptime!((tile_rows * TILE_FOURS / UNITS) as usize));
    let mut bits_next = Array::<u32>::new(unit_words);
    let mut scales_next = Array::<f32>::new(unit_words);
    load_rows::<V>(x, &mut x_next, row, rows, 0u32, inputs, tile_rows, whole);
    load_words::<S>(
        words,
        scales,
        &mut bits_next,
        &mut scales_next,
        output,
        outputs,
        0u32,
        row_words,
        groups,
        group,
        four_bits,
    );
    let mut start = 0u32;
    while start < inputs {
        stage(&x_next, &mut tiles, 0u32, tile_rows);
        stage_words(&bits_next, &scales_next, &mut tiles, tile_rows, four_bits);
        sync_cube();
        start += TILE_INPUTS;
        load_rows::<V>(x, &mut x_next, row, rows, start, inputs, tile_rows, whole);
        load_words::<S>(
            words,
            scales,
            &mut bits_next,
            &mut scales_next,
            output,
            outputs,
            start,
            row_words,
            groups,
            group,
            four_bits,
        );
        add_products(&tiles, &mut sums, tile_rows);
        sync_cube();
    }
    write_sums(&mut sums, &mut tiles, out, rows, outputs, tile_rows);
}

/// Words of an output's part of a tile.
pub(super) const fn tile_words(four_bits: bool) -> u32 {
    if four_bits { TILE_INPUTS / 8 } else { TILE_INPUTS / 4 }
}

/// Room for a tile of rows and one of outputs behind it.
#[cube]
fn room_of_tiles(#[comptime] tile_rows: u32) -> Shared<[Four]> {
    Shared::<[Four]>::new_slice(comptime!(((tile_rows + TILE_OUTPUTS) * TILE_STRIDE) as usize))
}

/// Loads a unit's share of some rows' inputs from `start` on, with zeros where there are none.
#[cube]
fn load_rows<V: Size>(
    x: &[Vector<f32, V>],
    next: &mut Array<Four>,
    first: u32,
    rows: u32,
    start: u32,
    inputs: u32,
    #[comptime] tile_rows: u32,
    #[comptime] whole: bool,
) {
    #[unroll]
    for turn in 0..comptime!(tile_rows * TILE_FOURS / UNITS) {
        let index = UNIT_POS + turn * UNITS;
        let row = first + index / TILE_FOURS;
        let at = start + index % TILE_FOURS * 4;
        let mut values = Vector::<f32, Const<4>>::new(0.0f32);
        if row < rows && at < inputs {
            values = four_inputs::<f32, V>(x, row * inputs, at, inputs, whole);
        }
        next[turn as usize] = values;
    }
}

/// [`load_rows`] of a weight.
#[cube]
pub(super) fn load_weights<F: Numeric, M: Size>(
    weight: &[Vector<F, M>],
    next: &mut Array<Four>,
    first: u32,
    outputs: u32,
    start: u32,
    inputs: u32,
    #[comptime] whole: bool,
    #[comptime] packed: bool,
) {
    #[unroll]
    for turn in 0..comptime!(TILE_OUTPUTS * TILE_FOURS / UNITS) {
        let index = UNIT_POS + turn * UNITS;
        let output = first + index / TILE_FOURS;
        let at = start + index % TILE_FOURS * 4;
        let mut values = Vector::<f32, Const<4>>::new(0.0f32);
        if output < outputs && at < inputs {
            values = four_weights::<F, M>(weight, output * inputs, at, inputs, whole, packed);
        }
        next[turn as usize] = values;
    }
}

/// Loads a unit's share of some outputs' words and their scales, of the inputs from `start` on. A group is a whole number of
/// tiles' inputs, so a word has one scale.
#[cube]
pub(super) fn load_words<S: Float>(
    words: &[u32],
    scales: &[S],
    bits: &mut Array<u32>,
    factors: &mut Array<f32>,
    first: u32,
    outputs: u32,
    start: u32,
    row_words: u32,
    groups: u32,
    #[comptime] group: u32,
    #[comptime] four_bits: bool,
) {
    let of_tile = comptime!(tile_words(four_bits));
    #[unroll]
    for turn in 0..comptime!(TILE_OUTPUTS * of_tile / UNITS) {
        let index = UNIT_POS + turn * UNITS;
        let output = first + index / of_tile;
        let at = start / comptime!(TILE_INPUTS / of_tile) + index % of_tile;
        let mut word = 0u32;
        let mut factor = 0.0f32;
        if output < outputs && at < row_words {
            word = words[(output * row_words + at) as usize];
            factor = f32::cast_from(scales[(output * groups + start / group) as usize]);
        }
        bits[turn as usize] = word;
        factors[turn as usize] = factor;
    }
}

/// Puts what units have loaded into a tile that begins at `to`.
#[cube]
fn stage(next: &Array<Four>, tiles: &mut Shared<[Four]>, to: u32, #[comptime] rows: u32) {
    #[unroll]
    for turn in 0..comptime!(rows * TILE_FOURS / UNITS) {
        let index = UNIT_POS + turn * UNITS;
        let place = to + index / TILE_FOURS * TILE_STRIDE + index % TILE_FOURS;
        tiles[place as usize] = next[turn as usize];
    }
}

/// Unpacks words into the tile of outputs.
#[cube]
fn stage_words(
    bits: &Array<u32>,
    factors: &Array<f32>,
    tiles: &mut Shared<[Four]>,
    #[comptime] tile_rows: u32,
    #[comptime] four_bits: bool,
) {
    let of_tile = comptime!(tile_words(four_bits));
    #[unroll]
    for turn in 0..comptime!(TILE_OUTPUTS * of_tile / UNITS) {
        let index = UNIT_POS + turn * UNITS;
        let to = (tile_rows + index / of_tile) * TILE_STRIDE + index % of_tile;
        let word = bits[turn as usize];
        let factor = Vector::<f32, Const<4>>::new(factors[turn as usize]);
        if comptime!(four_bits) {
            tiles[to as usize] = nibbles(word, 0u32) * factor;
            tiles[(to + TILE_FOURS / 2) as usize] = nibbles(word, 4u32) * factor;
        } else {
            tiles[to as usize] = signed_bytes(word) * factor;
        }
    }
}

/// The sums of a unit: for each of its outputs vectors of four rows.
#[cube]
fn no_sums(#[comptime] tile_rows: u32) -> Array<Four> {
    let count = comptime!((UNIT_OUTPUTS * tile_rows / DOWN / 4) as usize);
    let mut sums = Array::<Four>::new(count);
    #[unroll]
    for index in 0..count {
        sums[index] = Vector::new(0.0f32);
    }
    sums
}

/// Adds the products of two tiles for a unit's half of the inputs. Its rows and outputs lie apart by the number of units, so
/// that neighbours read neighbouring rows of a tile.
#[cube]
fn add_products(tiles: &Shared<[Four]>, sums: &mut Array<Four>, #[comptime] tile_rows: u32) {
    let vectors = comptime!((tile_rows / DOWN / 4) as usize);
    for four in 0..comptime!(TILE_FOURS / DEEP) {
        let at = UNIT_POS_Z * comptime!(TILE_FOURS / DEEP) + four;
        let mut rows = Array::<Four>::new(comptime!(4 * vectors));
        #[unroll]
        for row in 0..comptime!(4 * vectors) {
            let place = (UNIT_POS_Y + DOWN * row as u32) * TILE_STRIDE + at;
            rows[row] = tiles[place as usize];
        }
        // The same numbers, those of an input together.
        let mut inputs = Array::<Four>::new(comptime!(4 * vectors));
        #[unroll]
        for input in 0..4usize {
            #[unroll]
            for vector in 0..vectors {
                let mut of_input = Vector::<f32, Const<4>>::new(0.0f32);
                #[unroll]
                for row in 0..4usize {
                    of_input.insert(row, rows[vector * 4 + row].extract(input));
                }
                inputs[input * vectors + vector] = of_input;
            }
        }
        #[unroll]
        for output in 0..comptime!(UNIT_OUTPUTS as usize) {
            let place = (tile_rows + UNIT_POS_X + ACROSS * output as u32) * TILE_STRIDE + at;
            let weights = tiles[place as usize];
            #[unroll]
            for input in 0..4usize {
                let weight = Vector::<f32, Const<4>>::new(weights.extract(input));
                #[unroll]
                for vector in 0..vectors {
                    let sum = sums[output * vectors + vector];
                    sums[output * vectors + vector] = fma(inputs[input * vectors + vector], weight, sum);
                }
            }
        }
    }
}

/// Adds the sums of both halves of the inputs, through the room of the tiles, and writes them.
#[cube]
fn write_sums(
    sums: &mut Array<Four>,
    tiles: &mut Shared<[Four]>,
    out: &mut [f32],
    rows: u32,
    outputs: u32,
    #[comptime] tile_rows: u32,
) {
    let vectors = comptime!((tile_rows / DOWN / 4) as usize);
    let unit = UNIT_POS_Y * ACROSS + UNIT_POS_X;
    let count = comptime!(UNIT_OUTPUTS as usize * vectors);
    if UNIT_POS_Z == 1 {
        #[unroll]
        for index in 0..count {
            tiles[(index as u32 * comptime!(ACROSS * DOWN) + unit) as usize] = sums[index];
        }
    }
    sync_cube();
    if UNIT_POS_Z == 0 {
        #[unroll]
        for output in 0..comptime!(UNIT_OUTPUTS as usize) {
            let column = CUBE_POS_X * TILE_OUTPUTS + UNIT_POS_X + ACROSS * output as u32;
            #[unroll]
            for vector in 0..vectors {
                let index = output * vectors + vector;
                let other = tiles[(index as u32 * comptime!(ACROSS * DOWN) + unit) as usize];
                let sum = sums[index] + other;
                #[unroll]
                for row in 0..4usize {
                    let at = CUBE_POS_Y * tile_rows + UNIT_POS_Y + DOWN * (vector as u32 * 4 + row as u32);
                    if at < rows && column < outputs {
                        out[(at * outputs + column) as usize] = sum.extract(row);
                    }
                }
            }
        }
    }
}
