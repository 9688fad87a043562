//! Products of few rows, which go along the rows of weights.

use burn::tensor::{DType, Shape};
use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};
use burn_cubecl::tensor::CubeTensor;

use super::{four_inputs, nibbles};
use crate::cube::{
    MOST_CUBES, dims, element, plane_size, room, signed_bytes, sum_line, sum_vector, vector_size,
};
use crate::linear::Grouping;

/// Units that go along a row of the weight together.
const LANES: u32 = 32;
/// Lines of a cube.
const LINES: u32 = 2;
/// Rows of the weight that a line goes along at once, using every piece of `x` it loads for all of them.
const PER_LINE: usize = 4;

/// Weights of one launch at most: with activations and results eight buffers, which every device binds.
pub(super) const TOGETHER: usize = 3;

/// The products of few rows with up to [`TOGETHER`] weights of one dtype.
pub(super) fn plain(x: CubeTensor, weights: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let [rows, inputs] = dims(&x);
    let outputs: Vec<usize> = weights.iter().map(|weight| dims::<2>(weight)[0]).collect();
    let (products, out, places) = beside_each_other(&x, rows, &outputs);
    let (client, vector, weight_element) = (x.client.clone(), vector_size(inputs), element(&weights[0]));
    let [first, second, third] = three(weights);
    plain_rows::launch(
        &client,
        row_cubes(rows, &outputs),
        CubeDim::new_2d(LANES, LINES),
        vector,
        x.into_buffer_arg(),
        first.into_buffer_arg(),
        second.into_buffer_arg(),
        third.into_buffer_arg(),
        out.into_buffer_arg(),
        places,
        (inputs / vector) as u32,
        outputs.len() as u32,
        plane_size(&client),
        weight_element,
    );
    products
}

/// The same with weights of one layout, their words and scales.
pub(super) fn grouped(
    x: CubeTensor,
    weights: Vec<(CubeTensor, CubeTensor)>,
    grouping: Grouping,
) -> Vec<CubeTensor> {
    let Grouping { inputs, group, four_bits, .. } = grouping;
    let [rows, _] = dims(&x);
    let ([_, row_words], [_, groups]) = (dims(&weights[0].0), dims(&weights[0].1));
    let outputs: Vec<usize> = weights.iter().map(|(words, _)| dims::<2>(words)[0]).collect();
    let (products, out, places) = beside_each_other(&x, rows, &outputs);
    let (client, vector, scale_element) = (x.client.clone(), vector_size(row_words), element(&weights[0].1));
    let per_word = if four_bits { 8 } else { 4 };
    // Whether rows of `x` end where their words do and so can be read four inputs at a time.
    let whole = inputs == row_words * per_word;
    let [first, second, third] = three(weights);
    grouped_rows::launch(
        &client,
        row_cubes(rows, &outputs),
        CubeDim::new_2d(LANES, LINES),
        vector,
        if whole { 4 } else { 1 },
        x.into_buffer_arg(),
        first.0.into_buffer_arg(),
        second.0.into_buffer_arg(),
        third.0.into_buffer_arg(),
        first.1.into_buffer_arg(),
        second.1.into_buffer_arg(),
        third.1.into_buffer_arg(),
        out.into_buffer_arg(),
        places,
        inputs as u32,
        (row_words / vector) as u32,
        groups as u32,
        outputs.len() as u32,
        (group / (per_word * vector)) as u32,
        four_bits,
        whole,
        plane_size(&client),
        scale_element,
    );
    products
}

/// Room for products with as many outputs each, one after the other in one buffer, and where they begin. Each begins where
/// a buffer can be bound.
fn beside_each_other(
    x: &CubeTensor,
    rows: usize,
    outputs: &[usize],
) -> (Vec<CubeTensor>, CubeTensor, PlacesLaunch) {
    let step = (x.client.properties().memory.alignment as usize).div_ceil(size_of::<f32>());
    let mut starts = [0; TOGETHER + 1];
    for (index, outputs) in outputs.iter().enumerate() {
        starts[index + 1] = (starts[index] + rows * outputs).next_multiple_of(step);
    }
    let all = starts[outputs.len()];
    let out = room(x, [all]);
    let bytes = |elements: usize| (elements * size_of::<f32>()) as u64;
    let product = |(index, &outputs): (usize, &usize)| {
        let (start, end) = (starts[index], starts[index] + rows * outputs);
        let handle = out.handle.clone().offset_start(bytes(start)).offset_end(bytes(all - end));
        let (client, device) = (out.client.clone(), out.device.clone());
        CubeTensor::new_contiguous(client, device, Shape::new([rows, outputs]), handle, DType::F32)
    };
    let products = outputs.iter().enumerate().map(product).collect();
    let of = |index: usize| outputs.get(index).copied().unwrap_or(0) as u32;
    let places = PlacesLaunch::new(of(0), of(1), of(2), starts[1] as u32, starts[2] as u32);
    (products, out, places)
}

