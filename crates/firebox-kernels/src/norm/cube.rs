//! The norm on accelerators: a cube per row.

use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, prelude::*};

use super::NormOps;
use crate::cube::{cubes, dims, floats, plane_size, room, sum_line, sum_vector, vector_size, zeroed};

/// Units of a cube.
const UNITS: u32 = 128;

impl NormOps for CubeBackend {
    fn rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        offset: f32,
    ) -> FloatTensor<Self> {
        let (x, weight) = (floats(x), floats(weight));
        let [rows, width] = dims(&x);
        if rows * width == 0 {
            return zeroed(&x, [rows, width]);
        }
        let (client, out) = (x.client.clone(), room(&x, [rows, width]));
        let vector = vector_size(width);
        rms_norm::launch(
            &client,
            cubes(rows),
            CubeDim::new_1d(UNITS),
            vector,
            x.into_buffer_arg(),
            weight.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            rows as u32,
            (width / vector) as u32,
            width as f32,
            epsilon as f32,
            offset,
            plane_size(&client),
        );
        out
    }

    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        offset: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [x, residual, weight] = [x, residual, weight].map(floats);
        let [rows, width] = dims(&x);
        assert_eq!(dims(&residual), [rows, width], "what is added differs in shape");
        if rows * width == 0 {
            return (zeroed(&x, [rows, width]), zeroed(&x, [rows, width]));
        }
        let (client, sum, out) = (x.client.clone(), room(&x, [rows, width]), room(&x, [rows, width]));
        let vector = vector_size(width);
        add_rms_norm::launch(
            &client,
            cubes(rows),
            CubeDim::new_1d(UNITS),
            vector,
            x.into_buffer_arg(),
            residual.into_buffer_arg(),
            weight.into_buffer_arg(),
            sum.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            rows as u32,
            (width / vector) as u32,
            width as f32,
            epsilon as f32,
            offset,
            plane_size(&client),
        );
        (sum, out)
    }
}

#[cube(launch)]
fn rms_norm<N: Size>(
    x: &[Vector<f32, N>],
    weight: &[Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    rows: u32,
    row_vectors: u32,
    width: f32,
    epsilon: f32,
    offset: f32,
    #[comptime] plane: u32,
) {
    // Cubes beyond the rows go through the last one again, so that all units meet at the sum.
    let row = min(CUBE_POS as u32, rows - 1) * row_vectors;
    let mut squares = Vector::<f32, N>::new(0.0f32);
    let mut at = UNIT_POS_X;
    while at < row_vectors {
        let values = x[(row + at) as usize];
        squares += values * values;
        at += UNITS;
    }
    let divisor = Vector::<f32, N>::new(root_mean_square::<N>(squares, width, epsilon, UNITS, 1u32, plane));
    if (CUBE_POS as u32) < rows {
        let mut at = UNIT_POS_X;
        while at < row_vectors {
            let factor = weight[at as usize] + Vector::new(offset);
            out[(row + at) as usize] = x[(row + at) as usize] / divisor * factor;
            at += UNITS;
        }
    }
}

#[cube(launch)]
fn add_rms_norm<N: Size>(
    x: &[Vector<f32, N>],
    residual: &[Vector<f32, N>],
    weight: &[Vector<f32, N>],
    sum: &mut [Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    rows: u32,
    row_vectors: u32,
    width: f32,
    epsilon: f32,
    offset: f32,
    #[comptime] plane: u32,
) {
    // As above; the last row may be written more than once, every time the same.
    let row = min(CUBE_POS as u32, rows - 1) * row_vectors;
    let mut squares = Vector::<f32, N>::new(0.0f32);
    let mut at = UNIT_POS_X;
    while at < row_vectors {
        let values = x[(row + at) as usize] + residual[(row + at) as usize];
        sum[(row + at) as usize] = values;
        squares += values * values;
        at += UNITS;
    }
    let divisor = Vector::<f32, N>::new(root_mean_square::<N>(squares, width, epsilon, UNITS, 1u32, plane));
    let mut at = UNIT_POS_X;
    while at < row_vectors {
        let factor = weight[at as usize] + Vector::new(offset);
        // What this unit has written itself.
        out[(row + at) as usize] = sum[(row + at) as usize] / divisor * factor;
        at += UNITS;
    }
}

/// From the sums of squares that the units of a line have, `lanes` to each of the cube's `lines`.
#[cube]
pub(crate) fn root_mean_square<N: Size>(
    squares: Vector<f32, N>,
    width: f32,
    epsilon: f32,
    #[comptime] lanes: u32,
    #[comptime] lines: u32,
    #[comptime] plane: u32,
) -> f32 {
    let mut scratch = Shared::<[Vector<f32, Const<1>>]>::new_slice(comptime!((lanes * lines) as usize));
    let sum = sum_line::<Const<1>>(Vector::new(sum_vector::<N>(squares)), &mut scratch, lanes, plane);
    (sum.extract(0usize) / width + epsilon).sqrt()
}
