//! Kernels for products of few rows: a line of units computes a few outputs of a group of rows.
//!
//! A unit loads a piece of every output's weight, unpacks it once, and multiplies it with all rows of the group. Sums are
//! explicit fused multiply-adds along the inputs, so a result has the same bits however many rows and outputs a line has.

use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};

use super::line_results::{Fusion, LineShape, NormNumbers, write_lines};
use super::{four_inputs, unpack};

/// The outputs of the weights of a launch, and the offsets of the second and third result.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Places {
    pub first_outputs: u32,
    pub second_outputs: u32,
    pub third_outputs: u32,
    pub second: u32,
    pub third: u32,
}

#[cube]
fn outputs_of(places: Places, which: u32) -> u32 {
    let mut outputs = places.first_outputs;
    if which == 1 {
        outputs = places.second_outputs;
    } else if which == 2 {
        outputs = places.third_outputs;
    }
    outputs
}

#[cube]
fn start_of(places: Places, which: u32) -> u32 {
    let mut start = 0u32;
    if which == 1 {
        start = places.second;
    } else if which == 2 {
        start = places.third;
    }
    start
}

/// The first output of a line of `P` outputs.
#[cube]
fn first_output<P: Size>(#[comptime] shape: LineShape) -> u32 {
    let per_line = P::value();
    ((CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * comptime!(shape.lines) + UNIT_POS_Y) * per_line as u32
}

/// So many vectors of zeros.
#[cube]
fn zeros<P: Size>(#[comptime] count: usize) -> Array<Vector<f32, P>> {
    let mut all = Array::<Vector<f32, P>>::new(count);
    #[unroll]
    for index in 0..count {
        all[index] = Vector::new(0.0f32);
    }
    all
}

/// Multiplies with weights of floats, or of words with two bf16 numbers each if they are `packed`. A line computes `P` outputs.
#[cube(launch)]
pub(super) fn plain_rows<F: Numeric, N: Size, M: Size, P: Size>(
    x: &[Vector<f32, N>],
    first_weight: &[Vector<F, M>],
    second_weight: &[Vector<F, M>],
    third_weight: &[Vector<F, M>],
    norm_weight: &[Vector<f32, N>],
    added: &[f32],
    out: &mut [f32],
    places: Places,
    norm: NormNumbers,
    rows: u32,
    row_vectors: u32,
    #[comptime] count: u32,
    #[comptime] packed: bool,
    #[comptime] fusion: Fusion,
    #[comptime] shape: LineShape,
    #[define(F)] _element: ElemType,
) {
    let first = first_output::<P>(shape);
    let results = comptime!(if fusion.gated.is_some() { 1 } else { count });
    let (group, which) = (CUBE_POS_X / results, CUBE_POS_X % results);
    let first_row = group * comptime!(shape.rows);
    let outputs = outputs_of(places, which);
    let gated = comptime!(fusion.gated.is_some());
    let of_group = comptime!(shape.rows as usize);
    let mut sums = zeros::<P>(of_group);
    let mut others = zeros::<P>(comptime!(if gated { of_group } else { 1 }));
    let mut squares = zeros::<Const<1>>(of_group);
    let per_line = P::value();
    let steps = comptime!(shape.steps as usize);
    let pieces = comptime!(steps * per_line);
    let mut loaded = Array::<Vector<F, M>>::new(pieces);
    let mut other = Array::<Vector<F, M>>::new(comptime!(if gated { pieces } else { 1 }));
    let mut at = UNIT_POS_X;
    // Lines beyond the last output have no work.
    while first < outputs && at < row_vectors {
        if which == 0 {
            load_pieces::<F, M, P>(first_weight, &mut loaded, at, first, outputs, row_vectors, shape);
        }
        if comptime!(gated) {
            load_pieces::<F, M, P>(second_weight, &mut other, at, first, outputs, row_vectors, shape);
        }
        if comptime!(results > 1) {
            if which == 1 {
                load_pieces::<F, M, P>(second_weight, &mut loaded, at, first, outputs, row_vectors, shape);
            }
        }
        if comptime!(results > 2) {
            if which == 2 {
                load_pieces::<F, M, P>(third_weight, &mut loaded, at, first, outputs, row_vectors, shape);
            }
        }
        #[unroll]
        for step in 0..steps {
            let place = at + step as u32 * comptime!(shape.lanes);
            let weights = unpack_pieces::<F, M, N, P>(&loaded, step * per_line, packed);
            let other_weights = if comptime!(gated) {
                unpack_pieces::<F, M, N, P>(&other, step * per_line, packed)
            } else {
                zeros::<P>(1usize)
            };
            let mut factor = Vector::<f32, N>::new(1.0f32);
            if comptime!(fusion.normed) {
                factor = norm_weight[place as usize] + Vector::new(norm.offset);
            }
            #[unroll]
            for row in 0..of_group {
                let from = min(first_row + row as u32, rows - 1) * row_vectors + place;
                let values = x[from as usize];
                add_row::<N, P>(
                    values,
                    factor,
                    &weights,
                    &other_weights,
                    &mut sums,
                    &mut others,
                    &mut squares,
                    row,
                    fusion,
                );
            }
        }
        at += comptime!(shape.lanes * shape.steps);
    }
    let start = start_of(places, which);
    write_lines::<P>(
        &mut sums,
        &mut others,
        &mut squares,
        added,
        out,
        norm,
        start,
        first_row,
        rows,
        first,
        outputs,
        fusion,
        shape,
    );
}

/// Loads the pieces of a line's outputs at `at` and some steps behind it.
#[cube]
fn load_pieces<F: Numeric, M: Size, P: Size>(
    weight: &[Vector<F, M>],
    loaded: &mut Array<Vector<F, M>>,
    at: u32,
    first: u32,
    outputs: u32,
    row_vectors: u32,
    #[comptime] shape: LineShape,
) {
    let per_line = P::value();
    #[unroll]
    for step in 0..comptime!(shape.steps as usize) {
        let place = at + step as u32 * comptime!(shape.lanes);
        #[unroll]
        for index in 0..per_line {
            let output = min(first + index as u32, outputs - 1);
            loaded[step * per_line + index] = weight[(output * row_vectors + place) as usize];
        }
    }
}

/// The numbers of some outputs' pieces, those of an input together.
#[cube]
fn unpack_pieces<F: Numeric, M: Size, N: Size, P: Size>(
    loaded: &Array<Vector<F, M>>,
    from: usize,
    #[comptime] packed: bool,
) -> Array<Vector<f32, P>> {
    let per_line = P::value();
    let mut numbers = Array::<Vector<f32, N>>::new(per_line);
    #[unroll]
    for index in 0..per_line {
        numbers[index] = unpack::<F, M, N>(loaded[from + index], packed);
    }
    let mut weights = zeros::<P>(N::value());
    #[unroll]
    for input in 0..N::value() {
        let mut of_input = Vector::<f32, P>::new(0.0f32);
        #[unroll]
        for index in 0..per_line {
            of_input.insert(index, numbers[index].extract(input));
        }
        weights[input] = of_input;
    }
    weights
}

/// Multiplies with weights of small integers. A line computes `P` outputs.
#[cube(launch)]
pub(super) fn grouped_rows<S: Float, V: Size, P: Size>(
    x: &[Vector<f32, V>],
    first_words: &[u32],
    second_words: &[u32],
    third_words: &[u32],
    first_scales: &[S],
    second_scales: &[S],
    third_scales: &[S],
    norm_weight: &[Vector<f32, V>],
    added: &[f32],
    out: &mut [f32],
    places: Places,
    norm: NormNumbers,
    rows: u32,
    inputs: u32,
    row_words: u32,
    groups: u32,
    #[comptime] count: u32,
    #[comptime] group_words: u32,
    #[comptime] four_bits: bool,
    #[comptime] whole: bool,
    #[comptime] fusion: Fusion,
    #[comptime] shape: LineShape,
    #[define(S)] _scale: ElemType,
) {
    let first = first_output::<P>(shape);
    let results = comptime!(if fusion.gated.is_some() { 1 } else { count });
    let (group, which) = (CUBE_POS_X / results, CUBE_POS_X % results);
    let first_row = group * comptime!(shape.rows);
    let outputs = outputs_of(places, which);
    let gated = comptime!(fusion.gated.is_some());
    let of_group = comptime!(shape.rows as usize);
    let mut sums = zeros::<P>(of_group);
    let mut others = zeros::<P>(comptime!(if gated { of_group } else { 1 }));
    let mut squares = zeros::<Const<1>>(of_group);
    let steps = comptime!(shape.steps as usize);
    let mut bits = Array::<Vector<u32, P>>::new(steps);
    let mut scales = Array::<Vector<f32, P>>::new(steps);
    let mut other_bits = Array::<Vector<u32, P>>::new(comptime!(if gated { steps } else { 1 }));
    let mut other_scales = Array::<Vector<f32, P>>::new(comptime!(if gated { steps } else { 1 }));
    let mut at = UNIT_POS_X;
    // Lines beyond the last output have no work.
    while first < outputs && at < row_words {
        if which == 0 {
            load_words::<P>(first_words, &mut bits, at, first, outputs, row_words, shape);
            load_scales::<S, P>(first_scales, &mut scales, at, first, outputs, groups, group_words, shape);
        }
        if comptime!(gated) {
            load_words::<P>(second_words, &mut other_bits, at, first, outputs, row_words, shape);
            load_scales::<S, P>(
                second_scales,
                &mut other_scales,
                at,
                first,
                outputs,
                groups,
                group_words,
                shape,
            );
        }
        if comptime!(results > 1) {
            if which == 1 {
                load_words::<P>(second_words, &mut bits, at, first, outputs, row_words, shape);
                load_scales::<S, P>(
                    second_scales,
                    &mut scales,
                    at,
                    first,
                    outputs,
                    groups,
                    group_words,
                    shape,
                );
            }
        }
        if comptime!(results > 2) {
            if which == 2 {
                load_words::<P>(third_words, &mut bits, at, first, outputs, row_words, shape);
                load_scales::<S, P>(
                    third_scales,
                    &mut scales,
                    at,
                    first,
                    outputs,
                    groups,
                    group_words,
                    shape,
                );
            }
        }
        #[unroll]
        for step in 0..steps {
            let place = at + step as u32 * comptime!(shape.lanes);
            #[unroll]
            for half in 0..comptime!(if four_bits { 2usize } else { 1usize }) {
                let weights = four_integers::<P>(bits[step], scales[step], half as u32, four_bits);
                let other_weights = if comptime!(gated) {
                    four_integers::<P>(other_bits[step], other_scales[step], half as u32, four_bits)
                } else {
                    zeros::<P>(1usize)
                };
                let mut input = place * 4;
                if comptime!(four_bits) {
                    input = place / 4 * 32 + half as u32 * 16 + place % 4 * 4;
                }
                let mut factor = Vector::<f32, Const<4>>::new(1.0f32);
                if comptime!(fusion.normed) {
                    factor = four_inputs::<f32, V>(norm_weight, 0u32, input, inputs, whole)
                        + Vector::new(norm.offset);
                }
                #[unroll]
                for row in 0..of_group {
                    let from = min(first_row + row as u32, rows - 1) * inputs;
                    let values = four_inputs::<f32, V>(x, from, input, inputs, whole);
                    add_row::<Const<4>, P>(
                        values,
                        factor,
                        &weights,
                        &other_weights,
                        &mut sums,
                        &mut others,
                        &mut squares,
                        row,
                        fusion,
                    );
                }
            }
        }
        at += comptime!(shape.lanes * shape.steps);
    }
    let start = start_of(places, which);
    write_lines::<P>(
        &mut sums,
        &mut others,
        &mut squares,
        added,
        out,
        norm,
        start,
        first_row,
        rows,
        first,
        outputs,
        fusion,
        shape,
    );
}

/// Loads the words of a line's outputs at `at` and some steps behind it.
#[cube]
fn load_words<P: Size>(
    words: &[u32],
    bits: &mut Array<Vector<u32, P>>,
    at: u32,
    first: u32,
    outputs: u32,
    row_words: u32,
    #[comptime] shape: LineShape,
) {
    #[unroll]
    for step in 0..comptime!(shape.steps as usize) {
        let place = at + step as u32 * comptime!(shape.lanes);
        let mut of_step = Vector::<u32, P>::new(0u32);
        #[unroll]
        for index in 0..P::value() {
            let output = min(first + index as u32, outputs - 1);
            of_step.insert(index, words[(output * row_words + place) as usize]);
        }
        bits[step] = of_step;
    }
}

/// Loads the scales of the words at `at` and some steps behind it.
#[cube]
fn load_scales<S: Float, P: Size>(
    scales: &[S],
    loaded: &mut Array<Vector<f32, P>>,
    at: u32,
    first: u32,
    outputs: u32,
    groups: u32,
    #[comptime] group_words: u32,
    #[comptime] shape: LineShape,
) {
    #[unroll]
    for step in 0..comptime!(shape.steps as usize) {
        let group = (at + step as u32 * comptime!(shape.lanes)) / group_words;
        let mut of_step = Vector::<f32, P>::new(0.0f32);
        #[unroll]
        for index in 0..P::value() {
            let output = min(first + index as u32, outputs - 1);
            of_step.insert(index, f32::cast_from(scales[(output * groups + group) as usize]));
        }
        loaded[step] = of_step;
    }
}

/// The numbers of four inputs in some outputs' words: one in every byte, or in every lower (`half` is 0) or upper four bits.
///
/// An integer in the lowest bits of 2²³ as f32 is that much larger, so no conversion is needed.
#[cube]
fn four_integers<P: Size>(
    bits: Vector<u32, P>,
    scale: Vector<f32, P>,
    half: u32,
    #[comptime] four_bits: bool,
) -> Array<Vector<f32, P>> {
    let mut numbers = zeros::<P>(4usize);
    #[unroll]
    for byte in 0..4usize {
        let shifted = bits >> Vector::new(8 * byte as u32 + 4 * half);
        // A byte is signed: with its highest bit turned over it is 128 more.
        let number = if comptime!(four_bits) {
            let nibble = (shifted & Vector::new(15u32)) | Vector::new(0x4B00_0000u32);
            Vector::<f32, P>::reinterpret(nibble) - Vector::new(8_388_616.0f32)
        } else {
            let offset =
                ((shifted & Vector::new(255u32)) ^ Vector::new(128u32)) | Vector::new(0x4B00_0000u32);
            Vector::<f32, P>::reinterpret(offset) - Vector::new(8_388_736.0f32)
        };
        numbers[byte] = number * scale;
    }
    numbers
}

/// Adds the products of some inputs of a row of the group, and their squares if it is normalised.
#[cube]
fn add_row<N: Size, P: Size>(
    values: Vector<f32, N>,
    factor: Vector<f32, N>,
    weights: &Array<Vector<f32, P>>,
    other_weights: &Array<Vector<f32, P>>,
    sums: &mut Array<Vector<f32, P>>,
    others: &mut Array<Vector<f32, P>>,
    squares: &mut Array<Vector<f32, Const<1>>>,
    row: usize,
    #[comptime] fusion: Fusion,
) {
    let mut scaled = values;
    if comptime!(fusion.normed) {
        scaled = values * factor;
        let mut square = squares[row];
        #[unroll]
        for input in 0..N::value() {
            let number = Vector::<f32, Const<1>>::new(values.extract(input));
            square = fma(number, number, square);
        }
        squares[row] = square;
    }
    let mut sum = sums[row];
    #[unroll]
    for input in 0..N::value() {
        sum = fma(Vector::<f32, P>::new(scaled.extract(input)), weights[input], sum);
    }
    sums[row] = sum;
    if comptime!(fusion.gated.is_some()) {
        let mut other = others[row];
        #[unroll]
        for input in 0..N::value() {
            other = fma(Vector::<f32, P>::new(scaled.extract(input)), other_weights[input], other);
        }
        others[row] = other;
    }
}
