//! Encodings: the number formats of stored tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

pub use crate::block_type::BlockType;
use crate::excerpt::Shape;

/// The element type of a tensor stored without blocks or scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[allow(missing_docs)]
pub enum Dtype {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    /// Four bits of exponent, three of mantissa, no infinity.
    #[serde(rename = "F8_E4M3")]
    F8E4M3,
}

impl Dtype {
    /// Every dtype, widest first.
    pub const ALL: [Self; 14] = [
        Self::F64,
        Self::I64,
        Self::U64,
        Self::F32,
        Self::I32,
        Self::U32,
        Self::F16,
        Self::BF16,
        Self::I16,
        Self::U16,
        Self::I8,
        Self::U8,
        Self::Bool,
        Self::F8E4M3,
    ];

    /// Bytes per element, which is also the alignment an element needs.
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 | Self::Bool | Self::F8E4M3 => 1,
        }
    }

    /// The name in safetensors files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "F64",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::I64 => "I64",
            Self::I32 => "I32",
            Self::I16 => "I16",
            Self::I8 => "I8",
            Self::U64 => "U64",
            Self::U32 => "U32",
            Self::U16 => "U16",
            Self::U8 => "U8",
            Self::Bool => "BOOL",
            Self::F8E4M3 => "F8_E4M3",
        }
    }

    /// Looks up the dtype of a safetensors name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Returns whether the elements are floating-point numbers.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::BF16 | Self::F8E4M3)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bits per weight of Firebox's own quantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bits {
    /// One signed byte per weight.
    Q8,
    /// Half a byte per weight, stored with an offset of 8.
    Q4,
}

impl Bits {
    /// The largest magnitude a stored value takes.
    pub fn max(self) -> f32 {
        match self {
            Self::Q8 => 127.0,
            Self::Q4 => 7.0,
        }
    }
}

/// Firebox's own quantization: symmetric, one f16 scale per `group` consecutive inputs of an output row.
///
/// A row of `q8` has a signed byte per input. A row of `q4` has 16 bytes per chunk of 32 inputs: byte `j` holds input `j` in
/// its low half and input `j + 16` in its high half, each with an offset of 8; the last chunk is padded with zeros (8). Rows
/// are padded to whole words of four bytes.
///
/// Rows are interleaved in tiles of [`TILE_ROWS`]: a tile holds the first words of all its rows, then the second ones, and so
/// on; the last tile has the remaining rows. The f16 scales, `ceil(in / group)` per row, are interleaved in the same way,
/// scale by scale. Kernels that compute sixteen outputs at a time read them in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantization {
    /// Bits per weight.
    pub bits: Bits,
    /// Inputs per scale; a multiple of 32 up to 4096.
    pub group: usize,
}

/// Inputs that share one 16-byte chunk in the q4 layout.
pub const Q4_CHUNK: usize = 32;

/// Rows of a quantized matrix that are interleaved in a tile.
pub const TILE_ROWS: usize = 16;

/// Bytes of a row that are contiguous in a tile.
pub(crate) const TILE_WORD: usize = 4;

impl Quantization {
    /// Checks the group size. A group must cover whole q4 chunks, so that no chunk has two scales.
    pub fn check(&self) -> Result<(), String> {
        if self.group == 0 || self.group > 4096 || !self.group.is_multiple_of(Q4_CHUNK) {
            return Err(format!("group is {}; it must be a multiple of {Q4_CHUNK} up to 4096", self.group));
        }
        Ok(())
    }

    /// Bytes of one row of `inputs` weights without its scales; `None` on overflow.
    pub fn row_bytes(&self, inputs: usize) -> Option<usize> {
        match self.bits {
            Bits::Q8 => inputs.checked_next_multiple_of(TILE_WORD),
            Bits::Q4 => inputs.div_ceil(Q4_CHUNK).checked_mul(Q4_CHUNK / 2),
        }
    }

    /// The number of scales of one row of `inputs` weights.
    pub fn row_scales(&self, inputs: usize) -> usize {
        inputs.div_ceil(self.group)
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = match self.bits {
            Bits::Q8 => "q8",
            Bits::Q4 => "q4",
        };
        write!(f, "{bits} in groups of {}", self.group)
    }
}

/// More dimensions than any tensor has.
const MAX_RANK: usize = 32;

/// The number format of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", try_from = "StoredEncoding")]
pub enum Encoding {
    /// Elements one after another.
    Plain(Dtype),
    /// Firebox's own quantization, with scales in a tensor of their own.
    #[serde(rename = "tiled")]
    Grouped(Quantization),
    /// Blocks of GGUF, with scales inside.
    Block(BlockType),
}

/// An encoding in the form that this or an earlier version wrote.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum StoredEncoding {
    Plain(Dtype),
    Tiled(Quantization),
    /// Rows one after another, as earlier versions wrote them.
    Grouped(Quantization),
    Block(BlockType),
}

impl TryFrom<StoredEncoding> for Encoding {
    type Error = String;

