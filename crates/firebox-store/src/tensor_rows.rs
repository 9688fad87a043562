//! A checkpoint's tensor in another encoding or order of rows, read in parts, so that memory does not depend on its size.

use crate::checkpoint::Checkpoint;
use crate::encoding::{Bits, BlockType, Dtype, Encoding, Q4_CHUNK, Quantization, TILE_ROWS, TILE_WORD};
use crate::error::StoreError;
use crate::quantize::encode;
use crate::tensor_index::{Place, Span, TensorInfo};
use crate::tile::{self, SCALE};
use crate::weight::decode;

/// Bytes of a part's numbers in memory, but for tensors whose rows are longer.
const PART_BYTES: usize = 4 << 20;

/// The order of the rows of a matrix, or of the elements of a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// As the checkpoint has them.
    Stored,
    /// Pairs of a head become neighbours: rows `i` and `i + head / 2` of each `head` rows.
    Interleaved { head: usize },
    /// Neighbours become halves of a head.
    Halved { head: usize },
}

impl RowOrder {
    /// Rows that change their places among themselves.
    fn head(self) -> usize {
        match self {
            Self::Stored => 1,
            Self::Interleaved { head } | Self::Halved { head } => head.max(1),
        }
    }

    /// The stored row that comes to lie at `row`.
    fn source(self, row: usize) -> usize {
        let head = self.head();
        let (begin, at, half) = (row - row % head, row % head, head / 2);
        match self {
            Self::Stored => row,
            Self::Interleaved { .. } => begin + at % 2 * half + at / 2,
            Self::Halved { .. } => begin + at % half * 2 + at / half,
        }
    }
}

/// How a tensor is to be written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Conversion {
    /// The number format.
    pub(crate) encoding: Encoding,
    pub(crate) order: RowOrder,
    /// A number to add to every element.
    pub(crate) added: f32,
}

impl Conversion {
    /// Leaves a tensor as it is.
    pub(crate) fn none(encoding: Encoding) -> Self {
        Self { encoding, order: RowOrder::Stored, added: 0.0 }
    }
}

/// Returns the block type that holds a quantized matrix with rows of `inputs` numbers without loss, if there is one: blocks
/// of 32 numbers, each of which has the scale of its group.
pub(crate) fn lossless_block(quantization: Quantization, inputs: usize) -> Option<BlockType> {
    let block = match quantization.bits {
        Bits::Q8 => BlockType::Q8_0,
        Bits::Q4 => BlockType::Q4_0,
    };
    inputs.is_multiple_of(block.block_len()).then_some(block)
}

/// The rows of a tensor. A vector of numbers has a row for each.
pub(crate) struct TensorRows<'a> {
    checkpoint: &'a Checkpoint,
    info: &'a TensorInfo,
    place: Place,
    conversion: Conversion,
    rows: usize,
    inputs: usize,
}

impl<'a> TensorRows<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        name: &str,
        conversion: Conversion,
    ) -> Result<Self, StoreError> {
        let (info, place) = checkpoint.entry(name)?;
        let (rows, inputs) = match (info.shape.as_slice(), info.encoding) {
            ([], _) => (1, 1),
            ([elements], Encoding::Plain(_)) => (*elements, 1),
            ([outer @ .., inputs], _) => (outer.iter().product(), *inputs),
        };
        if !rows.is_multiple_of(conversion.order.head()) {
            let reason = format!("{rows} rows are not whole heads of {}", conversion.order.head());
            return Err(StoreError::Decode { tensor: name.to_owned(), reason });
        }
        Ok(Self { checkpoint, info, place: *place, conversion, rows, inputs })
    }

    /// Hands the converted bytes on part by part, each with the number of stored bytes that it was made from.
    pub(crate) fn for_each_part(
        &self,
        mut take: impl FnMut(&[u8], u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        if self.rows == 0 || self.inputs == 0 {
            return Ok(());
        }
        // Whole heads, and whole tiles of quantized rows.
        let unit = self.conversion.order.head() * TILE_ROWS;
        let part = (PART_BYTES / (self.inputs * size_of::<f32>())).max(1).next_multiple_of(unit);
        let mut row = 0;
        while row < self.rows {
            let count = part.min(self.rows - row);
            let bytes = self.ordered(self.converted(row, count)?, count);
            let stored = self.info.bytes * count as u64 / self.rows as u64;
            take(&bytes, stored)?;
            row += count;
        }
        Ok(())
    }

    /// Some rows in the target's encoding, in the stored order.
    fn converted(&self, row: usize, count: usize) -> Result<Vec<u8>, StoreError> {
        let fault = |reason| StoreError::Decode { tensor: self.info.name.clone(), reason };
        let target = self.conversion.encoding;
        let unchanged = target == self.info.encoding && self.conversion.added == 0.0;
        let mut values = Vec::new();
        if let Some(packed) = self.checkpoint.packed(&self.info.name) {
            let rows = row..row + count;
            if let Encoding::Block(_) = packed.encoding() {
                let mut blocks = Vec::new();
                rows.for_each(|row| packed.unpack_blocks(self.checkpoint.mappings(), row, &mut blocks));
                if unchanged {
                    return Ok(blocks);
                }
                decode(packed.encoding(), self.inputs, &blocks, &[], &mut values);
            } else {
                for row in rows {
                    packed.unpack_row(self.checkpoint.mappings(), row, &mut values).map_err(fault)?;
                }
            }
        } else {
            let data = self.read(self.place.data, row, count)?;
            let scales = self.place.scales.map(|span| self.read(span, row, count)).transpose()?;
            let scales = scales.unwrap_or_default();
            match (self.info.encoding, target) {
                (Encoding::Plain(_) | Encoding::Block(_), _) if unchanged => return Ok(data),
                (Encoding::Grouped(quantization), Encoding::Block(block))
                    if lossless_block(quantization, self.inputs) == Some(block) =>
                {
                    return Ok(blocks(quantization, self.inputs, &data, &scales));
                }
                (encoding, _) => decode(encoding, self.inputs, &data, &scales, &mut values),
            }
        }
        // Adding nothing would change zeros below zero.
        if self.conversion.added != 0.0 {
            values.iter_mut().for_each(|value| *value += self.conversion.added);
        }
        let written = encode(&self.info.name, &values, &[count, self.inputs], target)?;
        Ok(written.data.to_vec())
    }

    /// The bytes of some rows. A span consists of equal rows, as its shape was checked for.
    fn read(&self, span: Span, row: usize, count: usize) -> Result<Vec<u8>, StoreError> {
        let row_bytes = span.len / self.rows;
        let mut bytes = vec![0; count * row_bytes];
        self.checkpoint.file(span).read_at(&mut bytes, span.start + row * row_bytes)?;
        Ok(bytes)
    }

    fn ordered(&self, bytes: Vec<u8>, count: usize) -> Vec<u8> {
        let order = self.conversion.order;
        if order == RowOrder::Stored {
            return bytes;
        }
        let width = bytes.len() / count;
        (0..count).flat_map(|row| &bytes[order.source(row) * width..][..width]).copied().collect()
    }
}

