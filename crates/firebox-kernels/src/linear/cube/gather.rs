//! Gathers rows of a weight as f32. One thread for each 32-bit word.

use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};
use burn_cubecl::kernel::{cast, into_contiguous};

use super::{is_packed, nibbles};
use crate::cube::{cubes, dims, element, integers, primitive, room, signed_bytes};
use crate::linear::{Grouping, NIBBLE_CHUNK};

/// Units of a cube.
const UNITS: u32 = 128;
/// Words of a chunk of nibbles.
const CHUNK_WORDS: u32 = (NIBBLE_CHUNK / 8) as u32;

/// See [`gather_grouped`](crate::linear::gather_grouped), for weights that are not tiled.
///
/// # Panics
/// If the tensors are not on an accelerator.
pub(in crate::linear) fn gather_grouped(
    words: Tensor<2, Int>,
    scales: Tensor<2>,
    grouping: Grouping,
    indices: Tensor<1, Int>,
) -> Tensor<2> {
    let (words, scales) = (into_contiguous(integers(words)), into_contiguous(primitive(scales)));
    let indices = into_contiguous(cast(integers(indices), words.dtype));
    let ([rows, row_words], [_, groups], [count]) = (dims(&words), dims(&scales), dims(&indices));
    let (client, out) = (scales.client.clone(), room(&scales, [count, grouping.inputs]));
    let all = count * row_words;
    if all > 0 && rows > 0 {
        let kind = element(&scales);
        gather_rows::launch(
            &client,
            cubes(all.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            words.into_buffer_arg(),
            scales.into_buffer_arg(),
            indices.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            all as u32,
            rows as u32,
            row_words as u32,
            groups as u32,
            grouping.inputs as u32,
            grouping.group as u32,
            grouping.four_bits,
            kind,
        );
    }
    Tensor::from_primitive::<CubeBackend>(out)
}

/// See [`gather`](crate::linear::gather).
///
/// # Panics
/// If the tensors are not on an accelerator.
pub(in crate::linear) fn gather(weight: Tensor<2>, indices: Tensor<1, Int>) -> Tensor<2> {
    let packed = into_contiguous(primitive(weight));
    if !is_packed(&packed) {
        let weight = Tensor::<2>::from_primitive::<CubeBackend>(packed);
        return weight.select(0, indices).cast(DType::F32);
    }
    let indices = into_contiguous(cast(integers(indices), DType::I32));
    let ([rows, inputs], [count]) = (dims(&packed), dims(&indices));
    let (client, out) = (packed.client.clone(), room(&packed, [count, inputs]));
    let all = count * inputs / 2;
    if all > 0 && rows > 0 {
        gather_halves::launch(
            &client,
            cubes(all.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            packed.into_buffer_arg(),
            indices.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            all as u32,
            rows as u32,
            (inputs / 2) as u32,
        );
    }
    Tensor::from_primitive::<CubeBackend>(out)
}

/// Gathers rows of bf16 numbers, two to a word.
#[cube(launch)]
fn gather_halves(words: &[u32], indices: &[u32], out: &mut [f32], all: u32, rows: u32, row_words: u32) {
    let at = CUBE_POS as u32 * UNITS + UNIT_POS;
    if at < all {
        let row = min(indices[(at / row_words) as usize], rows - 1);
        let word = words[(row * row_words + at % row_words) as usize];
        out[(2 * at) as usize] = f32::reinterpret(word << 16);
        out[(2 * at + 1) as usize] = f32::reinterpret(word & 0xFFFF_0000u32);
    }
}

#[cube(launch)]
fn gather_rows<S: Float>(
    words: &[u32],
    scales: &[S],
    indices: &[u32],
    out: &mut [f32],
    all: u32,
    rows: u32,
    row_words: u32,
    groups: u32,
    inputs: u32,
    group: u32,
    #[comptime] four_bits: bool,
    #[define(S)] _scale: ElemType,
) {
    let at = CUBE_POS as u32 * UNITS + UNIT_POS;
    if at < all {
        let (place, word) = (at / row_words, at % row_words);
        let row = min(indices[place as usize], rows - 1);
        let bits = words[(row * row_words + word) as usize];
        let start = place * inputs;
        if comptime!(four_bits) {
            let input = word / CHUNK_WORDS * comptime!(NIBBLE_CHUNK as u32) + word % CHUNK_WORDS * 4;
            let half = input + comptime!((NIBBLE_CHUNK / 2) as u32);
            write_four::<S>(nibbles(bits, 0u32), scales, out, row * groups, start, input, inputs, group);
            write_four::<S>(nibbles(bits, 4u32), scales, out, row * groups, start, half, inputs, group);
        } else {
            write_four::<S>(signed_bytes(bits), scales, out, row * groups, start, word * 4, inputs, group);
        }
    }
}

/// Writes up to four inputs, each multiplied by the scale of its group.
#[cube]
fn write_four<S: Float>(
    numbers: Vector<f32, Const<4>>,
    scales: &[S],
    out: &mut [f32],
    row_scales: u32,
    start: u32,
    input: u32,
    inputs: u32,
    group: u32,
) {
    #[unroll]
    for index in 0..4usize {
        let element = input + index as u32;
        if element < inputs {
            let scale = f32::cast_from(scales[(row_scales + element / group) as usize]);
            out[(start + element) as usize] = numbers.extract(index) * scale;
        }
    }
}
