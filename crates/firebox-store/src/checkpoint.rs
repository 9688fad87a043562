//! A model on disk in any supported format.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use crate::encoding::{Encoding, Quantization};
use crate::error::StoreError;
use crate::gguf::opening::{self, Purpose};
use crate::mapping::Mapping;
use crate::packed::PackedTensor;
use crate::parts::{Parts, SourceKind};
use crate::quantize::encode;
use crate::segment::{Segment, SegmentId};
use crate::tensor_index::{Place, Span, TensorIndex, TensorInfo};
use crate::text::TextAssets;
use crate::weight::Weight;
use crate::{bundle, huggingface};

/// Bytes per sample of a [fingerprint](Checkpoint::fingerprint), and samples per tensor. Few, because each may read a page
/// from disk.
const FINGERPRINT_SAMPLE_BYTES: usize = 256;
const FINGERPRINT_SAMPLES: usize = 4;

struct Inner {
    source: SourceKind,
    config: Value,
    index: TensorIndex,
    quantization: Option<Quantization>,
    packed: BTreeMap<String, PackedTensor>,
    hashes: BTreeMap<SegmentId, String>,
}

/// An open model: its configuration, its text assets and its tensors under Hugging Face names.
///
/// Opening maps the files and reads their headers, never the weights. Clones share everything.
#[derive(Clone)]
pub struct Checkpoint {
    inner: Arc<Inner>,
    text: Arc<TextAssets>,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint")
            .field("path", &self.path())
            .field("source", &self.source())
            .field("tensors", &self.inner.index.tensors().len())
            .finish()
    }
}

