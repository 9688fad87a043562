//! Kernels for products of few rows: a line of units computes a few outputs.

use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};

use super::{four_inputs, nibbles, unpack};
use crate::activation::Activation;
use crate::cube::{signed_bytes, sum_line, sum_vector};
use crate::gate::cube::curve;
use crate::norm::cube::root_mean_square;

/// Units of a line, which share a row of the weight.
pub(super) const LANES: u32 = 32;
/// Lines of a cube.
pub(super) const LINES: u32 = 2;

/// The steps that are fused with the products of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct Fusion {
    /// Rows are normalised first.
    pub normed: bool,
    /// The result is `activation(first product) * second product`.
    pub gated: Option<Activation>,
    /// Something is added to the only product.
    pub added: bool,
}

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

/// The parameters of a norm.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct NormNumbers {
    pub width: f32,
    pub epsilon: f32,
    pub offset: f32,
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
fn first_output<P: Size>() -> u32 {
    let per_line = P::value();
    ((CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * LINES + UNIT_POS_Y) * per_line as u32
}

/// The root mean square of the row that begins at vector `start`, computed by every line for itself; 1 if rows are not normalised.
#[cube]
fn divisor_of<N: Size>(
    x: &[Vector<f32, N>],
    start: u32,
    vectors: u32,
    norm: NormNumbers,
    #[comptime] normed: bool,
    #[comptime] plane: u32,
) -> f32 {
    let mut divisor = 1.0f32;
    if comptime!(normed) {
        let mut squares = Vector::<f32, N>::new(0.0f32);
        let mut at = UNIT_POS_X;
        while at < vectors {
            let values = x[(start + at) as usize];
            squares += values * values;
            at += LANES;
        }
        divisor = root_mean_square::<N>(squares, norm.width, norm.epsilon, LANES, LINES, plane);
    }
    divisor
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
    row_vectors: u32,
    #[comptime] count: u32,
    #[comptime] packed: bool,
    #[comptime] fusion: Fusion,
    #[comptime] plane: u32,
    #[define(F)] _element: ElemType,
) {
    let first = first_output::<P>();
    let results = comptime!(if fusion.gated.is_some() { 1 } else { count });
    let (row, which) = (CUBE_POS_X / results, CUBE_POS_X % results);
    let x_row = row * row_vectors;
    let divisor = divisor_of::<N>(x, x_row, row_vectors, norm, fusion.normed, plane);
    let outputs = outputs_of(places, which);
    let normed = comptime!(fusion.normed);
    let mut line = Vector::<f32, P>::new(0.0f32);
    if which == 0 {
        line = plain_line::<F, N, M, P>(
            x,
            first_weight,
            norm_weight,
            divisor,
            norm.offset,
            x_row,
            first,
            outputs,
            row_vectors,
            normed,
            packed,
        );
    }
    let mut other = Vector::<f32, P>::new(0.0f32);
    if comptime!(fusion.gated.is_some()) {
        other = plain_line::<F, N, M, P>(
            x,
            second_weight,
            norm_weight,
            divisor,
            norm.offset,
            x_row,
            first,
            outputs,
            row_vectors,
            normed,
            packed,
        );
    }
    if comptime!(results > 1) {
        if which == 1 {
            line = plain_line::<F, N, M, P>(
                x,
                second_weight,
                norm_weight,
                divisor,
                norm.offset,
                x_row,
                first,
                outputs,
                row_vectors,
                normed,
                packed,
            );
        }
    }
    if comptime!(results > 2) {
        if which == 2 {
            line = plain_line::<F, N, M, P>(
                x,
                third_weight,
                norm_weight,
                divisor,
                norm.offset,
                x_row,
                first,
                outputs,
                row_vectors,
                normed,
                packed,
            );
        }
    }
    let start = start_of(places, which) + row * outputs;
    write_line::<P>(line, other, added, out, start, first, outputs, fusion, plane);
}

/// A unit's share of the outputs of its line.
#[cube]
fn plain_line<F: Numeric, N: Size, M: Size, P: Size>(
    x: &[Vector<f32, N>],
    weight: &[Vector<F, M>],
    norm_weight: &[Vector<f32, N>],
    divisor: f32,
    offset: f32,
    x_row: u32,
    first: u32,
    outputs: u32,
    row_vectors: u32,
    #[comptime] normed: bool,
    #[comptime] packed: bool,
) -> Vector<f32, P> {
    let per_line = P::value();
    let mut sums = Array::<Vector<f32, N>>::new(per_line);
    #[unroll]
    for index in 0..per_line {
        sums[index] = Vector::new(0.0f32);
    }
    let mut at = UNIT_POS_X;
    // Lines beyond the last output have no work.
    while first < outputs && at < row_vectors {
        let mut values = x[(x_row + at) as usize];
        if comptime!(normed) {
            let factor = norm_weight[at as usize] + Vector::new(offset);
            values = values / Vector::new(divisor) * factor;
        }
        #[unroll]
        for index in 0..per_line {
            let output = min(first + index as u32, outputs - 1);
            let weights = weight[(output * row_vectors + at) as usize];
            sums[index] += values * unpack::<F, M, N>(weights, packed);
        }
        at += LANES;
    }
    let mut line = Vector::<f32, P>::new(0.0f32);
    #[unroll]
    for index in 0..per_line {
        line.insert(index, sum_vector::<N>(sums[index]));
    }
    line
}

/// Multiplies with weights of small integers. A line computes `P` outputs.
#[cube(launch)]
pub(super) fn grouped_rows<S: Float, W: Size, V: Size, P: Size>(
    x: &[Vector<f32, V>],
    first_words: &[Vector<u32, W>],
    second_words: &[Vector<u32, W>],
    third_words: &[Vector<u32, W>],
    first_scales: &[S],
    second_scales: &[S],
    third_scales: &[S],
    norm_weight: &[Vector<f32, V>],
    added: &[f32],
    out: &mut [f32],
    places: Places,
    norm: NormNumbers,
    inputs: u32,
    row_vectors: u32,
    groups: u32,
    #[comptime] count: u32,
    #[comptime] vectors_per_group: u32,
    #[comptime] four_bits: bool,
    #[comptime] whole: bool,
    #[comptime] fusion: Fusion,
    #[comptime] plane: u32,
    #[define(S)] _scale: ElemType,
) {
    let first = first_output::<P>();
    let results = comptime!(if fusion.gated.is_some() { 1 } else { count });
    let (row, which) = (CUBE_POS_X / results, CUBE_POS_X % results);
    let x_row = row * inputs;
    let vector = V::value();
    let x_vectors = inputs / vector as u32;
    let divisor = divisor_of::<V>(x, row * x_vectors, x_vectors, norm, fusion.normed, plane);
    let outputs = outputs_of(places, which);
    let normed = comptime!(fusion.normed);
    let mut line = Vector::<f32, P>::new(0.0f32);
    if which == 0 {
        line = grouped_line::<S, W, V, P>(
            x,
            first_words,
            first_scales,
            norm_weight,
            divisor,
            norm.offset,
            x_row,
            inputs,
            row_vectors,
            groups,
            first,
            outputs,
            vectors_per_group,
            four_bits,
            whole,
            normed,
        );
    }
    let mut other = Vector::<f32, P>::new(0.0f32);
    if comptime!(fusion.gated.is_some()) {
        other = grouped_line::<S, W, V, P>(
            x,
            second_words,
            second_scales,
            norm_weight,
            divisor,
            norm.offset,
            x_row,
            inputs,
            row_vectors,
            groups,
            first,
            outputs,
            vectors_per_group,
            four_bits,
            whole,
            normed,
        );
    }
    if comptime!(results > 1) {
        if which == 1 {
            line = grouped_line::<S, W, V, P>(
                x,
                second_words,
                second_scales,
                norm_weight,
                divisor,
                norm.offset,
                x_row,
                inputs,
                row_vectors,
                groups,
                first,
                outputs,
                vectors_per_group,
                four_bits,
                whole,
                normed,
            );
        }
    }
    if comptime!(results > 2) {
        if which == 2 {
            line = grouped_line::<S, W, V, P>(
                x,
                third_words,
                third_scales,
                norm_weight,
                divisor,
                norm.offset,
                x_row,
                inputs,
                row_vectors,
                groups,
                first,
                outputs,
                vectors_per_group,
                four_bits,
                whole,
                normed,
            );
        }
    }
    let start = start_of(places, which) + row * outputs;
    write_line::<P>(line, other, added, out, start, first, outputs, fusion, plane);
}

/// A unit's share of the outputs of its line.
#[cube]
fn grouped_line<S: Float, W: Size, V: Size, P: Size>(
    x: &[Vector<f32, V>],
    words: &[Vector<u32, W>],
    scales: &[S],
    norm_weight: &[Vector<f32, V>],
    divisor: f32,
    offset: f32,
    x_row: u32,
    inputs: u32,
    row_vectors: u32,
    groups: u32,
    first: u32,
    outputs: u32,
    #[comptime] vectors_per_group: u32,
    #[comptime] four_bits: bool,
    #[comptime] whole: bool,
    #[comptime] normed: bool,
) -> Vector<f32, P> {
    let vector = W::value();
    let per_line = P::value();
    let pieces = comptime!(if four_bits { 2 * vector } else { vector });
    let mut values = Array::<Vector<f32, Const<4>>>::new(pieces);
    let mut sums = Array::<Vector<f32, Const<4>>>::new(per_line);
    #[unroll]
    for index in 0..per_line {
        sums[index] = Vector::new(0.0f32);
    }
    let mut at = UNIT_POS_X;
    // Lines beyond the last output have no work.
    while first < outputs && at < row_vectors {
        let start = at * pieces as u32 * 4;
        #[unroll]
        for piece in 0..pieces {
            let from = start + piece as u32 * 4;
            let mut four = four_inputs::<f32, V>(x, x_row, from, inputs, whole);
            if comptime!(normed) {
                let factor = four_inputs::<f32, V>(norm_weight, 0u32, from, inputs, whole);
                four = four / Vector::new(divisor) * (factor + Vector::new(offset));
            }
            values[piece] = four;
        }
        #[unroll]
        for index in 0..per_line {
            let output = min(first + index as u32, outputs - 1);
            let packed = words[(output * row_vectors + at) as usize];
            let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for word in 0..vector {
                let bits = packed.extract(word);
                if comptime!(four_bits) {
                    sum += values[word] * nibbles(bits, 0u32);
                    sum += values[word + vector] * nibbles(bits, 4u32);
                } else {
                    sum += values[word] * signed_bytes(bits);
                }
            }
            let scale = scales[(output * groups + at / vectors_per_group) as usize];
            sums[index] += sum * Vector::new(f32::cast_from(scale));
        }
        at += LANES;
    }
    let mut line = Vector::<f32, P>::new(0.0f32);
    #[unroll]
    for index in 0..per_line {
        line.insert(index, sum_vector::<Const<4>>(sums[index]));
    }
    line
}

/// Sums the shares of a line's units and writes its outputs, after the gate with the second product `other` and after the addition.
#[cube]
fn write_line<P: Size>(
    line: Vector<f32, P>,
    other: Vector<f32, P>,
    added: &[f32],
    out: &mut [f32],
    row: u32,
    first: u32,
    outputs: u32,
    #[comptime] fusion: Fusion,
    #[comptime] plane: u32,
) {
    let per_line = P::value();
    let mut scratch = Shared::<[Vector<f32, P>]>::new_slice(comptime!((LANES * LINES) as usize));
    let sums = sum_line::<P>(line, &mut scratch, LANES, plane);
    let mut others = other;
    if comptime!(fusion.gated.is_some()) {
        others = sum_line::<P>(other, &mut scratch, LANES, plane);
    }
    if UNIT_POS_X == 0 {
        #[unroll]
        for index in 0..per_line {
            let output = first + index as u32;
            if output < outputs {
                let at = (row + output) as usize;
                let mut number = sums.extract(index);
                if comptime!(fusion.gated.is_some()) {
                    number = gate_of(number, fusion) * others.extract(index);
                }
                if comptime!(fusion.added) {
                    number += added[at];
                }
                out[at] = number;
            }
        }
    }
}

#[cube]
fn gate_of(number: f32, #[comptime] fusion: Fusion) -> f32 {
    let activation = comptime!(fusion.gated.unwrap_or(Activation::Silu));
    curve(number, activation)
}
