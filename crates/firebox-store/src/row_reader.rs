//! Reads the rows of a matrix as numbers.

use std::ops::Range;

use crate::checkpoint::Checkpoint;
use crate::encoding::TILE_ROWS;
use crate::error::StoreError;
use crate::excerpt::Shape;
use crate::tensor_index::{Place, TensorInfo};
use crate::weight::decode;

/// Bytes of numbers in memory at a time: large enough to stream from a disk, small beside any model.
pub(crate) const BUFFER_BYTES: usize = 4 << 20;

/// The longest row that can be quantized, because all rows of a tile are in memory together.
const MAX_ROW: usize = 1 << 20;

/// Reads the rows of a matrix as numbers, whatever its encoding is. Every read begins with the first row of a tile.
pub(crate) struct RowReader<'a> {
    checkpoint: &'a Checkpoint,
    info: &'a TensorInfo,
    place: Place,
    pub rows: usize,
    pub inputs: usize,
    raw: Vec<u8>,
    raw_scales: Vec<u8>,
}

impl<'a> RowReader<'a> {
    pub fn new(checkpoint: &'a Checkpoint, info: &'a TensorInfo) -> Result<Self, StoreError> {
        let fault = |reason: String| StoreError::Quantize { tensor: info.name.clone(), reason };
        let &[rows, inputs] = info.shape.as_slice() else {
            return Err(fault(format!("shape {:?} is not [out, in]", Shape(&info.shape))));
        };
        if inputs == 0 || inputs > MAX_ROW {
            return Err(fault(format!("rows of {inputs} inputs; expected 1 to {MAX_ROW}")));
        }
        let (_, place) = checkpoint.entry(&info.name)?;
        Ok(Self { checkpoint, info, place: *place, rows, inputs, raw: Vec::new(), raw_scales: Vec::new() })
    }

    /// As many rows as a buffer holds, in whole tiles.
    pub fn rows_at_once(&self) -> usize {
        (BUFFER_BYTES / (self.inputs * size_of::<f32>())).max(1).next_multiple_of(TILE_ROWS)
    }

    /// Replaces `values` by those of some rows. Returns the number of bytes that they take in the checkpoint.
    pub fn read(&mut self, rows: Range<usize>, values: &mut Vec<f32>) -> Result<usize, StoreError> {
        values.clear();
        if let Some(packed) = self.checkpoint.packed(&self.info.name) {
            for row in rows.clone() {
                packed
                    .unpack_row(self.checkpoint.mappings(), row, values)
                    .map_err(|reason| StoreError::Decode { tensor: self.info.name.clone(), reason })?;
            }
            return Ok(self.info.bytes as usize / self.rows.max(1) * rows.len());
        }
        // A span consists of equal rows, as its shape was checked for.
        let row_bytes = self.place.data.len / self.rows.max(1);
        let row_scale_bytes = self.place.scales.map_or(0, |scales| scales.len / self.rows.max(1));
        self.raw.resize(rows.len() * row_bytes, 0);
        self.checkpoint
            .file(self.place.data)
            .read_at(&mut self.raw, self.place.data.start + rows.start * row_bytes)?;
        self.raw_scales.resize(rows.len() * row_scale_bytes, 0);
        if let Some(span) = self.place.scales {
            let start = span.start + rows.start * row_scale_bytes;
            self.checkpoint.file(span).read_at(&mut self.raw_scales, start)?;
        }
        decode(self.info.encoding, self.inputs, &self.raw, &self.raw_scales, values);
        Ok(rows.len() * (row_bytes + row_scale_bytes))
    }
}
