//! Reference implementation of attention in Burn's operations.

use burn::tensor::{DType, Device, Int, IntDType, Tensor, TensorData};

use super::kv_tensor::KvTensor;
use super::output::AttentionOutput;
use super::params::AttentionParams;
use super::span::Span;

/// See [`span_attention`](super::span_attention). Needs at least one row and one position.
pub fn span_attention(query: Tensor<3>, span: &Span, params: AttentionParams) -> AttentionOutput {
    let [rows, heads, head_dim] = query.dims();
    let (keys, values) = (dequantize(&span.keys, head_dim), dequantize(&span.values, head_dim));
    let [kv_heads, positions, _] = keys.dims();
    let sharing = heads / kv_heads;
    let query = query.cast(DType::F32).reshape([rows, kv_heads, sharing, head_dim]);
    let query = query.permute([1, 2, 0, 3]).reshape([kv_heads, sharing * rows, head_dim]);
    let mut scores = query.matmul(keys.transpose()).mul_scalar(params.scale);
    if let Some(cap) = params.softcap {
        scores = scores.div_scalar(cap).tanh().mul_scalar(cap);
    }
    if let Some(mask) = mask(rows, positions, span, params, &scores.device()) {
        let by_row = scores.reshape([kv_heads, sharing, rows, positions]);
        scores = by_row.add(mask.unsqueeze()).reshape([kv_heads, sharing * rows, positions]);
    }
    // Clamped, because -inf - -inf would be NaN where nothing is visible.
    let highest = scores.clone().max_dim(2).clamp_min(f32::MIN);
    let weights = scores.sub(highest.clone()).exp();
    let total = weights.clone().sum_dim(2);
    let nothing = total.clone().equal_elem(0.0);
    // The total is at least 1 wherever anything is visible, because the highest score has weight 1.
    let output = weights.matmul(values).div(total.clone().clamp_min(0.5));
    let log_sum_exp = total.clamp_min(0.5).log().add(highest).mask_fill(nothing, f32::NEG_INFINITY);
    let output = output.reshape([kv_heads, sharing, rows, head_dim]).permute([2, 0, 1, 3]);
    let log_sum_exp = log_sum_exp.reshape([heads, rows]).transpose();
    AttentionOutput { output: output.reshape([rows, heads, head_dim]), log_sum_exp }
}

/// See [`merge`](super::merge). Log-sum-exps beyond the outputs are sinks.
pub fn merge(outputs: Vec<Tensor<3>>, log_sum_exps: Vec<Tensor<2>>) -> AttentionOutput {
    let sums = Tensor::stack::<3>(log_sum_exps, 0);
    let highest = sums.clone().max_dim(0).clamp_min(f32::MIN);
    let weights = sums.sub(highest.clone()).exp();
    let total = weights.clone().sum_dim(0);
    let nothing = total.clone().equal_elem(0.0);
    let total = total.clamp_min(0.5);
    let weights = weights.narrow(0, 0, outputs.len()).div(total.clone());
    let output = Tensor::stack::<4>(outputs, 0).mul(weights.unsqueeze_dim::<4>(3)).sum_dim(0);
    let log_sum_exp = total.log().add(highest).mask_fill(nothing, f32::NEG_INFINITY);
    AttentionOutput { output: output.squeeze_dim(0), log_sum_exp: log_sum_exp.squeeze_dim(0) }
}

/// See [`KvTensor::quantize`].
pub fn quantize(values: Tensor<3>) -> KvTensor {
    let [kv_heads, positions, head_dim] = values.dims();
    let words = head_dim.div_ceil(4);
    let scales = values.clone().abs().max_dim(2).div_scalar(127.0);
    // A row of zeros would divide by a scale of zero.
    let divisors = scales.clone().mask_fill(scales.clone().equal_elem(0.0), 1.0);
    // Makes the scale NaN if a value is infinite or NaN: bytes cannot represent that, and not every
    // backend's maximum does.
    let scales = scales.add(values.clone().mul_scalar(0.0).sum_dim(2));
    let bytes = values.div(divisors).round().clamp(-127.0, 127.0);
    // Not every backend converts NaN to an integer.
    let bytes = bytes.clone().mask_fill(bytes.is_nan(), 0.0).int().cast(IntDType::I32);
    let padding = words * 4 - head_dim;
    let bytes = if padding == 0 {
        bytes
    } else {
        let zeros = Tensor::zeros([kv_heads, positions, padding], (&bytes.device(), DType::I32));
        Tensor::cat(vec![bytes, zeros], 2)
    };
    let bytes = bytes.reshape([kv_heads, positions, words, 4]);
    let byte = |index: usize| {
        let byte = bytes.clone().narrow(3, index, 1);
        // The last byte keeps its sign: some backends panic if the shifted value exceeds a word.
        let byte = if index < 3 { byte.bitwise_and_scalar(0xFF) } else { byte };
        byte.bitwise_left_shift_scalar(8 * index as i32)
    };
    let all = byte(0).bitwise_or(byte(1)).bitwise_or(byte(2)).bitwise_or(byte(3));
    KvTensor::Bytes {
        words: all.reshape([kv_heads, positions, words]),
        scales: scales.reshape([kv_heads, positions]),
    }
}

/// See [`KvTensor::dequantize`]: `[kv_heads, positions, head_dim]` in f32.
pub fn dequantize(stored: &KvTensor, head_dim: usize) -> Tensor<3> {
    match stored {
        KvTensor::Float(values) => values.clone().cast(DType::F32),
        KvTensor::Bytes { words, scales } => dequantize_bytes(words.clone(), scales.clone(), head_dim),
    }
}

fn dequantize_bytes(words: Tensor<3, Int>, scales: Tensor<2>, head_dim: usize) -> Tensor<3> {
    let [kv_heads, positions, count] = words.dims();
    let bytes = (0..4)
        .map(|byte| words.clone().bitwise_right_shift_scalar(8 * byte).bitwise_and_scalar(0xFF))
        .collect();
    let bytes = Tensor::stack::<4>(bytes, 3).reshape([kv_heads, positions, count * 4]);
    let integers = bytes.bitwise_xor_scalar(0x80).sub_scalar(0x80).narrow(2, 0, head_dim);
    integers.float().cast(DType::F32).mul(scales.unsqueeze_dim(2))
}

/// Returns 0 where visible and -inf elsewhere, or `None` if everything is visible.
fn mask(
    rows: usize,
    positions: usize,
    span: &Span,
    params: AttentionParams,
    device: &Device,
) -> Option<Tensor<2>> {
    let mut mask = vec![f32::NEG_INFINITY; rows * positions];
    for (row, mask) in mask.chunks_exact_mut(positions).enumerate() {
        for index in params.visible(row, span.position, positions) {
            if span.visible.as_ref().is_none_or(|visible| visible.contains(index)) {
                mask[index] = 0.0;
            }
        }
    }
    let hides = mask.iter().any(|mask| *mask != 0.0);
    hides.then(|| Tensor::from_data(TensorData::new(mask, [rows, positions]), device))
}
