//! Rotation on accelerators: a unit per element.

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, prelude::*};
use burn_cubecl::tensor::CubeTensor;

use super::RopeOps;
use crate::cube::{cubes, dims, floats, plane_size, primitive, room};
use crate::norm::cube::root_mean_square;

/// Units of a cube.
const UNITS: u32 = 128;
/// Units that go along a head together if it is normalised first.
const LANES: u32 = 32;
/// Heads of a cube.
const LINES: u32 = UNITS / LANES;

impl RopeOps for CubeBackend {
    fn rotate(
        heads: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        interleaved: bool,
    ) -> FloatTensor<Self> {
        let [_, _, pairs] = dims(&cos);
        turned(heads, cos, sin, pairs, pairs, interleaved)
    }

    fn rotate_by(
        keys: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        interleaved: bool,
    ) -> FloatTensor<Self> {
        let [pairs] = dims(&cos);
        turned(keys, cos, sin, pairs, 0, interleaved)
    }
}

/// Rotates by angles of which those of a row lie `apart` from those of the row before.
fn turned(
    heads: CubeTensor,
    cos: CubeTensor,
    sin: CubeTensor,
    pairs: usize,
    apart: usize,
    interleaved: bool,
) -> CubeTensor {
    let (heads, cos, sin) = (floats(heads), floats(cos), floats(sin));
    let [rows, count, head_dim] = dims(&heads);
    let elements = rows * count * head_dim;
    if elements == 0 || pairs == 0 {
        return heads;
    }
    let (client, out) = (heads.client.clone(), room(&heads, [rows, count, head_dim]));
    rotate::launch(
        &client,
        cubes(elements.div_ceil(UNITS as usize)),
        CubeDim::new_1d(UNITS),
        heads.into_buffer_arg(),
        cos.into_buffer_arg(),
        sin.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        elements as u32,
        (count * head_dim) as u32,
        head_dim as u32,
        pairs as u32,
        apart as u32,
        interleaved,
    );
    out
}

/// See [`rotate_normed`](super::rotate_normed). There is at least one element.
///
/// # Panics
/// If the tensors are not on an accelerator.
pub(super) fn rotate_normed(
    heads: Tensor<3>,
    weight: Tensor<1>,
    epsilon: f64,
    offset: f32,
    angles: [Tensor<3>; 2],
    interleaved: bool,
) -> Tensor<3> {
    let (heads, weight) = (floats(primitive(heads)), floats(primitive(weight)));
    let [cos, sin] = angles.map(|angles| floats(primitive(angles)));
    let ([rows, count, head_dim], [_, _, pairs]) = (dims(&heads), dims(&cos));
    let (client, out) = (heads.client.clone(), room(&heads, [rows, count, head_dim]));
    // Not looked at where nothing is turned, but there has to be something to bind.
    let [cos, sin] = if pairs == 0 { [heads.clone(), heads.clone()] } else { [cos, sin] };
    turn_normed::launch(
        &client,
        cubes((rows * count).div_ceil(LINES as usize)),
        CubeDim::new_2d(LANES, LINES),
        heads.into_buffer_arg(),
        weight.into_buffer_arg(),
        cos.into_buffer_arg(),
        sin.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        (rows * count) as u32,
        count as u32,
        head_dim as u32,
        pairs as u32,
        epsilon as f32,
        offset,
        interleaved,
        plane_size(&client),
    );
    Tensor::from_primitive::<CubeBackend>(out)
}

/// A line for every head.
#[cube(launch)]
fn turn_normed(
    heads: &[f32],
    weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    out: &mut [f32],
    all: u32,
    count: u32,
    head_dim: u32,
    pairs: u32,
    epsilon: f32,
    offset: f32,
    #[comptime] interleaved: bool,
    #[comptime] plane: u32,
) {
    // Lines beyond the last head go through it again, so that all units meet at the sum; they write the same.
    let head = min(CUBE_POS as u32 * LINES + UNIT_POS_Y, all - 1);
    let start = head * head_dim;
    let mut squares = 0.0f32;
    let mut at = UNIT_POS_X;
    while at < head_dim {
        let value = heads[(start + at) as usize];
        squares += value * value;
        at += LANES;
    }
    let squares = Vector::<f32, Const<1>>::new(squares);
    let width = f32::cast_from(head_dim);
    let divisor = root_mean_square::<Const<1>>(squares, width, epsilon, LANES, LINES, plane);
    let mut at = UNIT_POS_X;
    while at < head_dim {
        let value = heads[(start + at) as usize] / divisor * (weight[at as usize] + offset);
        if at < 2 * pairs {
            let second = if comptime!(interleaved) { at % 2 == 1 } else { at >= pairs };
            let pair = if comptime!(interleaved) { at / 2 } else { at % pairs };
            let apart = if comptime!(interleaved) { 1u32.runtime() } else { pairs };
            let angle = (head / count * pairs + pair) as usize;
            let mut other = at + apart;
            if second {
                other = at - apart;
            }
            let beside = heads[(start + other) as usize] / divisor * (weight[other as usize] + offset);
            let turned = beside * sin[angle];
            if second {
                out[(start + at) as usize] = value * cos[angle] + turned;
            } else {
                out[(start + at) as usize] = value * cos[angle] - turned;
            }
        } else {
            out[(start + at) as usize] = value;
        }
        at += LANES;
    }
}

#[cube(launch)]
fn rotate(
    heads: &[f32],
    cos: &[f32],
    sin: &[f32],
    out: &mut [f32],
    elements: u32,
    row_elements: u32,
    head_dim: u32,
    pairs: u32,
    apart: u32,
    #[comptime] interleaved: bool,
) {
    let at = CUBE_POS as u32 * UNITS + UNIT_POS_X;
    if at < elements {
        let value = heads[at as usize];
        let element = at % head_dim;
        if element < 2 * pairs {
            let second = if comptime!(interleaved) { element % 2 == 1 } else { element >= pairs };
            let pair = if comptime!(interleaved) { element / 2 } else { element % pairs };
            let other = if comptime!(interleaved) { 1u32.runtime() } else { pairs };
            let angle = (at / row_elements * apart + pair) as usize;
            if second {
                out[at as usize] = value * cos[angle] + heads[(at - other) as usize] * sin[angle];
            } else {
                out[at as usize] = value * cos[angle] - heads[(at + other) as usize] * sin[angle];
            }
        } else {
            out[at as usize] = value;
        }
    }
}
