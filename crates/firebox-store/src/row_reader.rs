//! Reads the rows of a tensor, as they are stored or as numbers.

use std::ops::Range;

use crate::checkpoint::Checkpoint;
use crate::encoding::{Encoding, TILE_ROWS};
use crate::error::StoreError;
use crate::excerpt::Shape;
use crate::tensor_index::{Place, Span, TensorInfo};
use crate::weight::decode;

/// Bytes of numbers in memory at a time: large enough to stream from a disk, small beside any model.
const PART_BYTES: usize = 4 << 20;

/// The longest row that can be quantized, because all rows of a tile are in memory together.
const MAX_ROW: usize = 1 << 20;

/// Reads the rows of a tensor. Reads of quantized rows begin with the first of a tile.
pub(crate) struct RowReader<'a> {
    checkpoint: &'a Checkpoint,
    pub(crate) info: &'a TensorInfo,
    place: Place,
    pub(crate) rows: usize,
    pub(crate) inputs: usize,
    /// What was read last, of the numbers and of their scales.
    data: Vec<u8>,
    scales: Vec<u8>,
}

impl<'a> RowReader<'a> {
    /// Reads any tensor. A vector of numbers has a row for each.
    pub(crate) fn new(checkpoint: &'a Checkpoint, name: &str) -> Result<Self, StoreError> {
        let (info, place) = checkpoint.entry(name)?;
        let (rows, inputs) = match (info.shape.as_slice(), info.encoding) {
            ([], _) => (1, 1),
            ([elements], Encoding::Plain(_)) => (*elements, 1),
            ([outer @ .., inputs], _) => (outer.iter().product(), *inputs),
        };
        let (data, scales) = Default::default();
        Ok(Self { checkpoint, info, place: *place, rows, inputs, data, scales })
    }

    /// Reads a matrix that is to be quantized.
    pub(crate) fn of_matrix(checkpoint: &'a Checkpoint, name: &str) -> Result<Self, StoreError> {
        let reader = Self::new(checkpoint, name)?;
        let fault = |reason: String| StoreError::Quantize { tensor: name.to_owned(), reason };
        let &[_, inputs] = reader.info.shape.as_slice() else {
            return Err(fault(format!("shape {:?} is not [out, in]", Shape(&reader.info.shape))));
        };
        if inputs == 0 || inputs > MAX_ROW {
            return Err(fault(format!("rows of {inputs} inputs; expected 1 to {MAX_ROW}")));
        }
        Ok(reader)
    }

    /// Consecutive parts of the rows, each of a multiple of `unit` rows but for the last one, and of bounded size.
    pub(crate) fn parts(&self, unit: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let part = (PART_BYTES / (self.inputs.max(1) * size_of::<f32>())).max(1).next_multiple_of(unit);
        let rows = self.rows;
        (0..rows).step_by(part).map(move |row| row..rows.min(row + part))
    }

    /// Parts of whole tiles.
    pub(crate) fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        self.parts(TILE_ROWS)
    }

    /// The number of bytes in the checkpoint that some rows are made from.
    pub(crate) fn stored_bytes(&self, rows: &Range<usize>) -> u64 {
        self.info.bytes * rows.len() as u64 / self.rows.max(1) as u64
    }

    /// The bytes of some rows and of their scales, of a tensor that is not packed.
    pub(crate) fn stored(&mut self, rows: &Range<usize>) -> Result<(&[u8], &[u8]), StoreError> {
        let Self { checkpoint, place, data, scales, .. } = self;
        let all = self.rows.max(1);
        // A span consists of equal rows, as its shape was checked for.
        let read = |span: Span, bytes: &mut Vec<u8>| {
            let row_bytes = span.len / all;
            bytes.resize(rows.len() * row_bytes, 0);
            checkpoint.file(span).read_at(bytes, span.start + rows.start * row_bytes)
        };
        read(place.data, data)?;
        place.scales.map_or(Ok(()), |span| read(span, scales))?;
        Ok((data, scales))
    }

    /// Replaces `values` by the numbers of some rows.
    pub(crate) fn numbers(&mut self, rows: &Range<usize>, values: &mut Vec<f32>) -> Result<(), StoreError> {
        values.clear();
        let (info, inputs) = (self.info, self.inputs);
        let Some(packed) = self.checkpoint.packed(&info.name) else {
            let (data, scales) = self.stored(rows)?;
            decode(info.encoding, inputs, data, scales, values);
            return Ok(());
        };
        for row in rows.clone() {
            packed
                .unpack_row(self.checkpoint.mappings(), row, values)
                .map_err(|reason| StoreError::Decode { tensor: info.name.clone(), reason })?;
        }
        Ok(())
    }
}