/// Returns the tiled rows of a quantized matrix as rows of blocks, each of a scale and the numbers as they were.
fn blocks(quantization: Quantization, inputs: usize, data: &[u8], scales: &[u8]) -> Vec<u8> {
    let chunk = match quantization.bits {
        Bits::Q8 => Q4_CHUNK,
        Bits::Q4 => Q4_CHUNK / 2,
    };
    let (row_bytes, row_scales) = (inputs / Q4_CHUNK * chunk, quantization.row_scales(inputs) * SCALE);
    let (mut row, mut scale_row, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
    for ((tile, rows), (scales, _)) in tile::tiles(data, row_bytes).zip(tile::tiles(scales, row_scales)) {
        for lane in 0..rows {
            row.clear();
            scale_row.clear();
            tile::append_row::<TILE_WORD>(tile, rows, lane, &mut row);
            tile::append_row::<SCALE>(scales, rows, lane, &mut scale_row);
            for (at, numbers) in row.chunks_exact(chunk).enumerate() {
                let group = at * Q4_CHUNK / quantization.group;
                blocks.extend(&scale_row[group * SCALE..][..SCALE]);
                blocks.extend(numbers);
            }
        }
    }
    blocks
}

/// Returns the float format that holds the numbers of another one, or of an integer of up to 16 bits, without loss; F32
/// where there is none.
pub(crate) fn holding(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::F32 | Dtype::F16 | Dtype::BF16 => dtype,
        Dtype::F8E4M3 => Dtype::BF16,
        _ => Dtype::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::dequant::dequantize;
    use crate::quantize::quantize;

    #[test]
    fn halves_and_neighbours_are_each_others_reverse() {
        let (to, back) = (RowOrder::Interleaved { head: 6 }, RowOrder::Halved { head: 6 });
        assert_eq!((0..6).map(|row| to.source(row)).collect::<Vec<_>>(), [0, 3, 1, 4, 2, 5]);
        assert!((0..18).all(|row| to.source(back.source(row)) == row));
    }

    #[test]
    fn blocks_hold_quantized_rows_without_loss() {
        let values: Vec<f32> = (0..19 * 96).map(|at| ((at * 37 % 101) as f32 - 50.0) * 0.01).collect();
        for (bits, group) in [(Bits::Q4, 32), (Bits::Q4, 64), (Bits::Q8, 32), (Bits::Q8, 128)] {
            let quantization = Quantization { bits, group };
            let weight = quantize("w", &values, [19, 96], quantization).unwrap();
            let block = lossless_block(quantization, 96).unwrap();
            let written = blocks(quantization, 96, &weight.data, weight.scales.as_deref().unwrap());
            assert_eq!(written.len(), Encoding::Block(block).data_bytes(&[19, 96]).unwrap());
            let mut found = Vec::new();
            dequantize(block, &written, &mut found);
            assert_eq!(found, weight.to_f32().unwrap(), "{quantization}");
        }
        assert_eq!(lossless_block(Quantization { bits: Bits::Q4, group: 32 }, 40), None);
    }
}