impl Checkpoint {
    /// Opens a Hugging Face directory, a GGUF file or a bundle. Of a split GGUF model any part opens all, and a directory
    /// with one GGUF model opens that.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_for(path.as_ref(), Purpose::Model)
    }

    /// [Opens](Self::open) a model to tokenize with: a GGUF file that holds nothing but a vocabulary is enough.
    pub fn open_text(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_for(path.as_ref(), Purpose::Text)
    }

    /// [Opens](Self::open) a model to look at its parts: tensors that have to be [imported](crate::import()) before they
    /// can be read are listed too.
    pub fn open_listing(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_for(path.as_ref(), Purpose::Listing)
    }

    pub(crate) fn open_for(path: &Path, purpose: Purpose) -> Result<Self, StoreError> {
        Self::new(Self::parts(path, purpose)?)
    }

    /// Opens the parts of a model.
    pub(crate) fn parts(path: &Path, purpose: Purpose) -> Result<Parts, StoreError> {
        let metadata = std::fs::metadata(path).map_err(|error| StoreError::io(path, "open", error))?;
        let parts = if !metadata.is_dir() {
            opening::open(path, purpose)?
        } else if bundle::is_bundle(path) {
            bundle::open(path)?
        } else if huggingface::has_weights(path)? {
            huggingface::open(path)?
        } else if let Some(model) = opening::in_folder(path)? {
            opening::open(&model, purpose)?
        } else {
            // Tells what is missing.
            huggingface::open(path)?
        };
        if let Some(packed) = parts.packed.values().next().filter(|_| purpose == Purpose::Model) {
            // Blocks stay as they are.
            let smaller = match packed.encoding() {
                Encoding::Plain(_) => ", with --quantize q4 if it is to be as small",
                _ => "",
            };
            let (kind, source) = (&packed.name, path.display());
            let reason = format!(
                "weights are packed as {kind}; write a bundle with `firebox import {source} DST`{smaller}, and open that"
            );
            let file = path.join("config.json");
            return Err(StoreError::Unsupported { file, field: "quantization_config".into(), reason });
        }
        Ok(parts)
    }

    /// How a tensor is packed, if an import has to unpack it before it can be read.
    pub fn packed_as(&self, name: &str) -> Option<&str> {
        self.packed(name).map(|packed| packed.name.as_str())
    }

    pub(crate) fn packed(&self, name: &str) -> Option<&PackedTensor> {
        self.inner.packed.get(name)
    }

    pub(crate) fn new(parts: Parts) -> Result<Self, StoreError> {
        let Parts { path, source, config, text, files, tensors, quantization, packed, hashes } = parts;
        let index = TensorIndex::new(path, files, tensors)?;
        let inner = Inner { source, config, index, quantization, packed, hashes };
        Ok(Self { inner: Arc::new(inner), text: Arc::new(text) })
    }

    /// The path it was opened from.
    pub fn path(&self) -> &Path {
        self.inner.index.path()
    }

    /// The format it was opened from.
    pub fn source(&self) -> SourceKind {
        self.inner.source
    }

    /// The Hugging Face `config.json`; for a GGUF file, one derived from its metadata.
    ///
    /// A derived configuration has an object `firebox` that names the GGUF conventions of the weights; see
    /// [`gguf`](crate::gguf).
    pub fn config(&self) -> &Value {
        &self.inner.config
    }

    /// Every tensor, in the order of a forward pass and by name within a segment.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.inner.index.infos()
    }

    /// The tensor of that name.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.inner.index.info(name)
    }

    /// A tensor's bytes as stored: a slice of the mapping, read from disk when touched.
    pub fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        if let Some(packed) = self.packed(name) {
            return self.unpack(name, packed);
        }
        self.inner.index.weight(name)
    }

    /// Unpacks a whole tensor.
    fn unpack(&self, name: &str, packed: &PackedTensor) -> Result<Weight, StoreError> {
        if let encoding @ Encoding::Block(_) = packed.encoding() {
            let mut blocks = Vec::new();
            (0..packed.rows()).for_each(|row| packed.unpack_blocks(self.mappings(), row, &mut blocks));
            let (name, shape) = (name.to_owned(), packed.shape.clone());
            return Ok(Weight { name, shape, encoding, data: blocks.into(), scales: None, mapped: false });
        }
        let mut values = Vec::new();
        for row in 0..packed.rows() {
            packed
                .unpack_row(self.inner.index.files(), row, &mut values)
                .map_err(|reason| StoreError::Decode { tensor: name.to_owned(), reason })?;
        }
        encode(name, &values, &packed.shape, Encoding::Plain(packed.dtype))
    }

    pub(crate) fn mappings(&self) -> &[Mapping] {
        self.inner.index.files()
    }

    /// The segments of the model, in the order of a forward pass.
    pub fn segments(&self) -> Vec<Segment> {
        let Inner { index, hashes, .. } = &*self.inner;
        let mut segments: Vec<Segment> = Vec::new();
        for (info, place) in index.tensors() {
            if segments.last().is_none_or(|segment| segment.id != info.segment) {
                segments.push(Segment {
                    id: info.segment,
                    files: Vec::new(),
                    tensors: Vec::new(),
                    bytes: 0,
                    hash: hashes.get(&info.segment).cloned(),
                });
            }
            // The line above ensures that there is one.
            let Some(segment) = segments.last_mut() else { continue };
            segment.tensors.push(info.name.clone());
            segment.bytes += info.bytes;
            for span in place.spans() {
                let path = index.file(span).path();
                if !segment.files.iter().any(|known| known == path) {
                    segment.files.push(path.to_owned());
                }
            }
        }
        segments
    }

    /// The text side of the model.
    pub fn text(&self) -> &TextAssets {
        &self.text
    }

    /// Drops its files from memory, and from the page cache unless another process has them mapped. Later accesses read from
    /// the disk again.
    pub fn evict(&self) -> Result<(), StoreError> {
        self.inner.index.files().iter().try_for_each(Mapping::evict)
    }

    /// The same model without the source of its tokenizer, which takes tens of megabytes and is not needed once the tokenizer
    /// is built.
    pub fn without_tokenizer(mut self) -> Self {
        let text = TextAssets {
            tokenizer: None,
            chat_template: self.text.chat_template.clone(),
            tools_template: self.text.tools_template.clone(),
            tokenizer_config: self.text.tokenizer_config.clone(),
            generation_config: self.text.generation_config.clone(),
            special_tokens_map: self.text.special_tokens_map.clone(),
        };
        self.text = Arc::new(text);
        self
    }

    /// The scheme that an import quantized the model with.
    pub fn quantization(&self) -> Option<Quantization> {
        self.inner.quantization
    }

    /// The hash over the configuration and all segments; known for bundles only.
    pub fn hash(&self) -> Option<String> {
        self.hash_of(|_| true)
    }

    /// The hash of the trunk that ends before block `layers`, to which heads are bound; known for bundles only.
    pub fn trunk_hash(&self, layers: usize) -> Option<String> {
        self.hash_of(|segment| segment.in_trunk(layers))
    }

    /// Identifies the trunk that ends before block `layers`: its hash, for bundles.
    ///
    /// Other formats carry no hashes, and hashing would read the whole model. For them the identity is computed from the
    /// configuration, from names, shapes and encodings, and from samples of every tensor. A copy has the same fingerprint
    /// and a retrained model another one, but a change of a few numbers may go unnoticed; [`import`](crate::import()) the
    /// model to have such changes detected.
    pub fn fingerprint(&self, layers: usize) -> Result<String, StoreError> {
        if let Some(hash) = self.trunk_hash(layers) {
            return Ok(hash);
        }
        let Inner { config, index, .. } = &*self.inner;
        let mut hasher = blake3::Hasher::new();
        hasher.update(sorted(config).as_bytes());
        for (info, place) in index.tensors().iter().filter(|(info, _)| info.segment.in_trunk(layers)) {
            hasher.update(format!("\n{:?} {:?} {}\n", info.name, info.shape, info.encoding).as_bytes());
            for span in place.spans() {
                let last = span.len.saturating_sub(FINGERPRINT_SAMPLE_BYTES);
                let mut sample = [0; FINGERPRINT_SAMPLE_BYTES];
                let sample = &mut sample[..span.len.min(FINGERPRINT_SAMPLE_BYTES)];
                for at in 0..FINGERPRINT_SAMPLES {
                    // Read by position: a truncated file is an error then, where an access to the mapping would end the process.
                    self.file(span).read_at(sample, span.start + last / (FINGERPRINT_SAMPLES - 1) * at)?;
                    hasher.update(sample);
                }
            }
        }
        Ok(hasher.finalize().to_hex().to_string())
    }

    fn hash_of(&self, belongs: impl Fn(SegmentId) -> bool) -> Option<String> {
        let Inner { config, hashes, .. } = &*self.inner;
        if hashes.is_empty() {
            return None;
        }
        Some(combined_hash(config, hashes.iter().filter(|(segment, _)| belongs(**segment))))
    }

    /// Asks the kernel to read a segment ahead, without waiting.
    pub fn prefetch(&self, segment: SegmentId) -> Result<(), StoreError> {
        self.for_each_span(segment, |file, span| file.prefetch(span.start, span.len))
    }

    /// Reads a segment into memory and waits for it, if the system has a call for that; otherwise
    /// [asks](Self::prefetch) for it. Uses large pages where available.
    pub fn populate(&self, segment: SegmentId) -> Result<(), StoreError> {
        // Request large pages for all ranges before any page is touched; a page keeps the size it was first given.
        self.for_each_span(segment, |file, span| {
            file.enlarge_pages(span.start, span.len);
            Ok(())
        })?;
        self.for_each_span(segment, |file, span| file.populate_range(span.start, span.len))
    }

    /// Returns whether all of a segment is in memory, whichever process loaded it. `None` if the system does not tell.
    pub fn is_resident(&self, segment: SegmentId) -> Option<bool> {
        self.resident_bytes(segment).map(|(there, all)| there == all)
    }

    /// Bytes of a segment in memory, and its total. `None` if the system does not tell.
    pub fn resident_bytes(&self, segment: SegmentId) -> Option<(u64, u64)> {
        let (mut known, mut there, mut all) = (true, 0, 0);
        let asked = self.for_each_span(segment, |file, span| {
            match file.resident_range(span.start, span.len) {
                Some(resident) => there += resident,
                None => known = false,
            }
            all += span.len as u64;
            Ok(())
        });
        (asked.is_ok() && known).then_some((there, all))
    }

    /// Tells the kernel that a segment's pages may be dropped; they are read again on the next access.
    pub fn release(&self, segment: SegmentId) -> Result<(), StoreError> {
        self.for_each_span(segment, |file, span| file.release(span.start, span.len))
    }

    fn for_each_span(
        &self,
        segment: SegmentId,
        mut act: impl FnMut(&Mapping, Span) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let tensors = self.inner.index.tensors().iter();
        for (_, place) in tensors.filter(|(info, _)| info.segment == segment) {
            for span in place.spans().filter(|span| span.len > 0) {
                act(self.file(span), span)?;
            }
        }
        Ok(())
    }

    pub(crate) fn entry(&self, name: &str) -> Result<&(TensorInfo, Place), StoreError> {
        self.inner.index.entry(name)
    }

    pub(crate) fn mapping(&self, file: usize) -> &Mapping {
        &self.inner.index.files()[file]
    }

    pub(crate) fn file(&self, span: Span) -> &Mapping {
        self.inner.index.file(span)
    }
}

/// The hash of a model, or of a part of it, from its configuration and the hashes of its segments.
pub(crate) fn combined_hash<'a>(
    config: &Value,
    segments: impl Iterator<Item = (&'a SegmentId, &'a String)>,
) -> String {
    // The configuration determines what the weights mean (rope, norms), so it is hashed too.
    let mut hasher = blake3::Hasher::new();
    hasher.update(sorted(config).as_bytes());
    for (segment, hash) in segments {
        hasher.update(format!("\n{segment} {hash}").as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// Sorts keys: their order has no meaning and depends on the features of serde_json.
fn sorted(config: &Value) -> String {
    let mut config = config.clone();
    config.sort_all_objects();
    config.to_string()
}
