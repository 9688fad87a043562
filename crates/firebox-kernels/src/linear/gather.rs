//! Rows of a weight of small integers as f32 on the CPU, as for the embedding of each token: a dozen of
//! Burn's operations would add 60 µs to a step.

use burn::backend::Flex;
use burn::tensor::{Int, Tensor};
use half::f16;

use super::grouping::{Grouping, NIBBLE_CHUNK, RowIndices};
use crate::flex::{contiguous, dims, elements, tensor};

const ON_FLEX: &str = "words and scales are on one device";

/// Bytes of a chunk of nibbles: low nibbles are its first half, high nibbles its second.
const CHUNK_BYTES: usize = NIBBLE_CHUNK / 2;

/// See [`gather_grouped`](super::gather_grouped), for scales of f16.
///
/// # Panics
/// If words and scales are not on Flex, an index is out of range, or rows are shorter than `grouping` says.
pub(super) fn rows(
    words: Tensor<2, Int>,
    scales: Tensor<2>,
    grouping: Grouping,
    indices: Tensor<1, Int>,
) -> Tensor<2> {
    let words = contiguous(words.try_into_primitive::<Flex>().expect(ON_FLEX));
    let scales = contiguous(scales.try_into_primitive::<Flex>().expect(ON_FLEX));
    let ([rows, row_words], [scaled_rows, groups]) = (dims(&words), dims(&scales));
    assert_eq!(rows, scaled_rows, "as many rows of scales as of words");
    assert!(
        row_words >= grouping.row_words() && groups >= grouping.groups(),
        "rows of {row_words} words and {groups} scales for {grouping:?}"
    );
    let (words, scales): (&[u32], &[f16]) = (elements(&words), elements(&scales));
    let Grouping { inputs, group, four_bits, tiled } = grouping;
    let indices = indices.into_data();
    let count = indices.num_elements();
    let mut values = vec![0.0; count * inputs];
    let mut bytes = Vec::with_capacity(4 * row_words);
    let indices = indices.iter::<i64>().map(|index| index as usize);
    for (values, index) in values.chunks_exact_mut(inputs.max(1)).zip(indices) {
        assert!(index < rows, "row {index} of {rows}");
        let lies = if tiled { RowIndices::in_tile(index, rows) } else { RowIndices::contiguous(index) };
        bytes.clear();
        bytes.extend(lies.indices(row_words).flat_map(|place| words[place].to_le_bytes()));
        if four_bits {
            for (values, bytes) in values.chunks_mut(NIBBLE_CHUNK).zip(bytes.chunks(CHUNK_BYTES)) {
                let nibbles = bytes.iter().map(|byte| byte & 0xF).chain(bytes.iter().map(|byte| byte >> 4));
                for (value, nibble) in values.iter_mut().zip(nibbles) {
                    *value = f32::from(nibble) - 8.0;
                }
            }
        } else {
            for (value, byte) in values.iter_mut().zip(&bytes) {
                *value = f32::from(*byte as i8);
            }
        }
        for (values, place) in values.chunks_mut(group).zip(lies.indices(groups)) {
            let scale = f32::from(scales[place]);
            values.iter_mut().for_each(|value| *value *= scale);
        }
    }
    Tensor::from_primitive::<Flex>(tensor(values, [count, inputs]))
}
