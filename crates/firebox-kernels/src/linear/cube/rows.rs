//! Products of few rows, with fused steps before and after them.

use burn::tensor::{DType, Shape};
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::tensor::CubeTensor;

use super::line_results::{Fusion, LineShape, NormNumbersLaunch};
use super::lines::{PlacesLaunch, grouped_rows, plain_rows};
use super::{is_packed, stored};
use crate::activation::Activation;
use crate::cube::{MOST_CUBES, dims, element, plane_size, room, vector_size};
use crate::linear::Grouping;

/// Weights of one launch at most.
pub(super) const TOGETHER: usize = 3;
/// Buffers of a launch: activations, words and scales of three weights, a norm, an addend, results.
const BINDINGS: u32 = 10;
/// Products of a line with a row at most; they share every load of `x`.
const PER_LINE: usize = 4;
/// Units below which lines have fewer outputs, so that a large device is not left idle.
const FEW_UNITS: usize = 32_768;
/// Units of a cube at least.
const CUBE_UNITS: usize = 64;
/// Units of the shortest and longest lines.
const LANES: (usize, usize) = (32, 128);
/// Pieces of a row that each unit of a longer line still has. With fewer, adding their sums takes longer than the products.
const LEAST_PIECES: usize = 3;
/// Rows of the largest group: their sums fit registers.
const GROUP_ROWS: usize = 8;

/// The operands of steps that are fused with products.
#[derive(Clone, Default)]
pub(super) struct FusedOps {
    /// The norm of the rows: its weight, epsilon, and the offset of the weight.
    pub norm: Option<(CubeTensor, f32, f32)>,
    /// See [`Fusion::gated`].
    pub gated: Option<Activation>,
    /// `[rows, outputs]`
    pub added: Option<CubeTensor>,
}

/// Returns whether a device binds enough buffers for fused steps.
pub(super) fn supports_fusion(client: &Client) -> bool {
    client.properties().hardware.max_bindings >= BINDINGS
}

impl FusedOps {
    fn fusion(&self) -> Fusion {
        Fusion { normed: self.norm.is_some(), gated: self.gated, added: self.added.is_some() }
    }

    /// Weight and parameters of the norm. Without a norm, `x` fills the binding of the weight, which is not read.
    fn norm(&self, x: &CubeTensor, inputs: usize) -> (CubeTensor, NormNumbersLaunch) {
        let (weight, epsilon, offset) = self.norm.clone().unwrap_or((x.clone(), 0.0, 0.0));
        (weight, NormNumbersLaunch::new(inputs as f32, epsilon, offset))
    }

    fn added(&self, x: &CubeTensor) -> CubeTensor {
        self.added.clone().unwrap_or_else(|| x.clone())
    }

    /// The number of outputs of every result.
    fn results(&self, outputs: &[usize]) -> Vec<usize> {
        if self.gated.is_some() { vec![outputs[0]] } else { outputs.to_vec() }
    }
}

/// The products of few rows with up to [`TOGETHER`] weights of one dtype.
pub(super) fn plain(x: CubeTensor, weights: Vec<CubeTensor>, fused: &FusedOps) -> Vec<CubeTensor> {
    let [rows, inputs] = dims(&x);
    let outputs: Vec<usize> = weights.iter().map(|weight| dims::<2>(weight)[0]).collect();
    let results = fused.results(&outputs);
    let (products, out, places) = beside_each_other(&x, rows, &results);
    let (client, vector, weight_element) = (x.client.clone(), vector_size(inputs), stored(&weights[0]));
    let packed = is_packed(&weights[0]);
    let shape = line_shape(&client, rows, inputs / vector);
    let per_line = per_line(shape, &outputs, fused);
    let (norm_weight, norm) = fused.norm(&x, inputs);
    let [first, second, third] = three(weights);
    plain_rows::launch(
        &client,
        row_cubes(rows, &results, shape, per_line),
        CubeDim::new_2d(shape.lanes, shape.lines),
        vector,
        if packed { vector / 2 } else { vector },
        per_line,
        x.clone().into_buffer_arg(),
        first.into_buffer_arg(),
        second.into_buffer_arg(),
        third.into_buffer_arg(),
        norm_weight.into_buffer_arg(),
        fused.added(&x).into_buffer_arg(),
        out.into_buffer_arg(),
        places,
        norm,
        rows as u32,
        (inputs / vector) as u32,
        outputs.len() as u32,
        packed,
        fused.fusion(),
        shape,
        weight_element,
    );
    products
}

