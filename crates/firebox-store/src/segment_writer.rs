//! Writes the segments of a bundle from a checkpoint's tensors.
//!
//! Tensors pass through a bounded buffer, so memory depends neither on the size of the model nor on that of any tensor.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Seek, Write};
use std::path::PathBuf;

use crate::checkpoint::Checkpoint;
use crate::encoding::{Encoding, Quantization};
use crate::encodings::Encodings;
use crate::error::StoreError;
use crate::files::File;
use crate::manifest::{ManifestSegment, ManifestTensor, file_of};
use crate::progress::Progress;
use crate::quantize::quantize_tiles;
use crate::row_reader::RowReader;
use crate::safetensors_writer::{FileLayout, TensorWriter};
use crate::segment::SegmentId;
use crate::tensor_index::{Span, TensorInfo};
use crate::tensor_rows::{Conversion, TensorRows};

/// Bytes of a tensor that are copied at a time: enough to stream from a disk, small beside any model.
const COPIED_BYTES: usize = 4 << 20;

/// Writes the segments of a checkpoint in a bundle's format.
pub(crate) struct SegmentWriter<'a> {
    pub checkpoint: &'a Checkpoint,
    /// What tensors are encoded as.
    pub encodings: Encodings<'a>,
    /// Is told after every read.
    pub progress: &'a mut dyn FnMut(Progress),
    /// Bytes of the source that were processed.
    pub done: u64,
    /// Bytes of the source in total.
    pub total: u64,
    /// The number of tensors that were quantized.
    pub quantized: usize,
    /// How many of them were quantized by the importance of their inputs.
    pub calibrated: usize,
    /// Scales of the current tensor, which are stored after its values but computed along with them.
    pub spill: PathBuf,
}

impl SegmentWriter<'_> {
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
            let encoding = self.encodings.of(info);
            layout
                .push_encoded(&info.name, &info.shape, encoding)
                .map_err(|reason| StoreError::Decode { tensor: info.name.clone(), reason })?;
            tensors.push(ManifestTensor { name: info.name.clone(), shape: info.shape.clone(), encoding });
        }
        let file = file_of(segment);
        let mut writer = begin(&file, layout)?;
        for info in infos {
            let (_, place) = self.checkpoint.entry(&info.name)?;
            let target = self.encodings.of(info);
            writer.next_tensor()?;
            match (target, self.checkpoint.packed(&info.name)) {
                (Encoding::Grouped(quantization), _) if target != info.encoding => {
                    self.quantize(info, quantization, &mut writer)?;
                }
                (_, Some(_)) => self.unpack(info, target, &mut writer)?,
                (_, None) => {
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
        let mut buffer = vec![0; span.len.min(COPIED_BYTES)];
        let mut at = 0;
        while at < span.len {
            let len = buffer.len().min(span.len - at);
            source.read_at(&mut buffer[..len], span.start + at)?;
            writer.write(&buffer[..len])?;
            at += len;
            self.advance(name, len as u64);
        }
        Ok(())
    }

    fn quantize(
        &mut self,
        info: &TensorInfo,
        quantization: Quantization,
        writer: &mut TensorWriter,
    ) -> Result<(), StoreError> {
        let fault = |reason: String| StoreError::Quantize { tensor: info.name.clone(), reason };
        let mut reader = RowReader::of_matrix(self.checkpoint, &info.name)?;
        let importance = self.encodings.importance_of(info)?;
        let mut spill = self.open_spill()?;
        let (mut values, mut packed, mut scales) = (Vec::new(), Vec::new(), Vec::new());
        for rows in reader.tiles() {
            packed.clear();
            scales.clear();
            reader.numbers(&rows, &mut values)?;
            quantize_tiles(quantization, &values, reader.inputs, importance, &mut packed, &mut scales)
                .map_err(|(at, reason)| fault(format!("row {}: {reason}", rows.start + at)))?;
            writer.write(&packed)?;
            spill.write_all(&scales).map_err(|error| StoreError::io(&self.spill, "write", error))?;
            self.advance(&info.name, reader.stored_bytes(&rows));
        }
        writer.next_tensor()?;
        self.append_spill(spill, writer)?;
        self.quantized += 1;
        self.calibrated += usize::from(importance.is_some());
        Ok(())
    }

    /// Unpacks a tensor to floats or blocks.
    fn unpack(
        &mut self,
        info: &TensorInfo,
        target: Encoding,
        writer: &mut TensorWriter,
    ) -> Result<(), StoreError> {
        let tensor = TensorRows::new(self.checkpoint, &info.name, Conversion::none(target))?;
        tensor.for_each_part(|bytes, stored| {
            writer.write(bytes)?;
            self.advance(&info.name, stored);
            Ok(())
        })
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

    fn advance(&mut self, item: &str, bytes: u64) {
        self.done += bytes;
        (self.progress)(Progress { item: item.to_owned(), done: self.done, total: self.total });
    }
}

/// The hash of a segment's file in an unquantized bundle, computed without writing one.
pub(crate) fn segment_hash(checkpoint: &Checkpoint, segment: SegmentId) -> Result<String, StoreError> {
    let mut writer = SegmentWriter {
        checkpoint,
        encodings: Encodings::default(),
        progress: &mut |_| {},
        done: 0,
        total: 0,
        quantized: 0,
        calibrated: 0,
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
