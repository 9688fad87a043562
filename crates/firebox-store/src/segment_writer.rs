//! Writes the segments of a bundle from a checkpoint's tensors.
//!
//! Tensors pass through a bounded buffer, so memory depends neither on the size of the model nor on that of any tensor.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Seek, Write};
use std::path::PathBuf;

use crate::checkpoint::Checkpoint;
use crate::encoding::{Encoding, Quantization, TILE_ROWS};
use crate::error::StoreError;
use crate::excerpt::Shape;
use crate::files::File;
use crate::manifest::{ManifestSegment, ManifestTensor, file_of};
use crate::packed::PackedTensor;
use crate::progress::Progress;
use crate::quantize::{encode, is_quantized, quantize_tiles};
use crate::safetensors_writer::{FileLayout, TensorWriter};
use crate::segment::SegmentId;
use crate::tensor_index::{Place, Span, TensorInfo};
use crate::weight::decode;

/// Bytes of a tensor in memory at a time: large enough to stream from a disk, small beside any model.
const COPY_BUFFER_BYTES: usize = 4 << 20;

/// The longest row that can be quantized, because all rows of a tile are in memory together.
const MAX_ROW: usize = 1 << 20;

/// Writes the segments of a checkpoint in a bundle's format.
pub(crate) struct SegmentWriter<'a> {
    pub checkpoint: &'a Checkpoint,
    /// Quantizes projections and embeddings, if given.
    pub quantize: Option<Quantization>,
    /// Is told after every read.
    pub progress: &'a mut dyn FnMut(Progress),
    /// Bytes of the source that were processed.
    pub done: u64,
    /// Bytes of the source in total.
    pub total: u64,
    /// The number of tensors that were quantized.
    pub quantized: usize,
    /// Scales of the current tensor, which are stored after its values but computed along with them.
    pub spill: PathBuf,
}

