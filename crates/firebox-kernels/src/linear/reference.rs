//! What the operations mean, in Burn's own. Runs wherever there is no version for the device, differentiable
//! where the device is, and is what tests compare with.

use burn::tensor::{DType, Int, Tensor};

use super::{Grouping, NIBBLE_CHUNK};

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

/// The numbers that rows of words and their scales stand for: `[rows, inputs]` in f32.
pub fn dequantize(words: Tensor<2, Int>, scales: Tensor<2>, grouping: Grouping) -> Tensor<2> {
    let Grouping { inputs, group, four_bits } = grouping;
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
    // The last group may be shorter, so scales are laid out in full and then cut.
    let scales = scales
        .cast(DType::F32)
        .reshape([rows, groups, 1])
        .expand([rows, groups, group])
        .reshape([rows, groups * group])
        .narrow(1, 0, inputs);
    integers.narrow(1, 0, inputs).float().cast(DType::F32).mul(scales)
}