/// The weights of a launch; where there are fewer, one of them stands for those that are not looked at.
fn three<T: Clone>(weights: Vec<T>) -> [T; TOGETHER] {
    std::array::from_fn(|index| weights[index.min(weights.len() - 1)].clone())
}

/// The rows and weights of the same outputs beside each other, so that rows find a weight in the cache. Down and back for
/// the outputs, of which vocabularies have more than fit in one direction.
fn row_cubes(rows: usize, outputs: &[usize]) -> CubeCount {
    let most = outputs.iter().copied().max().unwrap_or(0);
    let groups = most.div_ceil(PER_LINE * LINES as usize);
    let down = groups.min(MOST_CUBES as usize);
    CubeCount::Static((rows * outputs.len()) as u32, down as u32, groups.div_ceil(down) as u32)
}

/// Outputs of the weights of a launch, and where the results of those behind the first begin.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Places {
    first_outputs: u32,
    second_outputs: u32,
    third_outputs: u32,
    second: u32,
    third: u32,
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

/// The first output of a line.
#[cube]
fn first_output() -> u32 {
    ((CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * LINES + UNIT_POS_Y) * PER_LINE as u32
}

#[cube(launch)]
fn plain_rows<F: Float, N: Size>(
    x: &[Vector<f32, N>],
    first_weight: &[Vector<F, N>],
    second_weight: &[Vector<F, N>],
    third_weight: &[Vector<F, N>],
    out: &mut [f32],
    places: Places,
    row_vectors: u32,
    #[comptime] count: u32,
    #[comptime] plane: u32,
    #[define(F)] _element: ElemType,
) {
    let first = first_output();
    let (row, which) = (CUBE_POS_X / count, CUBE_POS_X % count);
    let x_row = row * row_vectors;
    let mut line = Vector::<f32, Const<4>>::new(0.0f32);
    let outputs = outputs_of(places, which);
    if which == 0 {
        line = plain_line::<F, N>(x, first_weight, x_row, first, outputs, row_vectors);
    }
    if comptime!(count > 1) {
        if which == 1 {
            line = plain_line::<F, N>(x, second_weight, x_row, first, outputs, row_vectors);
        }
    }
    if comptime!(count > 2) {
        if which == 2 {
            line = plain_line::<F, N>(x, third_weight, x_row, first, outputs, row_vectors);
        }
    }
    write_line(line, out, start_of(places, which) + row * outputs, first, outputs, plane);
}

/// What a unit adds to the outputs of its line.
#[cube]
fn plain_line<F: Float, N: Size>(
    x: &[Vector<f32, N>],
    weight: &[Vector<F, N>],
    x_row: u32,
    first: u32,
    outputs: u32,
    row_vectors: u32,
) -> Vector<f32, Const<4>> {
    let mut sums = Array::<Vector<f32, N>>::new(PER_LINE);
    #[unroll]
    for index in 0..PER_LINE {
        sums[index] = Vector::new(0.0f32);
    }
    let mut at = UNIT_POS_X;
    // Behind the last output there is nothing to go along.
    while first < outputs && at < row_vectors {
        let values = x[(x_row + at) as usize];
        #[unroll]
        for index in 0..PER_LINE {
            let output = min(first + index as u32, outputs - 1);
            let weights = weight[(output * row_vectors + at) as usize];
            sums[index] += values * Vector::<f32, N>::cast_from(weights);
        }
        at += LANES;
    }
    let mut line = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for index in 0..PER_LINE {
        line.insert(index, sum_vector::<N>(sums[index]));
    }
    line
}

#[cube(launch)]
fn grouped_rows<S: Float, W: Size, V: Size>(
    x: &[Vector<f32, V>],
    first_words: &[Vector<u32, W>],
    second_words: &[Vector<u32, W>],
    third_words: &[Vector<u32, W>],
    first_scales: &[S],
    second_scales: &[S],
    third_scales: &[S],
    out: &mut [f32],
    places: Places,
    inputs: u32,
    row_vectors: u32,
    groups: u32,
    #[comptime] count: u32,
    #[comptime] vectors_per_group: u32,
    #[comptime] four_bits: bool,
    #[comptime] whole: bool,
    #[comptime] plane: u32,
    #[define(S)] _scale: ElemType,
) {
    let first = first_output();
    let (row, which) = (CUBE_POS_X / count, CUBE_POS_X % count);
    let x_row = row * inputs;
    let mut line = Vector::<f32, Const<4>>::new(0.0f32);
    let outputs = outputs_of(places, which);
    if which == 0 {
        line = grouped_line::<S, W, V>(
            x,
            first_words,
            first_scales,
            x_row,
            inputs,
            row_vectors,
            groups,
            first,
            outputs,
            vectors_per_group,
            four_bits,
            whole,
        );
    }
    if comptime!(count > 1) {
        if which == 1 {
            line = grouped_line::<S, W, V>(
                x,
                second_words,
                second_scales,
                x_row,
                inputs,
                row_vectors,
                groups,
                first,
                outputs,
                vectors_per_group,
                four_bits,
                whole,
            );
        }
    }
    if comptime!(count > 2) {
        if which == 2 {
            line = grouped_line::<S, W, V>(
                x,
                third_words,
                third_scales,
                x_row,
                inputs,
                row_vectors,
                groups,
                first,
                outputs,
                vectors_per_group,
                four_bits,
                whole,
            );
        }
    }
    write_line(line, out, start_of(places, which) + row * outputs, first, outputs, plane);
}

/// What a unit adds to the outputs of its line.
#[cube]
fn grouped_line<S: Float, W: Size, V: Size>(
    x: &[Vector<f32, V>],
    words: &[Vector<u32, W>],
    scales: &[S],
    x_row: u32,
    inputs: u32,
    row_vectors: u32,
    groups: u32,
    first: u32,
    outputs: u32,
    #[comptime] vectors_per_group: u32,
    #[comptime] four_bits: bool,
    #[comptime] whole: bool,
) -> Vector<f32, Const<4>> {
    let vector = W::value();
    let pieces = comptime!(if four_bits { 2 * vector } else { vector });
    let mut values = Array::<Vector<f32, Const<4>>>::new(pieces);
    let mut sums = Array::<Vector<f32, Const<4>>>::new(PER_LINE);
    #[unroll]
    for index in 0..PER_LINE {
        sums[index] = Vector::new(0.0f32);
    }
    let mut at = UNIT_POS_X;
    // Behind the last output there is nothing to go along.
    while first < outputs && at < row_vectors {
        let start = at * pieces as u32 * 4;
        #[unroll]
        for piece in 0..pieces {
            values[piece] = four_inputs::<f32, V>(x, x_row, start + piece as u32 * 4, inputs, whole);
        }
        #[unroll]
        for index in 0..PER_LINE {
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
    let mut line = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for index in 0..PER_LINE {
        line.insert(index, sum_vector::<Const<4>>(sums[index]));
    }
    line
}

/// Adds up what the units of a line have for its outputs, and writes it to where those of its row begin.
#[cube]
fn write_line(
    line: Vector<f32, Const<4>>,
    out: &mut [f32],
    row: u32,
    first: u32,
    outputs: u32,
    #[comptime] plane: u32,
) {
    let mut scratch = Shared::<[Vector<f32, Const<4>>]>::new_slice(comptime!((LANES * LINES) as usize));
    let sums = sum_line::<Const<4>>(line, &mut scratch, LANES, plane);
    if UNIT_POS_X == 0 {
        #[unroll]
        for index in 0..PER_LINE {
            let output = first + index as u32;
            if output < outputs {
                out[(row + output) as usize] = sums.extract(index);
            }
        }
    }
}
