//! Weights into Firebox's own quantization.

use bytes::Bytes;
use half::f16;

use crate::checkpoint::TensorInfo;
use crate::encoding::{Bits, Encoding, Q4_CHUNK, Quantization};
use crate::error::StoreError;
use crate::excerpt::Shape;
use crate::segment::SegmentId;
use crate::weight::Weight;

/// Ends of the names of matrices that are multiplied with, or looked up in, and so are worth quantizing. Left out on
/// purpose: norms, biases, convolutions, and the small projections whose errors decide much (`mlp.gate`, which picks
/// experts; `in_proj_a` and `in_proj_b`, which set decay and gate of a whole head).
const QUANTIZED: [&str; 8] = [
    "_proj.weight",
    ".in_proj_qkv.weight",
    ".in_proj_qkvz.weight",
    ".in_proj_z.weight",
    "embed_tokens.weight",
    "lm_head.weight",
    ".word_embeddings.weight",
    ".dense.weight",
];

/// An encoder's projections, which are not named for what they are.
const QUANTIZED_ENCODER: [&str; 3] =
    [".attention.self.query.weight", ".attention.self.key.weight", ".attention.self.value.weight"];

/// Whether an import quantizes a tensor when asked to.
pub(crate) fn is_quantized(info: &TensorInfo) -> bool {
    let matrix = info.shape.len() == 2 && !info.shape.contains(&0);
    let numbers = match info.encoding {
        Encoding::Plain(dtype) => dtype.is_float(),
        Encoding::Grouped(_) | Encoding::Block(_) => true,
    };
    let named = QUANTIZED.iter().chain(&QUANTIZED_ENCODER).any(|end| info.name.ends_with(end));
    matrix && numbers && named && info.segment != SegmentId::Other
}

/// Quantizes a matrix `[out, in]` given row by row.
pub fn quantize(
    name: &str,
    values: &[f32],
    shape: [usize; 2],
    quantization: Quantization,
) -> Result<Weight, StoreError> {
    let fault = |reason: String| StoreError::Quantize { tensor: name.to_owned(), reason };
    let encoding = Encoding::Grouped(quantization);
    let bytes = encoding.data_bytes(&shape).map_err(fault)?;
    if shape[0].checked_mul(shape[1]) != Some(values.len()) {
        return Err(fault(format!("{} values for shape {:?}", values.len(), Shape(&shape))));
    }
    let mut data = Vec::with_capacity(bytes);
    let mut scales = Vec::new();
    if shape[1] > 0 {
        for (row, values) in values.chunks_exact(shape[1]).enumerate() {
            quantize_row(quantization, values, &mut data, &mut scales)
                .map_err(|reason| fault(format!("row {row}: {reason}")))?;
        }
    }
    Ok(Weight {
        name: name.to_owned(),
        shape: shape.to_vec(),
        encoding,
        data: Bytes::from(data),
        scales: Some(Bytes::from(scales)),
        mapped: false,
    })
}

/// Appends one row's packed values and its scales.
pub(crate) fn quantize_row(
    quantization: Quantization,
    row: &[f32],
    data: &mut Vec<u8>,
    scales: &mut Vec<u8>,
) -> Result<(), String> {
    for (at, group) in row.chunks(quantization.group).enumerate() {
        let scale = scale_of(quantization.bits, group).map_err(|reason| {
            format!("inputs {}..{}: {reason}", at * quantization.group, at * quantization.group + group.len())
        })?;
        scales.extend_from_slice(&scale.to_le_bytes());
        let scale = scale.to_f32();
        let max = quantization.bits.max();
        let value = |x: f32| {
            // A group of zeros, or one so small that its scale is zero in f16: all that could be said of it is less
            // than 4e-6.
            if scale == 0.0 { 0.0 } else { (x / scale).round_ties_even().clamp(-max, max) }
        };
        match quantization.bits {
            Bits::Q8 => data.extend(group.iter().map(|x| (value(*x) as i8) as u8)),
            Bits::Q4 => {
                for chunk in group.chunks(Q4_CHUNK) {
                    // Padding is a value of zero, which is stored as 8.
                    let mut nibbles = [8u8; Q4_CHUNK];
                    for (nibble, x) in nibbles.iter_mut().zip(chunk) {
                        *nibble = (value(*x) as i8 + 8) as u8;
                    }
                    let (low, high) = nibbles.split_at(Q4_CHUNK / 2);
                    data.extend(low.iter().zip(high).map(|(low, high)| low | (high << 4)));
                }
            }
        }
    }
    Ok(())
}

fn scale_of(bits: Bits, group: &[f32]) -> Result<f16, String> {
    let mut largest = 0.0f32;
    for x in group {
        if !x.is_finite() {
            return Err(format!("holds {x}, which has no quantized form; the checkpoint is damaged"));
        }
        largest = largest.max(x.abs());
    }
    let scale = f16::from_f32(largest / bits.max());
    if scale.is_infinite() {
        return Err(format!(
            "holds {largest}, whose scale is beyond f16; import the model without quantizing"
        ));
    }
    Ok(scale)
}
