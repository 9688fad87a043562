//! Conversion of any checkpoint to a bundle.
//!
//! Tensors pass through a bounded buffer, so memory depends neither on the size of the model nor on that of any tensor. All
//! files are written beside the destination, made durable, and renamed into place at the end: a bundle that can be opened is
//! complete, and an interrupted one has no manifest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::checkpoint::{Checkpoint, combined_hash};
use crate::encoding::{Encoding, Quantization};
use crate::encodings::Encodings;
use crate::error::StoreError;
use crate::files;
use crate::folder::{Folder, MAX_JSON, MAX_TOKENIZER};
use crate::gguf::opening::Purpose;
use crate::importance::Importance;
use crate::manifest::{MANIFEST, Manifest, ManifestSegment};
use crate::partial::{PartialFolder, sync_folder};
use crate::parts::SourceKind;
use crate::progress::Progress;
use crate::safetensors_writer::TensorWriter;
use crate::segment::SegmentId;
use crate::segment_writer::{SegmentWriter, segment_ids};
use crate::text::{CHAT_TEMPLATE, GENERATION_CONFIG, GGUF_VOCABULARY, TOOLS_TEMPLATE, TokenizerSource};
use crate::{expert_stacks, heads, packed};

/// Files that are copied into the bundle unchanged.
pub(crate) const COPIED_FILES: [&str; 18] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    GENERATION_CONFIG,
    CHAT_TEMPLATE,
    TOOLS_TEMPLATE,
    "chat_template.json",
    // Modules of sentence-transformers behind the encoder.
    "modules.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "3_Dense/config.json",
    "3_Dense/model.safetensors",
    GGUF_VOCABULARY,
];

/// Options of an import.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ImportOptions {
    /// Quantizes projections and embeddings, if given.
    pub quantize: Option<Quantization>,
    /// What their inputs are like, so that errors are small where inputs are large.
    pub importance: Option<Arc<Importance>>,
    /// Stores some matrices in eight bits, those that lose most by four, until quantized weights take so many bits on average.
    pub target_bits: Option<f64>,
}

impl From<Option<Quantization>> for ImportOptions {
    fn from(quantize: Option<Quantization>) -> Self {
        Self { quantize, ..Self::default() }
    }
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
    /// How many of them were quantized by the importance of their inputs.
    pub calibrated: usize,
    /// How many of them were stored in eight bits for [`ImportOptions::target_bits`].
    pub wide: usize,
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
    let mut parts = Checkpoint::parts(source.as_ref(), Purpose::Import)?;
    if options.quantize.is_some() {
        // Groups lie along the inputs.
        expert_stacks::turn(&mut parts);
    }
    let checkpoint = Checkpoint::new(parts)?;
    let heads_left = heads::installed_names(&checkpoint)?;
    let encodings = Encodings::new(options.quantize, options.importance.as_deref());
    let encodings = match options.target_bits {
        Some(bits) => encodings.mixed(&checkpoint, bits)?,
        None => encodings,
    };
    let partial = PartialFolder::create(destination)?;
    let mut writer = SegmentWriter {
        checkpoint: &checkpoint,
        encodings,
        progress,
        done: 0,
        total: checkpoint.tensors().map(|info| info.bytes).sum(),
        quantized: 0,
        calibrated: 0,
        spill: partial.path.join("scales.tmp"),
    };

    let segments_folder = partial.path.join("segments");
    files::create_folder(&segments_folder)
        .map_err(|error| StoreError::io(&segments_folder, "create", error))?;
    let mut segments = Vec::new();
    for segment in segment_ids(&checkpoint) {
        segments.push(
            writer.segment(segment, |file, layout| TensorWriter::create(&partial.path.join(file), layout))?,
        );
    }
    if writer.spill.exists() {
        files::remove_file(&writer.spill).map_err(|error| StoreError::io(&writer.spill, "remove", error))?;
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
        quantized: writer.quantized,
        calibrated: writer.calibrated,
        wide: writer.encodings.wide(),
        bytes_read: writer.done,
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

/// Removes what says that weights are packed, because a bundle's are not.
pub(crate) fn remove_packing(config: &mut Value) {
    let Value::Object(fields) = config else { return };
    for key in packed::CONFIG_KEYS {
        fields.remove(key);
    }
    for within in ["text_config", "llm_config"] {
        if let Some(within) = fields.get_mut(within) {
            remove_packing(within);
        }
    }
}

/// Writes `config.json`, unchanged if the source had one. Returns the configuration that a reader will find.
fn write_config(checkpoint: &Checkpoint, folder: &Path) -> Result<Value, StoreError> {
    let path = folder.join("config.json");
    if checkpoint.source() != SourceKind::Gguf
        && !checkpoint.tensors().any(|info| checkpoint.packed(&info.name).is_some())
        && let Some(bytes) = Folder::open(checkpoint.path())?.read("config.json", MAX_JSON)?
    {
        write_file(&path, &bytes)?;
    } else {
        let mut config = checkpoint.config().clone();
        remove_packing(&mut config);
        write_json(&path, &config)?;
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
        if let Some(recommended) = &text.generation_config {
            write_json(&folder.join(GENERATION_CONFIG), recommended)?;
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
pub(crate) fn write_below(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
    let path = folder.join(name);
    let below = files::parent(&path);
    if below == folder {
        return write_file(&path, bytes);
    }
    files::create_folders(below).map_err(|error| StoreError::io(below, "create", error))?;
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
