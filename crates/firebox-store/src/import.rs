//! Conversion of any checkpoint to a bundle.
//!
//! Tensors pass through a bounded buffer, so memory depends neither on the size of the model nor on that of any tensor. All
//! files are written beside the destination, made durable, and renamed into place at the end: a bundle that can be opened is
//! complete, and an interrupted one has no manifest.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::catalog::{Place, Span, TensorInfo};
use crate::checkpoint::{Checkpoint, SourceKind, combined_hash};
use crate::encoding::{Encoding, Quantization, TILE_ROWS};
use crate::error::StoreError;
use crate::excerpt::Shape;
use crate::files::{self, File};
use crate::folder::{Folder, MAX_JSON, MAX_TOKENIZER};
use crate::heads;
use crate::manifest::{MANIFEST, Manifest, ManifestSegment, ManifestTensor, file_of};
use crate::partial::{PartialFolder, sync_folder};
use crate::quantize::{is_quantized, quantize_tiles};
use crate::segment::SegmentId;
use crate::text::{CHAT_TEMPLATE, GGUF_VOCABULARY, TOOLS_TEMPLATE, TokenizerSource};
use crate::weight::decode;
use crate::writer::{FileLayout, TensorWriter};

/// Bytes of a tensor in memory at a time: large enough to stream from a disk, small beside any model.
const COPY_BUFFER_BYTES: usize = 4 << 20;

/// The longest row that can be quantized, because all rows of a tile are in memory together.
const MAX_ROW: usize = 1 << 20;

/// Files that are copied into the bundle unchanged.
const COPIED_FILES: [&str; 13] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    CHAT_TEMPLATE,
    TOOLS_TEMPLATE,
    "chat_template.json",
    // The pooling configuration of sentence transformers.
    "1_Pooling/config.json",
    GGUF_VOCABULARY,
];

/// Options of an import.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// Quantizes projections and embeddings, if given.
    pub quantize: Option<Quantization>,
}

/// The progress of an import or a verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// The current tensor or segment.
    pub item: String,
    /// Bytes of the source that were processed.
    pub done: u64,
    /// Bytes of the source in total.
    pub total: u64,
}

/// The result of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportReport {
    /// The bundle.
    pub path: PathBuf,
    /// The number of segments.
    pub segments: usize,
    /// The number of tensors.
    pub tensors: usize,
    /// The number of tensors quantized by the import.
    pub quantized: usize,
    /// Bytes of tensors read.
    pub bytes_read: u64,
    /// Bytes of segment files written.
    pub bytes_written: u64,
    /// The hash of the bundle; see [`Checkpoint::hash`].
    pub hash: String,
    /// Heads of the source that were left out, because they are bound to the source's trunk.
    pub heads_left: Vec<String>,
}

/// Writes a bundle of the model at `source` to the new directory `destination`.
///
/// The source's [heads](crate::Heads) are left out, and the report names them. An unquantized import keeps the trunk's hash,
/// so they can be installed in the bundle from the source's folders; otherwise they have to be trained for the new trunk.
pub fn import(
    source: impl AsRef<Path>,
    destination: impl AsRef<Path>,
    options: &ImportOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ImportReport, StoreError> {
    let destination = destination.as_ref();
    if let Some(quantization) = &options.quantize {
        quantization.check().map_err(|reason| StoreError::Quantize { tensor: "(all)".into(), reason })?;
    }
    let checkpoint = Checkpoint::open(source)?;
    let heads_left = heads::installed(&checkpoint)?;
    let partial = PartialFolder::create(destination)?;
    let mut import = Import {
        checkpoint: &checkpoint,
        options,
        progress,
        done: 0,
        total: checkpoint.tensors().map(|info| info.bytes).sum(),
        quantized: 0,
        spill: partial.path.join("scales.tmp"),
    };

    let segments_folder = partial.path.join("segments");
    files::create_folder(&segments_folder)
        .map_err(|error| StoreError::io(&segments_folder, "create", error))?;
    let mut segments = Vec::new();
    for segment in segment_ids(&checkpoint) {
        segments.push(
            import.segment(segment, |file, layout| TensorWriter::create(&partial.path.join(file), layout))?,
        );
    }
    if import.spill.exists() {
        files::remove_file(&import.spill).map_err(|error| StoreError::io(&import.spill, "remove", error))?;
    }
    sync_folder(&segments_folder)?;

    let config = write_config(&checkpoint, &partial.path)?;
    write_text(&checkpoint, &partial.path)?;
    let hashes: BTreeMap<SegmentId, String> = segment_ids(&checkpoint)
        .into_iter()
        .zip(&segments)
        .map(|(id, segment)| (id, segment.hash.clone()))
        .collect();
    let hash = combined_hash(&config, hashes.iter());
    let report = ImportReport {
        path: destination.to_owned(),
        segments: segments.len(),
        tensors: checkpoint.tensors().count(),
        quantized: import.quantized,
        bytes_read: import.done,
        bytes_written: segments.iter().map(|segment| segment.bytes).sum(),
        hash: hash.clone(),
        heads_left,
    };
    write_index(&segments, &partial.path)?;
    let quantization = options.quantize.or(checkpoint.quantization());
    let architecture = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let source = match checkpoint.source() {
        SourceKind::HuggingFace => "huggingface",
        SourceKind::Gguf => "gguf",
        SourceKind::Bundle => "bundle",
    };
    let manifest = Manifest::new(architecture, source, quantization, hash, segments);
    // Written last, because a directory with a manifest counts as a bundle.
    write_json(&partial.path.join(MANIFEST), &manifest)?;
    partial.publish(destination)?;
    Ok(report)
}

/// The hash of a segment's file in an unquantized bundle, computed without writing one.
pub(crate) fn segment_hash(checkpoint: &Checkpoint, segment: SegmentId) -> Result<String, StoreError> {
    let mut import = Import {
        checkpoint,
        options: &ImportOptions::default(),
        progress: &mut |_| {},
        done: 0,
        total: 0,
        quantized: 0,
        spill: PathBuf::new(),
    };
    let written = import
        .segment(segment, |file, layout| TensorWriter::hashing(&checkpoint.path().join(file), layout))?;
    Ok(written.hash)
}

pub(crate) fn segment_ids(checkpoint: &Checkpoint) -> BTreeSet<SegmentId> {
    checkpoint.tensors().map(|info| info.segment).collect()
}

struct Import<'a> {
    checkpoint: &'a Checkpoint,
    options: &'a ImportOptions,
    progress: &'a mut dyn FnMut(Progress),
    done: u64,
    total: u64,
    quantized: usize,
    /// Scales of the current tensor, which are stored after its values but computed along with them.
    spill: PathBuf,
}

