//! The bytes of a stored tensor, and a slow reference decoder to f32.

use bytes::Bytes;
use half::{bf16, f16};

use crate::encoding::{Bits, Dtype, Encoding, Q4_CHUNK, Quantization, TILE_WORD, element_count};
use crate::error::StoreError;
use crate::excerpt::Shape;
use crate::gguf::dequant;
use crate::tile::{self, SCALE};

/// A stored tensor.
#[derive(Debug, Clone)]
pub struct Weight {
    /// The Hugging Face name.
    pub name: String,
    /// The logical shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// The number format of `data`.
    pub encoding: Encoding,
    /// The bytes: a slice of the file's mapping if that is aligned for the elements.
    pub data: Bytes,
    /// F16 scales, for [`Encoding::Grouped`].
    pub scales: Option<Bytes>,
    /// Whether `data` and `scales` are slices of the mapping; false if an unaligned file required a copy.
    pub mapped: bool,
}

impl Weight {
    /// Every element as f32: widened, narrowed (F64, integers) or dequantized.
    ///
    /// Block formats decode bit for bit like the `gguf` Python package. Faster kernels are tested against this function; it
    /// takes four bytes per element.
    pub fn to_f32(&self) -> Result<Vec<f32>, StoreError> {
        self.check_lengths()?;
        let scales = self.scales.as_deref().unwrap_or(&[]);
        let count = element_count(&self.shape).unwrap_or(0);
        let mut out = Vec::with_capacity(count);
        decode(self.encoding, self.shape.last().copied().unwrap_or(1), &self.data, scales, &mut out);
        Ok(out)
    }

    /// Checks that the number of bytes matches shape and encoding.
    pub(crate) fn check_lengths(&self) -> Result<(), StoreError> {
        let fault = |reason: String| StoreError::Decode { tensor: self.name.clone(), reason };
        let expected = self.encoding.data_bytes(&self.shape).map_err(fault)?;
        if self.data.len() != expected {
            return Err(fault(format!(
                "{} bytes, but {} of shape {:?} takes {expected}",
                self.data.len(),
                self.encoding,
                Shape(&self.shape)
            )));
        }
        let scales = self.scales.as_ref().map_or(0, |scales| scales.len());
        let expected = self.encoding.scale_bytes(&self.shape).map_err(fault)?;
        if scales != expected {
            return Err(fault(format!("{scales} bytes of scales, expected {expected}")));
        }
        Ok(())
    }
}

/// Appends the elements of whole rows of `inputs` elements; quantized rows begin with the first of a tile. The caller has
/// checked the lengths.
pub(crate) fn decode(encoding: Encoding, inputs: usize, data: &[u8], scales: &[u8], out: &mut Vec<f32>) {
    match encoding {
        Encoding::Plain(dtype) => decode_plain(dtype, data, out),
        Encoding::Grouped(quantization) => decode_grouped(quantization, inputs, data, scales, out),
        Encoding::Block(block) => dequant::dequantize(block, data, out),
    }
}

/// The number of a byte of FP8: a sign, four bits of exponent and three of mantissa.
pub(crate) fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(byte >> 3) & 15, f32::from(byte & 7));
    let magnitude = match exponent {
        0 => mantissa / 512.0,
        15 if mantissa == 7.0 => f32::NAN,
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((exponent + 120) << 23),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

fn decode_plain(dtype: Dtype, data: &[u8], out: &mut Vec<f32>) {
    // Integers and doubles are narrowed as numpy's astype(float32) does: to the nearest value.
    fn each<const N: usize>(data: &[u8], out: &mut Vec<f32>, read: impl Fn([u8; N]) -> f32) {
        out.extend(data.as_chunks::<N>().0.iter().map(|bytes| read(*bytes)));
    }
    match dtype {
        Dtype::F64 => each(data, out, |bytes| f64::from_le_bytes(bytes) as f32),
        Dtype::F32 => each(data, out, f32::from_le_bytes),
        Dtype::F16 => each(data, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
        Dtype::BF16 => each(data, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        Dtype::I64 => each(data, out, |bytes| i64::from_le_bytes(bytes) as f32),
        Dtype::I32 => each(data, out, |bytes| i32::from_le_bytes(bytes) as f32),
        Dtype::I16 => each(data, out, |bytes| f32::from(i16::from_le_bytes(bytes))),
        Dtype::I8 => each(data, out, |bytes| f32::from(i8::from_le_bytes(bytes))),
        Dtype::U64 => each(data, out, |bytes| u64::from_le_bytes(bytes) as f32),
        Dtype::U32 => each(data, out, |bytes| u32::from_le_bytes(bytes) as f32),
        Dtype::U16 => each(data, out, |bytes| f32::from(u16::from_le_bytes(bytes))),
        Dtype::U8 => each(data, out, |bytes| f32::from(u8::from_le_bytes(bytes))),
        Dtype::F8E4M3 => each(data, out, |bytes: [u8; 1]| e4m3(bytes[0])),
        Dtype::Bool => each(data, out, |bytes: [u8; 1]| f32::from(u8::from(bytes[0] != 0))),
    }
}

fn decode_grouped(quantization: Quantization, inputs: usize, data: &[u8], scales: &[u8], out: &mut Vec<f32>) {
    let Some(row_bytes) = quantization.row_bytes(inputs).filter(|bytes| *bytes > 0) else { return };
    let scale_bytes = quantization.row_scales(inputs) * SCALE;
    let (mut row, mut row_scales) = (Vec::new(), Vec::new());
    for ((tile, rows), (scales, _)) in tile::tiles(data, row_bytes).zip(tile::tiles(scales, scale_bytes)) {
        for lane in 0..rows {
            row.clear();
            row_scales.clear();
            tile::append_row::<TILE_WORD>(tile, rows, lane, &mut row);
            tile::append_row::<SCALE>(scales, rows, lane, &mut row_scales);
            let scales = row_scales.as_chunks::<SCALE>().0;
            out.extend((0..inputs).map(|input| {
                let value = match quantization.bits {
                    Bits::Q8 => f32::from(row[input] as i8),
                    Bits::Q4 => f32::from(q4_nibble(&row, input)) - 8.0,
                };
                value * f16::from_le_bytes(scales[input / quantization.group]).to_f32()
            }));
        }
    }
}

fn q4_nibble(row: &[u8], input: usize) -> u8 {
    let half = Q4_CHUNK / 2;
    let (chunk, within) = (input / Q4_CHUNK, input % Q4_CHUNK);
    let byte = row[chunk * half + within % half];
    if within < half { byte & 0x0F } else { byte >> 4 }
}
