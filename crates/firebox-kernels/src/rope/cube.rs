//! Rotation on accelerators: a unit per element.

use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, prelude::*};
use burn_cubecl::tensor::CubeTensor;

use super::RopeOps;
use crate::cube::{cubes, dims, floats, room};

/// Units of a cube.
const UNITS: u32 = 128;

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
