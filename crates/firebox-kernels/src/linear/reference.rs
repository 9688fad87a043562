//! Reference implementation in Burn's operations, for devices without a native version and for the tests.

use burn::tensor::kind::Basic;
use burn::tensor::{DType, Int, Tensor};

use super::grouping::{Grouping, NIBBLE_CHUNK, RowIndices, TILE_ROWS};

/// See [`multiply`](super::multiply).
pub fn multiply(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    x.matmul(weight.cast(DType::F32).transpose())
}

/// See [`multiply_grouped`](super::multiply_grouped).
pub fn multiply_grouped(
    x: Tensor<2>,
    words: Tensor<2, Int>,
    scales: Tensor<2>,
    grouping: Grouping,
) -> Tensor<2> {
    x.matmul(dequantize(words, scales, grouping).transpose())
}

/// Decodes rows of words and their scales to `[rows, inputs]` in f32.
pub fn dequantize(words: Tensor<2, Int>, scales: Tensor<2>, grouping: Grouping) -> Tensor<2> {
    let (words, scales, Grouping { inputs, group, four_bits, .. }) = in_rows(words, scales, grouping);
    let [rows, word_count] = words.dims();
    let bytes = (0..4)
        .map(|byte| words.clone().bitwise_right_shift_scalar(8 * byte).bitwise_and_scalar(0xFF))
        .collect();
    let bytes = Tensor::stack::<3>(bytes, 2).reshape([rows, word_count * 4]);
    let integers = if four_bits {
        let half = NIBBLE_CHUNK / 2;
        let chunks = word_count * 4 / half;
        let bytes = bytes.reshape([rows, chunks, half]);
        let low = bytes.clone().bitwise_and_scalar(0x0F);
        let high = bytes.bitwise_right_shift_scalar(4);
        Tensor::cat(vec![low, high], 2).reshape([rows, chunks * NIBBLE_CHUNK]).sub_scalar(8)
    } else {
        bytes.bitwise_xor_scalar(0x80).sub_scalar(0x80)
    };
    let groups = scales.dims()[1];
    // The last group may be shorter, so the scales are expanded in full and then cut.
    let scales = scales
        .cast(DType::F32)
        .reshape([rows, groups, 1])
        .expand([rows, groups, group])
        .reshape([rows, groups * group])
        .narrow(1, 0, inputs);
    integers.narrow(1, 0, inputs).float().cast(DType::F32).mul(scales)
}

/// Returns a weight of small integers with contiguous rows, the layout of accelerators.
pub fn in_rows(
    words: Tensor<2, Int>,
    scales: Tensor<2>,
    grouping: Grouping,
) -> (Tensor<2, Int>, Tensor<2>, Grouping) {
    if !grouping.tiled {
        return (words, scales, grouping);
    }
    (untile(words), untile(scales), Grouping { tiled: false, ..grouping })
}

/// Converts [tiles](Grouping::tiled) to contiguous rows.
fn untile<K: Basic>(tiles: Tensor<2, K>) -> Tensor<2, K> {
    let [rows, width] = tiles.dims();
    let whole = rows - rows % TILE_ROWS;
    let turned = |from: usize, rows: usize, of_tile: usize| {
        let tiles = tiles.clone().narrow(0, from, rows).reshape([rows / of_tile, width, of_tile]);
        tiles.swap_dims(1, 2).reshape([rows, width])
    };
    let mut parts = Vec::new();
    if whole > 0 {
        parts.push(turned(0, whole, TILE_ROWS));
    }
    if rows > whole {
        parts.push(turned(whole, rows - whole, rows - whole));
    }
    if parts.is_empty() { tiles } else { Tensor::cat(parts, 0) }
}

/// Returns some rows of tiles as contiguous rows.
pub fn rows_of_tiles<K: Basic>(tiles: Tensor<2, K>, indices: &[usize]) -> Tensor<2, K> {
    let [rows, width] = tiles.dims();
    let mut places = Vec::with_capacity(indices.len() * width);
    for &index in indices {
        places.extend(RowIndices::in_tile(index, rows).indices(width).map(|place| place as i64));
    }
    let places = Tensor::<1, Int>::from_data(places.as_slice(), &tiles.device());
    tiles.reshape([rows * width]).select(0, places).reshape([indices.len(), width])
}