impl SegmentWriter<'_> {
    /// The encoding of a tensor in the bundle.
    fn target(&self, info: &TensorInfo) -> Encoding {
        match self.quantize {
            Some(quantization) if is_quantized(info) => Encoding::Grouped(quantization),
            _ => info.encoding,
        }
    }

    /// Writes a segment with the writer that `begin` makes for its file.
    pub fn segment(
        &mut self,
        segment: SegmentId,
        begin: impl FnOnce(&str, FileLayout) -> Result<TensorWriter, StoreError>,
    ) -> Result<ManifestSegment, StoreError> {
        let infos: Vec<&TensorInfo> =
            self.checkpoint.tensors().filter(|info| info.segment == segment).collect();
        let mut layout = FileLayout::new(segment);
        let mut tensors = Vec::with_capacity(infos.len());
        for info in &infos {
            let encoding = self.target(info);
            layout
                .push_encoded(&info.name, &info.shape, encoding)
                .map_err(|reason| StoreError::Decode { tensor: info.name.clone(), reason })?;
            tensors.push(ManifestTensor { name: info.name.clone(), shape: info.shape.clone(), encoding });
        }
        let file = file_of(segment);
        let mut writer = begin(&file, layout)?;
        for info in infos {
            let (_, place) = self.checkpoint.entry(&info.name)?;
            let target = self.target(info);
            writer.next_tensor()?;
            if let Some(packed) = self.checkpoint.packed(&info.name) {
                self.unpack(info, packed, target, &mut writer)?;
                continue;
            }
            match target {
                Encoding::Grouped(quantization) if target != info.encoding => {
                    self.quantize(info, *place, quantization, &mut writer)?;
                }
                _ => {
                    self.copy(&info.name, place.data, &mut writer)?;
                    if let Some(scales) = place.scales {
                        writer.next_tensor()?;
                        self.copy(&info.name, scales, &mut writer)?;
                    }
                }
            }
        }
        let (bytes, hash) = writer.finish()?;
        Ok(ManifestSegment { id: segment.to_string(), file, bytes, hash, tensors })
    }

    fn copy(&mut self, name: &str, span: Span, writer: &mut TensorWriter) -> Result<(), StoreError> {
        let source = self.checkpoint.file(span);
        let mut buffer = vec![0; span.len.min(COPY_BUFFER_BYTES)];
        let mut at = 0;
        while at < span.len {
            let len = buffer.len().min(span.len - at);
            source.read_at(&mut buffer[..len], span.start + at)?;
            writer.write(&buffer[..len])?;
            at += len;
            self.advance(name, len);
        }
        Ok(())
    }

    fn quantize(
        &mut self,
        info: &TensorInfo,
        place: Place,
        quantization: Quantization,
        writer: &mut TensorWriter,
    ) -> Result<(), StoreError> {
        let fault = |reason: String| StoreError::Quantize { tensor: info.name.clone(), reason };
        let &[rows, inputs] = info.shape.as_slice() else {
            return Err(fault(format!("shape {:?} is not [out, in]", Shape(&info.shape))));
        };
        if inputs == 0 || inputs > MAX_ROW {
            return Err(fault(format!("rows of {inputs} inputs; expected 1 to {MAX_ROW}")));
        }
        // A span consists of equal rows, as its shape was checked for.
        let row_bytes = place.data.len / rows.max(1);
        let row_scale_bytes = place.scales.map_or(0, |scales| scales.len / rows.max(1));
        // Read and written in whole tiles.
        let chunk = (COPY_BUFFER_BYTES / (inputs * size_of::<f32>()))
            .max(1)
            .next_multiple_of(TILE_ROWS)
            .min(rows.max(1));
        let mut spill = self.open_spill()?;
        let mut raw = vec![0; chunk * row_bytes];
        let mut raw_scales = vec![0; chunk * row_scale_bytes];
        let (mut values, mut packed, mut scales) = (Vec::new(), Vec::new(), Vec::new());
        let mut row = 0;
        while row < rows {
            let count = chunk.min(rows - row);
            let raw = &mut raw[..count * row_bytes];
            self.checkpoint.file(place.data).read_at(raw, place.data.start + row * row_bytes)?;
            let raw_scales = &mut raw_scales[..count * row_scale_bytes];
            if let Some(span) = place.scales {
                self.checkpoint.file(span).read_at(raw_scales, span.start + row * row_scale_bytes)?;
            }
            values.clear();
            packed.clear();
            scales.clear();
            decode(info.encoding, inputs, raw, raw_scales, &mut values);
            quantize_tiles(quantization, &values, inputs, &mut packed, &mut scales)
                .map_err(|(at, reason)| fault(format!("row {}: {reason}", row + at)))?;
            writer.write(&packed)?;
            spill.write_all(&scales).map_err(|error| StoreError::io(&self.spill, "write", error))?;
            row += count;
            self.advance(&info.name, count * (row_bytes + row_scale_bytes));
        }
        writer.next_tensor()?;
        self.append_spill(spill, writer)?;
        self.quantized += 1;
        Ok(())
    }

    /// Unpacks a tensor to floats or blocks, or quantizes it anew.
    fn unpack(
        &mut self,
        info: &TensorInfo,
        packed: &PackedTensor,
        target: Encoding,
        writer: &mut TensorWriter,
    ) -> Result<(), StoreError> {
        let (rows, inputs) = (packed.rows(), packed.inputs());
        if inputs > MAX_ROW {
            let reason = format!("rows of {inputs} inputs; expected up to {MAX_ROW}");
            return Err(StoreError::Quantize { tensor: info.name.clone(), reason });
        }
        let chunk =
            (COPY_BUFFER_BYTES / (inputs.max(1) * size_of::<f32>())).max(1).next_multiple_of(TILE_ROWS);
        let mut spill = if let Encoding::Grouped(_) = target { Some(self.open_spill()?) } else { None };
        let mut values = Vec::new();
        let mut row = 0;
        while row < rows {
            let end = rows.min(row + chunk);
            if let Encoding::Block(_) = target {
                let mut blocks = Vec::new();
                (row..end).for_each(|row| packed.unpack_blocks(self.checkpoint.mappings(), row, &mut blocks));
                writer.write(&blocks)?;
                self.advance(&info.name, info.bytes as usize / rows * (end - row));
                row = end;
                continue;
            }
            values.clear();
            for row in row..end {
                packed
                    .unpack_row(self.checkpoint.mappings(), row, &mut values)
                    .map_err(|reason| StoreError::Decode { tensor: info.name.clone(), reason })?;
            }
            let written = encode(&info.name, &values, &[end - row, inputs], target)?;
            writer.write(&written.data)?;
            if let (Some(spill), Some(scales)) = (&mut spill, &written.scales) {
                spill.write_all(scales).map_err(|error| StoreError::io(&self.spill, "write", error))?;
            }
            self.advance(&info.name, info.bytes as usize / rows * (end - row));
            row = end;
        }
        if let Some(spill) = spill {
            writer.next_tensor()?;
            self.append_spill(spill, writer)?;
            self.quantized += 1;
        }
        Ok(())
    }

    fn open_spill(&self) -> Result<File, StoreError> {
        let mut options = fs::File::options();
        options.read(true).write(true).create(true).truncate(true);
        File::open_with(&self.spill, &options).map_err(|error| StoreError::io(&self.spill, "create", error))
    }

    fn append_spill(&self, mut spill: File, writer: &mut TensorWriter) -> Result<(), StoreError> {
        let fault = |error| StoreError::io(&self.spill, "read", error);
        spill.rewind().map_err(fault)?;
        let mut buffer = vec![0; 256 << 10];
        loop {
            let len = spill.read(&mut buffer).map_err(fault)?;
            if len == 0 {
                return Ok(());
            }
            writer.write(&buffer[..len])?;
        }
    }

    fn advance(&mut self, item: &str, bytes: usize) {
        self.done += bytes as u64;
        (self.progress)(Progress { item: item.to_owned(), done: self.done, total: self.total });
    }
}

/// The hash of a segment's file in an unquantized bundle, computed without writing one.
pub(crate) fn segment_hash(checkpoint: &Checkpoint, segment: SegmentId) -> Result<String, StoreError> {
    let mut writer = SegmentWriter {
        checkpoint,
        quantize: None,
        progress: &mut |_| {},
        done: 0,
        total: 0,
        quantized: 0,
        spill: PathBuf::new(),
    };
    let written = writer
        .segment(segment, |file, layout| TensorWriter::hashing(&checkpoint.path().join(file), layout))?;
    Ok(written.hash)
}

/// The segments of a checkpoint.
pub(crate) fn segment_ids(checkpoint: &Checkpoint) -> BTreeSet<SegmentId> {
    checkpoint.tensors().map(|info| info.segment).collect()
}
