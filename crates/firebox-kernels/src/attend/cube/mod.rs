//! Attention on accelerators.
//!
//! A cube takes some queries that share a key head (rows times the heads that share it) and goes through what
//! they see in blocks of as many positions as it has units. In a block every unit scores one key against all
//! queries, then the units share out the queries to find weights, then the elements of a head to gather
//! values. Highest scores and sums of weights are carried from block to block, so nothing is as long as the
//! span. Blocks are counted from the start of the span: what a row gathers does not depend on the rows beside
//! it, unless there are so few of them that the span is split among cubes and merged.

mod blocks;
mod parts;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::ir::{ElemType, UIntKind};
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::stored::Held;
use super::{AttendOps, Attending, Visibility, WIDEST_HEAD};
use crate::cube::{cubes, dims, element, floats, room};
use blocks::{How, Reading, SizesLaunch, StridesLaunch, UNITS, attend_blocks};
use parts::{merge_parts, quantize_rows};

/// Cubes below which a span is split, to have something to do for all of a device.
const FEW_CUBES: usize = 64;
/// Positions below which a part of a span is not worth a cube.
const SMALL_PART: usize = 512;

impl AttendOps for CubeBackend {
    fn attend_span(
        query: FloatTensor<Self>,
        keys: Held<Self>,
        values: Held<Self>,
        position: usize,
        visible: Option<Visibility>,
        attending: Attending,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let query = floats(query);
        let [rows, heads, head_dim] = dims(&query);
        let (keys, values) = (Side::new(keys, head_dim), Side::new(values, head_dim));
        let [kv_heads, positions, _] = dims(&keys.numbers);
        let sharing = heads / kv_heads;
        let client = query.client.clone();

        let queries = if head_dim <= WIDEST_HEAD / 2 { 8 } else { 4 };
        let groups = (rows * sharing).div_ceil(queries);
        let parts = (FEW_CUBES / (groups * kv_heads)).min(positions / SMALL_PART).max(1);
        let piece = positions.div_ceil(parts).next_multiple_of(UNITS as usize);
        let parts = positions.div_ceil(piece);

        let output = room(&query, [parts * rows, heads, head_dim]);
        let log_sum_exp = room(&query, [parts * rows, heads]);
        let masked = visible.is_some();
        let (bits, words) = match &visible {
            Some(visible) => uploaded(&query, visible),
            // Not looked at.
            None => (room(&query, [1]), 0),
        };
        // A row's own position, counted from the first key, and one.
        let reach = attending.position as i64 + 1 - position as i64;
        let window = attending.window.unwrap_or(usize::MAX).min(i32::MAX as usize / 2);
        attend_blocks::launch(
            &client,
            CubeCount::Static(groups as u32, kv_heads as u32, parts as u32),
            CubeDim::new_1d(UNITS),
            keys.vector,
            values.vector,
            query.into_buffer_arg(),
            keys.numbers.into_buffer_arg(),
            keys.scales.into_buffer_arg(),
            values.numbers.into_buffer_arg(),
            values.scales.into_buffer_arg(),
            bits.into_buffer_arg(),
            output.clone().into_buffer_arg(),
            log_sum_exp.clone().into_buffer_arg(),
            keys.strides,
            values.strides,
            SizesLaunch::new(
                rows as u32,
                sharing as u32,
                head_dim as u32,
                positions as u32,
                piece as u32,
                words as u32,
            ),
            reach.clamp(i64::from(i32::MIN / 4), i64::from(i32::MAX / 4)) as i32,
            window as i32,
            attending.scale,
            attending.softcap.unwrap_or(1.0),
            f32::NEG_INFINITY,
            How {
                queries,
                columns: head_dim.div_ceil(4).next_power_of_two() as u32,
                keys: keys.reading,
                values: values.reading,
                masked,
                capped: attending.softcap.is_some(),
            },
            keys.element,
            values.element,
        );
        if parts == 1 { (output, log_sum_exp) } else { Self::merge(output, log_sum_exp, rows) }
    }

