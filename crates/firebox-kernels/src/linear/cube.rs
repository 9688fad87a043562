//! Products on accelerators.
//!
//! Up to [`FEW_ROWS`] rows a line of units goes along some rows of the weight and keeps its sums in registers:
//! the weight is read once per row, in 16-byte pieces that follow each other. A launch costs more than many a product of one
//! row, so weights that meet the same rows share one. With more rows, cubes stage
//! tiles of both sides in shared memory as f32, so that a weight is unpacked once per [`TILE_ROWS`] rows and
//! never as a whole. Within either way a row's result does not depend on the rows beside it; the two add in
//! different orders, so across that limit it may differ in the last bits.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::{Grouping, LinearOps, NIBBLE_CHUNK, Weight, in_rows};
use crate::cube::{
    MOST_CUBES, dims, element, floats, integers, plane_size, primitive, room, signed_bytes, sum_line,
    sum_vector, vector_size, zeroed,
};

/// Up to so many rows, reading the weight once for each, from a cache that the row before has filled, is faster than tiles
/// that are mostly empty: eight rows of a whole model 1.2 times on an H200.
const FEW_ROWS: usize = 16;

/// Units that go along a row of the weight together.
const LANES: u32 = 32;
/// Lines of a cube.
const LINES: u32 = 2;
/// Rows of the weight that a line goes along at once, using every piece of `x` it loads for all of them.
const PER_LINE: usize = 4;

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

/// Weights of one launch at most: with activations and results eight buffers, which every device binds.
const TOGETHER: usize = 3;

impl LinearOps for CubeBackend {
    fn multiply(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, weight) = (floats(x), into_contiguous(weight));
        let ([rows, inputs], [outputs, _]) = (dims(&x), dims(&weight));
        if rows * outputs * inputs == 0 {
            return zeroed(&x, [rows, outputs]);
        }
        if rows <= FEW_ROWS {
            return only(few_plain(x, vec![weight]));
        }
        let (client, out) = (x.client.clone(), room(&x, [rows, outputs]));
        let weight_element = element(&weight);
        plain_tiles::launch(
            &client,
            tile_cubes(rows, outputs),
            CubeDim::new_2d(TILE_UNITS.0, TILE_UNITS.1),
            if inputs.is_multiple_of(4) { 4 } else { 1 },
            x.into_buffer_arg(),
            weight.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            rows as u32,
            inputs as u32,
            outputs as u32,
            inputs.is_multiple_of(4),
            weight_element,
        );
        out
    }

    fn multiply_grouped(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        scales: FloatTensor<Self>,
        grouping: Grouping,
    ) -> FloatTensor<Self> {
        let Grouping { inputs, group, four_bits, .. } = grouping;
        let (x, words, scales) = (floats(x), into_contiguous(words), into_contiguous(scales));
        assert_eq!(words.dtype.size(), 4, "packed integers are 32-bit words, not {:?}", words.dtype);
        let ([rows, _], [outputs, row_words], [_, groups]) = (dims(&x), dims(&words), dims(&scales));
        if rows * outputs * inputs == 0 {
            return zeroed(&x, [rows, outputs]);
        }
        if rows <= FEW_ROWS {
            return only(few_grouped(x, vec![(words, scales)], grouping));
        }
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
}

