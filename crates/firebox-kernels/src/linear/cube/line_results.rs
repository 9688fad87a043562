//! What lines of units make of their sums: fused steps behind a product.

use burn_cubecl::cubecl::{self, prelude::*};

use crate::activation::Activation;
use crate::gate::cube::curve;

/// The size of lines and of what they compute. Bits of results depend on `lanes` alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct LineShape {
    /// Units of a line, which share a row of the weight.
    pub lanes: u32,
    /// Lines of a cube.
    pub lines: u32,
    /// Rows of a group.
    pub rows: u32,
    /// Pieces of each output that a unit loads before it uses them; lanes times steps divide the pieces of a row, or it is one.
    pub steps: u32,
    /// See [`plane_size`](crate::cube::plane_size).
    pub plane: u32,
}

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

/// The parameters of a norm.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct NormNumbers {
    pub width: f32,
    pub epsilon: f32,
    pub offset: f32,
}

/// Replaces what the units of a line have of every row by the sum, for all of them. The order does not depend on the
/// number of rows or outputs.
#[cube]
fn sum_lines<P: Size>(shares: &mut Array<Vector<f32, P>>, #[comptime] shape: LineShape) {
    let rows = comptime!(shape.rows as usize);
    let lanes = comptime!(shape.lanes);
    let plane = comptime!(shape.plane);
    if comptime!(plane > 1 && lanes.is_multiple_of(plane)) {
        #[unroll]
        for row in 0..rows {
            shares[row] = plane_sum(shares[row]);
        }
        if comptime!(lanes > plane) {
            let planes = comptime!(lanes / plane);
            let mut scratch = Shared::<[Vector<f32, P>]>::new_slice(comptime!(
                (shape.lines * planes * shape.rows) as usize
            ));
            let first = UNIT_POS_Y * comptime!(planes * shape.rows);
            if UNIT_POS_X.is_multiple_of(plane) {
                #[unroll]
                for row in 0..rows {
                    let to = first + UNIT_POS_X / plane * comptime!(shape.rows) + row as u32;
                    scratch[to as usize] = shares[row];
                }
            }
            sync_cube();
            #[unroll]
            for row in 0..rows {
                let mut sum = scratch[(first + row as u32) as usize];
                #[unroll]
                for index in 1..planes {
                    sum += scratch[(first + index * comptime!(shape.rows) + row as u32) as usize];
                }
                shares[row] = sum;
            }
        }
    } else {
        let mut scratch = Shared::<[Vector<f32, P>]>::new_slice(comptime!((lanes * shape.lines) as usize));
        let line = UNIT_POS_Y * lanes;
        #[unroll]
        for row in 0..rows {
            scratch[(line + UNIT_POS_X) as usize] = shares[row];
            sync_cube();
            let mut half = comptime!(lanes / 2).runtime();
            while half > 0 {
                if UNIT_POS_X < half {
                    let other = scratch[(line + UNIT_POS_X + half) as usize];
                    scratch[(line + UNIT_POS_X) as usize] += other;
                }
                sync_cube();
                half /= 2;
            }
            shares[row] = scratch[line as usize];
            sync_cube();
        }
    }
}

/// The element of a row that is the unit's number in its line.
#[cube]
fn of_unit<P: Size>(all: &mut Array<Vector<f32, P>>, #[comptime] rows: usize) -> Vector<f32, P> {
    let mut own = all[0usize];
    #[unroll]
    for row in 1..rows {
        if UNIT_POS_X == row as u32 {
            own = all[row];
        }
    }
    own
}

/// Sums the shares of a line's units and writes its outputs: divided by the norm, behind the gate with the second products
/// `others`, and after the addition. A unit writes a row.
#[cube]
pub(super) fn write_lines<P: Size>(
    sums: &mut Array<Vector<f32, P>>,
    others: &mut Array<Vector<f32, P>>,
    squares: &mut Array<Vector<f32, Const<1>>>,
    added: &[f32],
    out: &mut [f32],
    norm: NormNumbers,
    start: u32,
    first_row: u32,
    rows: u32,
    first: u32,
    outputs: u32,
    #[comptime] fusion: Fusion,
    #[comptime] shape: LineShape,
) {
    let of_group = comptime!(shape.rows as usize);
    sum_lines::<P>(sums, shape);
    let mut line = of_unit::<P>(sums, of_group);
    let mut other = Vector::<f32, P>::new(0.0f32);
    if comptime!(fusion.gated.is_some()) {
        sum_lines::<P>(others, shape);
        other = of_unit::<P>(others, of_group);
    }
    if comptime!(fusion.normed) {
        sum_lines::<Const<1>>(squares, shape);
        let square = of_unit::<Const<1>>(squares, of_group).extract(0usize);
        let root = Vector::<f32, P>::new((square / norm.width + norm.epsilon).sqrt());
        line = line / root;
        other = other / root;
    }
    let row = first_row + UNIT_POS_X;
    if UNIT_POS_X < comptime!(shape.rows) && row < rows {
        #[unroll]
        for index in 0..P::value() {
            let output = first + index as u32;
            if output < outputs {
                let at = (start + row * outputs + output) as usize;
                let mut number = line.extract(index);
                if comptime!(fusion.gated.is_some()) {
                    number = gate_of(number, fusion) * other.extract(index);
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