    fn merge(
        outputs: FloatTensor<Self>,
        log_sum_exps: FloatTensor<Self>,
        rows: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (outputs, sums) = (floats(outputs), floats(log_sum_exps));
        let [part_rows, heads, head_dim] = dims(&outputs);
        let [sum_rows, _] = dims(&sums);
        let (merged, merged_sums) = (room(&outputs, [rows, heads, head_dim]), room(&outputs, [rows, heads]));
        let elements = rows * heads * head_dim;
        merge_parts::launch(
            &outputs.client.clone(),
            cubes(elements.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            outputs.into_buffer_arg(),
            sums.into_buffer_arg(),
            merged.clone().into_buffer_arg(),
            merged_sums.clone().into_buffer_arg(),
            elements as u32,
            head_dim as u32,
            (part_rows / rows) as u32,
            (sum_rows / rows) as u32,
            f32::NEG_INFINITY,
        );
        (merged, merged_sums)
    }

    fn quantize(values: FloatTensor<Self>) -> (IntTensor<Self>, FloatTensor<Self>) {
        let values = floats(values);
        let [kv_heads, positions, head_dim] = dims(&values);
        let row_words = head_dim.div_ceil(4);
        let words = empty_device_contiguous_dtype(
            values.client.clone(),
            values.device.clone(),
            Shape::new([kv_heads, positions, row_words]),
            DType::I32,
        );
        let scales = room(&values, [kv_heads, positions]);
        let rows = kv_heads * positions;
        quantize_rows::launch(
            &values.client.clone(),
            cubes(rows.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            values.into_buffer_arg(),
            words.clone().into_buffer_arg(),
            scales.clone().into_buffer_arg(),
            rows as u32,
            head_dim as u32,
        );
        (words, scales)
    }
}

/// The bits beside `like`, and how many words they are.
fn uploaded(like: &CubeTensor, visible: &Visibility) -> (CubeTensor, usize) {
    let words: Vec<u32> =
        visible.words().iter().flat_map(|word| [*word as u32, (*word >> 32) as u32]).collect();
    if words.is_empty() {
        return (room(like, [1]), 0);
    }
    let (client, count) = (like.client.clone(), words.len());
    let handle = client.create_from_slice(bytemuck::cast_slice(&words));
    let shape = Shape::new([count]);
    (CubeTensor::new_contiguous(client, like.device.clone(), shape, handle, DType::U32), count)
}

/// Keys or values, and how to read them.
struct Side {
    numbers: CubeTensor,
    /// Anything where the numbers are floats.
    scales: CubeTensor,
    strides: StridesLaunch,
    reading: Reading,
    vector: VectorSize,
    element: ElemType,
}

impl Side {
    fn new(held: Held<CubeBackend>, head_dim: usize) -> Self {
        // Steps between heads and positions are free, those between elements are not.
        let rows = |tensor: CubeTensor| match tensor.meta.strides()[2] {
            1 => tensor,
            _ => into_contiguous(tensor),
        };
        let steps = |tensor: &CubeTensor| (tensor.meta.strides()[0], tensor.meta.strides()[1]);
        match held {
            Held::Float(numbers) => {
                let numbers = rows(numbers);
                let (head, position) = steps(&numbers);
                let whole = [head_dim, head, position].iter().all(|length| length.is_multiple_of(4));
                Self {
                    scales: room(&numbers, [1]),
                    strides: StridesLaunch::new(head as u32, position as u32, 0, 0),
                    reading: if whole { Reading::Fours } else { Reading::Elements },
                    vector: if whole { 4 } else { 1 },
                    element: element(&numbers),
                    numbers,
                }
            }
            Held::Bytes { words, scales } => {
                let words = rows(words);
                let ((head, position), (scale_head, scale_position)) = (steps(&words), steps(&scales));
                Self {
                    numbers: words,
                    scales,
                    strides: StridesLaunch::new(
                        head as u32,
                        position as u32,
                        scale_head as u32,
                        scale_position as u32,
                    ),
                    reading: Reading::Bytes,
                    vector: 1,
                    element: ElemType::UInt(UIntKind::U32),
                }
            }
        }
    }
}