impl Import<'_> {
    /// The encoding of a tensor in the bundle.
    fn target(&self, info: &TensorInfo) -> Encoding {
        match self.options.quantize {
            Some(quantization) if is_quantized(info) => Encoding::Grouped(quantization),
            _ => info.encoding,
        }
    }

    fn segment(
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

/// Writes `config.json`, unchanged if the source had one. Returns the configuration that a reader will find.
fn write_config(checkpoint: &Checkpoint, folder: &Path) -> Result<Value, StoreError> {
    let path = folder.join("config.json");
    if checkpoint.source() != SourceKind::Gguf
        && let Some(bytes) = Folder::open(checkpoint.path())?.read("config.json", MAX_JSON)?
    {
        write_file(&path, &bytes)?;
    } else {
        write_json(&path, checkpoint.config())?;
    }
    // Read back rather than assumed: the hash must be the same whenever the bundle is opened.
    Folder::open(folder)?.read_object("config.json", MAX_JSON)?.ok_or_else(|| StoreError::NotAModel {
        path,
        reason: "it has just been written and is gone; something else is working in this directory".into(),
    })
}

fn write_text(checkpoint: &Checkpoint, folder: &Path) -> Result<(), StoreError> {
    if checkpoint.source() == SourceKind::Gguf {
        let text = checkpoint.text();
        if let Some(TokenizerSource::Gguf(vocabulary)) = &text.tokenizer {
            write_json(&folder.join(GGUF_VOCABULARY), vocabulary)?;
        }
        for (name, template) in [(CHAT_TEMPLATE, &text.chat_template), (TOOLS_TEMPLATE, &text.tools_template)]
        {
            if let Some(template) = template {
                write_below(folder, name, template.as_bytes())?;
            }
        }
        return Ok(());
    }
    let source = Folder::open(checkpoint.path())?;
    for name in COPIED_FILES {
        let Some(bytes) = source.read(name, MAX_TOKENIZER)? else { continue };
        write_below(folder, name, &bytes)?;
    }
    Ok(())
}

/// Writes a file into a folder, and creates its subfolder if needed.
fn write_below(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
    let path = folder.join(name);
    let below = files::parent(&path);
    if below == folder {
        return write_file(&path, bytes);
    }
    files::create_folder(below).map_err(|error| StoreError::io(below, "create", error))?;
    write_file(&path, bytes)?;
    sync_folder(below)
}

/// Writes the index by which Hugging Face tools find tensors in shards, if all encodings are known to them.
fn write_index(segments: &[ManifestSegment], folder: &Path) -> Result<(), StoreError> {
    let tensors =
        || segments.iter().flat_map(|segment| segment.tensors.iter().map(move |tensor| (segment, tensor)));
    if !tensors().all(|(_, tensor)| matches!(tensor.encoding, Encoding::Plain(_))) {
        return Ok(());
    }
    let map: serde_json::Map<String, Value> =
        tensors().map(|(segment, tensor)| (tensor.name.clone(), segment.file.as_str().into())).collect();
    let total: u64 = segments.iter().map(|segment| segment.bytes).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    write_json(&folder.join("model.safetensors.index.json"), &index)
}

pub(crate) fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<(), StoreError> {
    let mut bytes =
        serde_json::to_vec_pretty(value).map_err(|error| StoreError::io(path, "write", error.into()))?;
    bytes.push(b'\n');
    write_file(path, &bytes)
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    files::write(path, bytes).map_err(|error| StoreError::io(path, "write", error))
}