/// See [`multiply_each`](super::multiply_each). Few rows meet weights of one form in one launch.
pub(super) fn multiply_each(x: Tensor<2>, weights: Vec<Weight>) -> Vec<Tensor<2>> {
    let [rows, inputs] = x.dims();
    let form = weights.first().and_then(form);
    let alike = form.is_some() && weights.iter().all(|weight| self::form(weight) == form);
    if !alike || weights.len() == 1 || !(1..=FEW_ROWS).contains(&rows) || inputs == 0 {
        return weights.into_iter().map(|weight| weight.multiply(x.clone())).collect();
    }
    let x = floats(primitive(x));
    let mut products = Vec::with_capacity(weights.len());
    let mut weights = weights.into_iter().peekable();
    while weights.peek().is_some() {
        let (mut dense, mut grouped) = (Vec::new(), Vec::new());
        for weight in weights.by_ref().take(TOGETHER) {
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
            Some(Form::Grouped(grouping, _)) => few_grouped(x.clone(), grouped, grouping),
            _ => few_plain(x.clone(), dense),
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

/// The products of few rows with up to [`TOGETHER`] weights of one dtype.
fn few_plain(x: CubeTensor, weights: Vec<CubeTensor>) -> Vec<CubeTensor> {
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
fn few_grouped(x: CubeTensor, weights: Vec<(CubeTensor, CubeTensor)>, grouping: Grouping) -> Vec<CubeTensor> {
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

fn tile_cubes(rows: usize, outputs: usize) -> CubeCount {
    CubeCount::Static(
        outputs.div_ceil(TILE_OUTPUTS as usize) as u32,
        rows.div_ceil(TILE_ROWS as usize) as u32,
        1,
    )
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
    let mut outputs = places.first_outputs;
    let mut into = 0u32;
    if which == 0 {
        line = plain_line::<F, N>(x, first_weight, x_row, first, outputs, row_vectors);
    }
    if comptime!(count > 1) {
        if which == 1 {
            outputs = places.second_outputs;
            into = places.second;
            line = plain_line::<F, N>(x, second_weight, x_row, first, outputs, row_vectors);
        }
    }
    if comptime!(count > 2) {
        if which == 2 {
            outputs = places.third_outputs;
            into = places.third;
            line = plain_line::<F, N>(x, third_weight, x_row, first, outputs, row_vectors);
        }
    }
    write_line(line, out, into + row * outputs, first, outputs, plane);
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
    let mut outputs = places.first_outputs;
    let mut into = 0u32;
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
            outputs = places.second_outputs;
            into = places.second;
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
            outputs = places.third_outputs;
            into = places.third;
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
    write_line(line, out, into + row * outputs, first, outputs, plane);
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

#[cube(launch)]
fn plain_tiles<F: Float, V: Size>(
    x: &[Vector<f32, V>],
    weight: &[Vector<F, V>],
    out: &mut [f32],
    rows: u32,
    inputs: u32,
    outputs: u32,
    #[comptime] whole: bool,
    #[define(F)] _element: ElemType,
) {
    let mut x_tile = tile(TILE_ROWS);
    let mut weight_tile = tile(TILE_OUTPUTS);
    let (row, output) = (CUBE_POS_Y * TILE_ROWS, CUBE_POS_X * TILE_OUTPUTS);
    let mut sums = no_sums();
    let mut start = 0u32;
    while start < inputs {
        stage::<f32, V>(x, &mut x_tile, row, rows, start, inputs, TILE_ROWS, whole);
        stage::<F, V>(weight, &mut weight_tile, output, outputs, start, inputs, TILE_OUTPUTS, whole);
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
        stage::<f32, V>(x, &mut x_tile, CUBE_POS_Y * TILE_ROWS, rows, start, inputs, TILE_ROWS, whole);
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
fn stage<F: Float, V: Size>(
    matrix: &[Vector<F, V>],
    tile: &mut Shared<[Vector<f32, Const<4>>]>,
    first: u32,
    rows: u32,
    start: u32,
    inputs: u32,
    #[comptime] tile_rows: u32,
    #[comptime] whole: bool,
) {
    for turn in 0..comptime!(tile_rows * TILE_FOURS / TILE_THREADS) {
        let index = UNIT_POS + turn * TILE_THREADS;
        let (row, four) = (index / TILE_FOURS, index % TILE_FOURS);
        let at = start + four * 4;
        let mut values = Vector::<f32, Const<4>>::new(0.0f32);
        if first + row < rows && at < inputs {
            values = four_inputs::<F, V>(matrix, (first + row) * inputs, at, inputs, whole);
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
