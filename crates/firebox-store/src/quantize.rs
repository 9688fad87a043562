//! Quantization of weights to Firebox's own encoding.

use bytes::Bytes;
use half::{bf16, f16};

use crate::encoding::{Bits, Dtype, Encoding, Q4_CHUNK, Quantization, TILE_ROWS, TILE_WORD, element_count};
use crate::error::StoreError;
use crate::excerpt::Shape;
use crate::mapping::aligned_copy;
use crate::segment::SegmentId;
use crate::tensor_index::TensorInfo;
use crate::tile::{self, SCALE};
use crate::weight::Weight;

/// Suffixes of matrices that are worth quantizing: operands of products and look-up tables. Left out on purpose: norms, biases,
/// convolutions, and small projections whose errors matter most (`mlp.gate`, which selects experts; `in_proj_a` and
/// `in_proj_b`, which set the decay and gate of a whole head).
const QUANTIZED: [&str; 9] = [
    "_proj.weight",
    ".in_proj_qkv.weight",
    ".in_proj_qkvz.weight",
    ".in_proj_z.weight",
    "embed_tokens.weight",
    "embed_tokens_per_layer.weight",
    "lm_head.weight",
    ".word_embeddings.weight",
    ".dense.weight",
];

/// Suffixes of an encoder's projections.
const QUANTIZED_ENCODER: [&str; 3] =
    [".attention.self.query.weight", ".attention.self.key.weight", ".attention.self.value.weight"];

/// Divisions of a group's range that are tried beside the plain one, in steps of how many integers its largest number is.
const DIVISIONS: std::ops::RangeInclusive<i32> = -5..=12;
const DIVISION_STEP: f32 = 0.15;