    fn try_from(stored: StoredEncoding) -> Result<Self, String> {
        Ok(match stored {
            StoredEncoding::Plain(dtype) => Self::Plain(dtype),
            StoredEncoding::Tiled(quantization) => Self::Grouped(quantization),
            StoredEncoding::Block(block) => Self::Block(block),
            StoredEncoding::Grouped(quantization) => {
                return Err(format!(
                    "{quantization} as earlier versions of Firebox wrote it, row by row; import the model or train the head again"
                ));
            }
        })
    }
}

impl Encoding {
    /// Bytes of a tensor of this shape without scales, or the reason why there can be no such tensor.
    pub fn data_bytes(&self, shape: &[usize]) -> Result<usize, String> {
        if shape.len() > MAX_RANK {
            return Err(format!("{} dimensions; more than {MAX_RANK} are not a tensor", shape.len()));
        }
        let overflow = || format!("shape {:?} has more bytes than the address space", Shape(shape));
        match self {
            Self::Plain(dtype) => {
                element_count(shape).and_then(|count| count.checked_mul(dtype.size())).ok_or_else(overflow)
            }
            Self::Grouped(quantization) => {
                quantization.check()?;
                let [rows, inputs] = shape else {
                    return Err(format!(
                        "shape {:?} is quantized in groups but is not [out, in]",
                        Shape(shape)
                    ));
                };
                quantization.row_bytes(*inputs).and_then(|row| row.checked_mul(*rows)).ok_or_else(overflow)
            }
            Self::Block(block) => {
                let inputs = shape.last().copied().unwrap_or(0);
                if !inputs.is_multiple_of(block.block_len()) {
                    return Err(format!(
                        "shape {:?} has rows that are not a multiple of {} weights, one {block} block",
                        Shape(shape),
                        block.block_len()
                    ));
                }
                element_count(shape)
                    .map(|count| count / block.block_len())
                    .and_then(|blocks| blocks.checked_mul(block.block_bytes()))
                    .ok_or_else(overflow)
            }
        }
    }

    /// Bytes of the scales of a tensor of this shape; 0 if the encoding has none.
    pub fn scale_bytes(&self, shape: &[usize]) -> Result<usize, String> {
        let Self::Grouped(quantization) = self else { return Ok(0) };
        quantization.check()?;
        let [rows, inputs] = shape else {
            return Err(format!("shape {:?} is quantized in groups but is not [out, in]", Shape(shape)));
        };
        rows.checked_mul(quantization.row_scales(*inputs))
            .and_then(|scales| scales.checked_mul(2))
            .ok_or_else(|| format!("shape {:?} has more scales than the address space", Shape(shape)))
    }

    /// The dtype and shape of a tensor in a safetensors file, without scales. Packed numbers are stored as bytes.
    pub(crate) fn storage(&self, shape: &[usize]) -> Result<(Dtype, Vec<usize>), String> {
        let Self::Plain(dtype) = self else {
            let bytes = self.data_bytes(shape)?;
            let mut packed = shape.to_vec();
            let rows = element_count(shape.get(..shape.len().saturating_sub(1)).unwrap_or_default());
            if let Some(inputs) = packed.last_mut() {
                *inputs = bytes / rows.filter(|rows| *rows > 0).unwrap_or(1);
            }
            return Ok((Dtype::U8, packed));
        };
        Ok((*dtype, shape.to_vec()))
    }

    /// The shape of the scales of a tensor of this shape.
    pub(crate) fn scales_storage(&self, shape: &[usize]) -> Result<Option<Vec<usize>>, String> {
        let (Self::Grouped(quantization), [rows, inputs]) = (self, shape) else { return Ok(None) };
        self.scale_bytes(shape)?;
        Ok(Some(vec![*rows, quantization.row_scales(*inputs)]))
    }

    /// The alignment in memory that the bytes need to be read as elements.
    pub fn align(&self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.size(),
            Self::Grouped(_) => TILE_WORD,
            // Experts of an odd number of bytes lie anywhere.
            Self::Block(BlockType::MXFP4) => 1,
            Self::Block(_) => 2,
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => dtype.fmt(f),
            Self::Grouped(quantization) => quantization.fmt(f),
            Self::Block(block) => block.fmt(f),
        }
    }
}

/// The number of elements of a tensor of this shape; `None` on overflow.
pub(crate) fn element_count(shape: &[usize]) -> Option<usize> {
    // A zero anywhere makes the product zero, but only after the others have been multiplied without overflow:
    // a shape of [0, huge, huge] is refused, since later arithmetic on its strides would overflow.
    let strides = shape.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim.max(1)))?;
    Some(if shape.contains(&0) { 0 } else { strides })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_by_row_layout_of_earlier_versions_is_refused() {
        let packed = Encoding::Grouped(Quantization { bits: Bits::Q4, group: 32 });
        let written = serde_json::to_string(&packed).unwrap();
        assert_eq!(serde_json::from_str::<Encoding>(&written).unwrap(), packed);
        let earlier = written.replace("tiled", "grouped");
        let error = serde_json::from_str::<Encoding>(&earlier).unwrap_err().to_string();
        assert!(error.contains("import the model"), "{error}");
    }
}
