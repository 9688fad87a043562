//! Gates on accelerators: a unit for up to four elements.

use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, prelude::*};

use super::GateOps;
use crate::activation::Activation;
use crate::cube::{INFINITE, cubes, dims, floats, magnitude, room, sigmoid, tanh, vector_size, zeroed};

/// Units of a cube.
const UNITS: u32 = 128;

impl GateOps for CubeBackend {
    fn gated(gate: FloatTensor<Self>, up: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self> {
        let (gate, up) = (floats(gate), floats(up));
        let [rows, width] = dims(&gate);
        assert_eq!(dims(&up), [rows, width], "gate and up differ in shape");
        if rows * width == 0 {
            return zeroed(&gate, [rows, width]);
        }
        let (client, out) = (gate.client.clone(), room(&gate, [rows, width]));
        let vector = vector_size(rows * width);
        let vectors = rows * width / vector;
        gated::launch(
            &client,
            cubes(vectors.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            gate.into_buffer_arg(),
            up.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            vectors as u32,
            activation,
        );
        out
    }

    fn gated_halves(both: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self> {
        let both = floats(both);
        let [rows, twice] = dims(&both);
        let width = twice / 2;
        if rows * width == 0 {
            return zeroed(&both, [rows, width]);
        }
        let (client, out) = (both.client.clone(), room(&both, [rows, width]));
        let vector = vector_size(width);
        let vectors = rows * width / vector;
        gated_halves::launch(
            &client,
            cubes(vectors.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            both.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            vectors as u32,
            (width / vector) as u32,
            activation,
        );
        out
    }
}

#[cube(launch)]
fn gated<N: Size>(
    gate: &[Vector<f32, N>],
    up: &[Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    vectors: u32,
    #[comptime] activation: Activation,
) {
    let at = CUBE_POS as u32 * UNITS + UNIT_POS;
    if at < vectors {
        out[at as usize] = active::<N>(gate[at as usize], activation) * up[at as usize];
    }
}

#[cube(launch)]
fn gated_halves<N: Size>(
    both: &[Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    vectors: u32,
    row_vectors: u32,
    #[comptime] activation: Activation,
) {
    let at = CUBE_POS as u32 * UNITS + UNIT_POS;
    if at < vectors {
        let gate = at / row_vectors * row_vectors + at;
        let up = both[(gate + row_vectors) as usize];
        out[at as usize] = active::<N>(both[gate as usize], activation) * up;
    }
}

#[cube]
fn active<N: Size>(x: Vector<f32, N>, #[comptime] activation: Activation) -> Vector<f32, N> {
    let mut active = x;
    #[unroll]
    for index in 0..N::value() {
        active.insert(index, curve(x.extract(index), activation));
    }
    active
}

/// The nonlinearity of one number.
#[cube]
pub(crate) fn curve(x: f32, #[comptime] activation: Activation) -> f32 {
    match comptime!(activation) {
        Activation::Silu => x * sigmoid(x),
        Activation::Gelu => {
            let error = Erf::erf(x * comptime!(std::f32::consts::FRAC_1_SQRT_2));
            0.5f32 * x * (1.0f32 + error)
        }
        Activation::GeluTanh => x * sigmoid(1.595_769f32 * (x + 0.044_715f32 * x * x * x)),
        Activation::GeluQuick => x * sigmoid(1.702f32 * x),
        Activation::Relu => positive(x),
        Activation::ReluSquared => positive(x) * positive(x),
        Activation::Tanh => tanh(x),
    }
}

#[cube]
fn positive(x: f32) -> f32 {
    let mut positive = x;
    // By its bits, because what is no number has to come through.
    if magnitude(x) <= INFINITE && x < 0.0f32 {
        positive = 0.0f32;
    }
    positive
}
