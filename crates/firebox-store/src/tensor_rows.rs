//! A checkpoint's tensor in another encoding or order of rows, read in parts, so that memory does not depend on its size.

use std::ops::Range;

use crate::checkpoint::Checkpoint;
use crate::encoding::{Bits, BlockType, Dtype, Encoding, Q4_CHUNK, Quantization, TILE_ROWS, TILE_WORD};
use crate::error::StoreError;
use crate::packed::PackedTensor;
use crate::quantize::encode;
use crate::row_reader::RowReader;
use crate::tile::{self, SCALE};

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

/// The rows of a tensor, to be converted.
pub(crate) struct TensorRows<'a> {
    reader: RowReader<'a>,
    packed: Option<&'a PackedTensor>,
    checkpoint: &'a Checkpoint,
    conversion: Conversion,
}

impl<'a> TensorRows<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        name: &str,
        conversion: Conversion,
    ) -> Result<Self, StoreError> {
        let reader = RowReader::new(checkpoint, name)?;
        let head = conversion.order.head();
        if !reader.rows.is_multiple_of(head) {
            let reason = format!("{} rows are not whole heads of {head}", reader.rows);
            return Err(StoreError::Decode { tensor: name.to_owned(), reason });
        }
        Ok(Self { reader, packed: checkpoint.packed(name), checkpoint, conversion })
    }

    /// Hands the converted bytes on part by part, each with the number of stored bytes that it was made from.
    pub(crate) fn for_each_part(
        mut self,
        mut take: impl FnMut(&[u8], u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        if self.reader.inputs == 0 {
            return Ok(());
        }
        // Whole heads, and whole tiles of quantized rows.
        for rows in self.reader.parts(self.conversion.order.head() * TILE_ROWS) {
            let converted = self.converted(&rows)?;
            let bytes = self.ordered(converted, rows.len());
            take(&bytes, self.reader.stored_bytes(&rows))?;
        }
        Ok(())
    }

    /// Some rows in the target's encoding, in the stored order.
    fn converted(&mut self, rows: &Range<usize>) -> Result<Vec<u8>, StoreError> {
        let (info, inputs, target) = (self.reader.info, self.reader.inputs, self.conversion.encoding);
        let unchanged = target == info.encoding && self.conversion.added == 0.0;
        match (self.packed, info.encoding, target) {
            (Some(packed), _, Encoding::Block(_)) if unchanged => {
                let mut blocks = Vec::new();
                let mappings = self.checkpoint.mappings();
                rows.clone().for_each(|row| packed.unpack_blocks(mappings, row, &mut blocks));
                return Ok(blocks);
            }
            (None, Encoding::Plain(_) | Encoding::Block(_), _) if unchanged => {
                return Ok(self.reader.stored(rows)?.0.to_vec());
            }
            (None, Encoding::Grouped(quantization), Encoding::Block(block))
                if lossless_block(quantization, inputs) == Some(block) =>
            {
                let (data, scales) = self.reader.stored(rows)?;
                return Ok(blocks(quantization, inputs, data, scales));
            }
            _ => {}
        }
        let mut values = Vec::new();
        self.reader.numbers(rows, &mut values)?;
        // Adding nothing would change zeros below zero.
        if self.conversion.added != 0.0 {
            values.iter_mut().for_each(|value| *value += self.conversion.added);
        }
        let written = encode(&info.name, &values, &[rows.len(), inputs], target)?;
        Ok(written.data.to_vec())
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