/// The products of few rows with up to [`TOGETHER`] weights of one layout: their words and scales.
pub(super) fn grouped(
    x: CubeTensor,
    weights: Vec<(CubeTensor, CubeTensor)>,
    grouping: Grouping,
    fused: &FusedOps,
) -> Vec<CubeTensor> {
    let Grouping { inputs, group, four_bits, .. } = grouping;
    let [rows, _] = dims(&x);
    let ([_, row_words], [_, groups]) = (dims(&weights[0].0), dims(&weights[0].1));
    let outputs: Vec<usize> = weights.iter().map(|(words, _)| dims::<2>(words)[0]).collect();
    let results = fused.results(&outputs);
    let (products, out, places) = beside_each_other(&x, rows, &results);
    let (client, scale_element) = (x.client.clone(), element(&weights[0].1));
    let per_word = if four_bits { 8 } else { 4 };
    // Whether rows of `x` end where their words do and so can be read four inputs at a time.
    let whole = inputs == row_words * per_word;
    let shape = line_shape(&client, rows, row_words);
    let per_line = per_line(shape, &outputs, fused);
    let (norm_weight, norm) = fused.norm(&x, inputs);
    let [first, second, third] = three(weights);
    grouped_rows::launch(
        &client,
        row_cubes(rows, &results, shape, per_line),
        CubeDim::new_2d(shape.lanes, shape.lines),
        if whole { 4 } else { 1 },
        per_line,
        x.clone().into_buffer_arg(),
        first.0.into_buffer_arg(),
        second.0.into_buffer_arg(),
        third.0.into_buffer_arg(),
        first.1.into_buffer_arg(),
        second.1.into_buffer_arg(),
        third.1.into_buffer_arg(),
        norm_weight.into_buffer_arg(),
        fused.added(&x).into_buffer_arg(),
        out.into_buffer_arg(),
        places,
        norm,
        rows as u32,
        inputs as u32,
        row_words as u32,
        groups as u32,
        outputs.len() as u32,
        (group / per_word) as u32,
        four_bits,
        whole,
        fused.fusion(),
        shape,
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

/// The groups of rows and the weights of the same outputs beside each other, so that groups find a weight in the cache. Down and
/// back for the outputs, of which vocabularies have more than fit in one direction.
fn row_cubes(rows: usize, outputs: &[usize], shape: LineShape, per_line: usize) -> CubeCount {
    let most = outputs.iter().copied().max().unwrap_or(0);
    let cubes = most.div_ceil(per_line * shape.lines as usize);
    let down = cubes.min(MOST_CUBES as usize);
    let groups = rows.div_ceil(shape.rows as usize);
    CubeCount::Static((groups * outputs.len()) as u32, down as u32, cubes.div_ceil(down) as u32)
}

/// The lines for rows of weights of so many pieces. Their units depend on the pieces alone.
fn line_shape(client: &Client, rows: usize, pieces: usize) -> LineShape {
    let mut lanes = LANES.0;
    while lanes < LANES.1 && pieces >= 2 * lanes * LEAST_PIECES {
        lanes *= 2;
    }
    let rows = rows.next_power_of_two().min(GROUP_ROWS);
    // More would not fit registers.
    let most_steps = if rows < GROUP_ROWS { 4 } else { 2 };
    let steps = (1..=most_steps).rev().find(|steps| pieces.is_multiple_of(lanes * steps)).unwrap_or(1);
    LineShape {
        lanes: lanes as u32,
        lines: CUBE_UNITS.div_ceil(lanes) as u32,
        rows: rows as u32,
        steps: steps as u32,
        plane: plane_size(client),
    }
}

/// Outputs of a line. The bits of an output do not depend on it.
fn per_line(shape: LineShape, outputs: &[usize], fused: &FusedOps) -> usize {
    let results: usize = fused.results(outputs).iter().sum();
    let mut per_line = if fused.gated.is_some() { PER_LINE / 2 } else { PER_LINE };
    // Several rows share a weight that is unpacked, and several outputs a row that is loaded.
    let least = shape.rows.min(2) as usize;
    while per_line > least && results / per_line * (shape.lanes as usize) < FEW_UNITS {
        per_line /= 2;
    }
    per_line
}
