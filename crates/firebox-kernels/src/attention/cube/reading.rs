//! Reads keys and values of spans, four numbers at a time.

use burn_cubecl::cubecl::{self, prelude::*};

use crate::cube::signed_bytes;

/// What four numbers of a row are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Reading {
    /// One vector of floats.
    Fours,
    /// Single floats, of which a row may have any number.
    Elements,
    /// A word of signed bytes.
    Bytes,
}

/// [`four`] of one of several spans, the same for all units of a cube.
#[cube]
pub(super) fn four_of<E: Numeric, N: Size>(
    first: &[Vector<E, N>],
    second: &[Vector<E, N>],
    third: &[Vector<E, N>],
    fourth: &[Vector<E, N>],
    which: u32,
    base: u32,
    quad: u32,
    width: u32,
    #[comptime] reading: Reading,
    #[comptime] several: bool,
) -> Vector<f32, Const<4>> {
    let mut numbers = Vector::<f32, Const<4>>::new(0.0f32);
    if comptime!(!several) || which == 0 {
        numbers = four::<E, N>(first, base, quad, width, reading);
    }
    if comptime!(several) {
        if which == 1 {
            numbers = four::<E, N>(second, base, quad, width, reading);
        } else if which == 2 {
            numbers = four::<E, N>(third, base, quad, width, reading);
        } else if which == 3 {
            numbers = four::<E, N>(fourth, base, quad, width, reading);
        }
    }
    numbers
}

/// Four numbers of the row at `base`; behind its end they are zero.
#[cube]
fn four<E: Numeric, N: Size>(
    stored: &[Vector<E, N>],
    base: u32,
    quad: u32,
    width: u32,
    #[comptime] reading: Reading,
) -> Vector<f32, Const<4>> {
    let mut numbers = Vector::<f32, Const<4>>::new(0.0f32);
    if comptime!(reading == Reading::Bytes) {
        let word = stored[(base + quad) as usize];
        numbers = signed_bytes(u32::cast_from(word.extract(0usize)));
    } else if comptime!(reading == Reading::Fours) {
        let piece = stored[(base / 4 + quad) as usize];
        #[unroll]
        for index in 0..4usize {
            numbers.insert(index, f32::cast_from(piece.extract(index)));
        }
    } else {
        #[unroll]
        for index in 0..4usize {
            let element = quad * 4 + index as u32;
            if element < width {
                let number = stored[(base + element) as usize];
                numbers.insert(index, f32::cast_from(number.extract(0usize)));
            }
        }
    }
    numbers
}