/// Returns whether a tensor is worth quantizing. Quantized imports apply this rule, and a head for a quantized trunk should
/// follow it.
pub fn is_quantized(info: &TensorInfo) -> bool {
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
        quantize_tiles(quantization, values, shape[1], None, &mut data, &mut scales)
            .map_err(|(row, reason)| fault(format!("row {row}: {reason}")))?;
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

/// Encodes numbers as floats of any width or in Firebox's own quantization.
pub fn encode(name: &str, values: &[f32], shape: &[usize], encoding: Encoding) -> Result<Weight, StoreError> {
    let fault = |reason: String| StoreError::Quantize { tensor: name.to_owned(), reason };
    let dtype = match encoding {
        Encoding::Plain(dtype) if dtype.is_float() => dtype,
        Encoding::Grouped(quantization) => {
            let &[rows, inputs] = shape else {
                return Err(fault(format!("shape {:?} is not [out, in]", Shape(shape))));
            };
            return quantize(name, values, [rows, inputs], quantization);
        }
        other => return Err(fault(format!("numbers are not written as {other}; use floats, q8 or q4"))),
    };
    if element_count(shape) != Some(values.len()) {
        return Err(fault(format!("{} values for shape {:?}", values.len(), Shape(shape))));
    }
    let data: Vec<u8> = match dtype {
        Dtype::F64 => values.iter().flat_map(|x| f64::from(*x).to_le_bytes()).collect(),
        Dtype::F16 => {
            if let Some(x) = values.iter().find(|x| x.is_finite() && f16::from_f32(**x).is_infinite()) {
                return Err(fault(format!("holds {x}, which is beyond f16; use bf16 or f32")));
            }
            values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect()
        }
        Dtype::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    Ok(Weight {
        name: name.to_owned(),
        shape: shape.to_vec(),
        encoding,
        data: aligned_copy(&data),
        scales: None,
        mapped: false,
    })
}

/// Appends the packed values and the scales of rows that begin with the first of a tile. An error names the row.
pub(crate) fn quantize_tiles(
    quantization: Quantization,
    values: &[f32],
    inputs: usize,
    importance: Option<&[f32]>,
    data: &mut Vec<u8>,
    scales: &mut Vec<u8>,
) -> Result<(), (usize, String)> {
    let (mut rows, mut row_scales) = (Vec::new(), Vec::new());
    for (tile, values) in values.chunks(TILE_ROWS * inputs).enumerate() {
        rows.clear();
        row_scales.clear();
        let count = values.len() / inputs;
        for (row, values) in values.chunks_exact(inputs).enumerate() {
            quantize_row(quantization, values, importance, &mut rows, &mut row_scales)
                .map_err(|reason| (tile * TILE_ROWS + row, reason))?;
        }
        tile::interleave_rows::<TILE_WORD>(&rows, count, data);
        tile::interleave_rows::<SCALE>(&row_scales, count, scales);
    }
    Ok(())
}

/// Appends one row's packed values and its scales.
fn quantize_row(
    quantization: Quantization,
    row: &[f32],
    importance: Option<&[f32]>,
    data: &mut Vec<u8>,
    scales: &mut Vec<u8>,
) -> Result<(), String> {
    for (at, group) in row.chunks(quantization.group).enumerate() {
        let inputs = at * quantization.group..at * quantization.group + group.len();
        let mut scale = scale_of(quantization.bits, group)
            .map_err(|reason| format!("inputs {}..{}: {reason}", inputs.start, inputs.end))?;
        if let (Bits::Q4, Some(importance)) = (quantization.bits, importance) {
            scale = fitted_scale(quantization.bits, group, &importance[inputs], scale);
        }
        scales.extend_from_slice(&scale.to_le_bytes());
        let value = |x: f32| integer(quantization.bits, x, scale.to_f32());
        match quantization.bits {
            Bits::Q8 => data.extend(group.iter().map(|x| (value(*x) as i8) as u8)),
            Bits::Q4 => {
                for chunk in group.chunks(Q4_CHUNK) {
                    // Padding has the value zero, which is stored as 8.
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
    // Rows of a tile have equal lengths, so this pads each of them alike.
    data.resize(data.len().next_multiple_of(TILE_WORD), 0);
    Ok(())
}

/// The integer that is stored for a number.
fn integer(bits: Bits, x: f32, scale: f32) -> f32 {
    // A group of zeros, or one so small that its scale is zero in f16: all values are below 4e-6.
    if scale == 0.0 { 0.0 } else { (x / scale).round_ties_even().clamp(-bits.max(), bits.max()) }
}

/// The sum of squared errors of a group, each times the importance of its input.
pub(crate) fn weighted_error(bits: Bits, group: &[f32], importance: &[f32], scale: f16) -> f32 {
    let scale = scale.to_f32();
    let error = |(x, importance): (&f32, &f32)| {
        let difference = x - integer(bits, *x, scale) * scale;
        importance * difference * difference
    };
    group.iter().zip(importance).map(error).sum()
}

/// The scale of a group that errs least where inputs are important: of the `plain` one, and those that fit best to the integers of
/// coarser and finer divisions.
pub(crate) fn fitted_scale(bits: Bits, group: &[f32], importance: &[f32], plain: f16) -> f16 {
    let largest = group.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let mut best = (weighted_error(bits, group, importance, plain), plain);
    for step in DIVISIONS {
        let divided = largest / (bits.max() + step as f32 * DIVISION_STEP);
        let (mut products, mut squares) = (0.0f32, 0.0f32);
        for (x, importance) in group.iter().zip(importance) {
            let integer = integer(bits, *x, divided);
            products += importance * x * integer;
            squares += importance * integer * integer;
        }
        let scale = f16::from_f32(products / squares);
        // All products may be zero.
        if scale.is_finite() && scale > f16::ZERO {
            let error = weighted_error(bits, group, importance, scale);
            if error < best.0 {
                best = (error, scale);
            }
        }
    }
    best.1
}

/// The scale by which the largest number of a group becomes the largest integer.
pub(crate) fn scale_of(bits: Bits, group: &[f32]) -> Result<f16, String> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_fitted_scale_never_errs_more(
            group in prop::collection::vec(-4.0f32..4.0, 1..64),
            importance in prop::collection::vec(prop_oneof![Just(0.0f32), 1e-6f32..100.0], 64),
        ) {
            let plain = scale_of(Bits::Q4, &group).unwrap();
            let fitted = fitted_scale(Bits::Q4, &group, &importance, plain);
            let error = |scale| weighted_error(Bits::Q4, &group, &importance, scale);
            prop_assert!(error(fitted) <= error(plain), "{plain} became {fitted}");
        }
    }

    #[test]
    fn what_does_not_matter_may_be_cut_off() {
        let (group, mut importance) = ([8.0, 1.0, -2.0, 3.0], [1.0; 4]);
        let plain = scale_of(Bits::Q4, &group).unwrap();
        let error = |importance: &[f32], scale| weighted_error(Bits::Q4, &group, importance, scale);
        importance[0] = 0.0;
        let fitted = fitted_scale(Bits::Q4, &group, &importance, plain);
        assert!(error(&importance, fitted) < 0.1 * error(&importance, plain), "{plain} became {fitted}");
        // A group of zeros, and one that never matters, keep their scale.
        assert_eq!(fitted_scale(Bits::Q4, &[0.0; 4], &[1.0; 4], f16::ZERO), f16::ZERO);
        assert_eq!(fitted_scale(Bits::Q4, &group, &[0.0; 4], plain), plain);
    }
}
