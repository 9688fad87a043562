//! A model on disk, whatever its format.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::encoding::{Encoding, Quantization};
use crate::error::StoreError;
use crate::excerpt::Excerpt;
use crate::mapping::Mapping;
use crate::segment::{Segment, SegmentId};
use crate::text::TextAssets;
use crate::weight::Weight;
use crate::{bundle, gguf, huggingface};

/// Bytes of a sample that a [fingerprint](Checkpoint::fingerprint) takes, and samples of a tensor: few, since each may be
/// a page to be read from disk.
const SAMPLE: usize = 256;
const SAMPLES: usize = 4;

/// The format a checkpoint was opened from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceKind {
    /// A directory of safetensors files, as the Hugging Face hub has them.
    HuggingFace,
    /// A GGUF file.
    Gguf,
    /// A directory that [`import`](crate::import()) wrote.
    Bundle,
}

/// One tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The Hugging Face name.
    pub name: String,
    /// The logical shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// How its numbers are written down.
    pub encoding: Encoding,
    /// The part of the model it belongs to.
    pub segment: SegmentId,
    /// Bytes on disk, scales included.
    pub bytes: u64,
}

/// A range of one of the checkpoint's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) file: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// Where a tensor lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) data: Span,
    pub(crate) scales: Option<Span>,
}

/// What opening any format comes to. Spans have been checked against the lengths of the files.
pub(crate) struct Parts {
    pub(crate) path: PathBuf,
    pub(crate) source: SourceKind,
    pub(crate) config: Value,
    pub(crate) text: TextAssets,
    pub(crate) files: Vec<Mapping>,
    pub(crate) tensors: Vec<(TensorInfo, Place)>,
    pub(crate) quantization: Option<Quantization>,
    /// Content hashes of segments, for bundles.
    pub(crate) hashes: BTreeMap<SegmentId, String>,
}

struct Inner {
    parts: Parts,
    index: HashMap<String, usize>,
}

/// An open model: its configuration, its text assets and its tensors under Hugging Face names.
///
/// Opening maps the files and reads their headers, never the weights; a clone shares everything.
#[derive(Clone)]
pub struct Checkpoint {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint")
            .field("path", &self.path())
            .field("source", &self.source())
            .field("tensors", &self.inner.parts.tensors.len())
            .finish()
    }
}

impl Checkpoint {
    /// Opens a Hugging Face directory, a GGUF file or a bundle.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref();
        let metadata = std::fs::metadata(path).map_err(|error| StoreError::io(path, "open", error))?;
        let parts = if metadata.is_dir() {
            if bundle::is_bundle(path) { bundle::open(path)? } else { huggingface::open(path)? }
        } else {
            gguf::open(path)?
        };
        Self::new(parts)
    }

    pub(crate) fn new(mut parts: Parts) -> Result<Self, StoreError> {
        parts.tensors.sort_by(|(a, _), (b, _)| (a.segment, &a.name).cmp(&(b.segment, &b.name)));
        if let Some(pair) = parts.tensors.windows(2).find(|pair| pair[0].0.name == pair[1].0.name) {
            let files =
                pair.iter().map(|(_, place)| parts.files[place.data.file].path().display().to_string());
            return Err(StoreError::Malformed {
                file: parts.path,
                field: format!("tensor {:?}", Excerpt(&pair[0].0.name)),
                reason: format!("stored twice: {}", files.collect::<Vec<_>>().join(" and ")),
            });
        }
        let index = parts.tensors.iter().enumerate().map(|(at, (info, _))| (info.name.clone(), at)).collect();
        Ok(Self { inner: Arc::new(Inner { parts, index }) })
    }

    /// The path it was opened from.
    pub fn path(&self) -> &Path {
        &self.inner.parts.path
    }

    /// The format it was opened from.
    pub fn source(&self) -> SourceKind {
        self.inner.parts.source
    }

    /// The Hugging Face `config.json`; for a GGUF file, one made from its metadata.
    ///
    /// A made one has an object `firebox` that says which conventions of GGUF the weights follow; see
    /// [`gguf`](crate::gguf).
    pub fn config(&self) -> &Value {
        &self.inner.parts.config
    }

    /// Every tensor, in the order of a forward pass and by name within a segment.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.inner.parts.tensors.iter().map(|(info, _)| info)
    }

    /// The tensor of that name.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.inner.index.get(name).map(|&at| &self.inner.parts.tensors[at].0)
    }

    /// A tensor's bytes, as they are stored: a slice of the mapping, read from disk when touched.
    pub fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        let (info, place) = self.entry(name)?;
        let (data, mut mapped) =
            self.file(place.data).slice(place.data.start, place.data.len, info.encoding.align());
        let scales = place.scales.map(|span| {
            let (scales, in_place) = self.file(span).slice(span.start, span.len, 2);
            mapped &= in_place;
            scales
        });
        Ok(Weight {
            name: info.name.clone(),
            shape: info.shape.clone(),
            encoding: info.encoding,
            data,
            scales,
            mapped,
        })
    }

    /// The parts of the model, in the order of a forward pass.
    pub fn segments(&self) -> Vec<Segment> {
        let parts = &self.inner.parts;
        let mut segments: Vec<Segment> = Vec::new();
        for (info, place) in &parts.tensors {
            if segments.last().is_none_or(|segment| segment.id != info.segment) {
                segments.push(Segment {
                    id: info.segment,
                    files: Vec::new(),
                    tensors: Vec::new(),
                    bytes: 0,
                    hash: parts.hashes.get(&info.segment).cloned(),
                });
            }
            // The line above has just made sure that there is one.
            let Some(segment) = segments.last_mut() else { continue };
            segment.tensors.push(info.name.clone());
            segment.bytes += info.bytes;
            for span in [Some(place.data), place.scales].into_iter().flatten() {
                let path = parts.files[span.file].path();
                if !segment.files.iter().any(|known| known == path) {
                    segment.files.push(path.to_owned());
                }
            }
        }
        segments
    }

    /// The text side of the model.
    pub fn text(&self) -> &TextAssets {
        &self.inner.parts.text
    }

    /// The scheme that an import quantized the model with.
    pub fn quantization(&self) -> Option<Quantization> {
        self.inner.parts.quantization
    }

    /// The hash of the whole model, for bundles: over its configuration and all of its segments.
    pub fn hash(&self) -> Option<String> {
        self.hash_of(|_| true)
    }

    /// The hash of the trunk that ends before block `layers`, for bundles: what a head says it was made for.
    pub fn trunk_hash(&self, layers: usize) -> Option<String> {
        self.hash_of(|segment| segment.in_trunk(layers))
    }

    /// What tells the trunk that ends before block `layers` from others: its hash, for bundles.
    ///
    /// Other formats carry no hashes, and to make one would be to read the whole model. There it is made from the
    /// configuration, from names, shapes and encodings, and from samples of every tensor. So a copy of a model is the
    /// same model and training makes another one; but who changes a few numbers by hand has to [`import`](crate::import())
    /// the model for that to be noticed.
    pub fn fingerprint(&self, layers: usize) -> Result<String, StoreError> {
        if let Some(hash) = self.trunk_hash(layers) {
            return Ok(hash);
        }
        let parts = &self.inner.parts;
        let mut hasher = blake3::Hasher::new();
        hasher.update(sorted(&parts.config).as_bytes());
        for (info, place) in parts.tensors.iter().filter(|(info, _)| info.segment.in_trunk(layers)) {
            hasher.update(format!("\n{:?} {:?} {}\n", info.name, info.shape, info.encoding).as_bytes());
            for span in [Some(place.data), place.scales].into_iter().flatten() {
                let last = span.len.saturating_sub(SAMPLE);
                let mut sample = [0; SAMPLE];
                let sample = &mut sample[..span.len.min(SAMPLE)];
                for at in 0..SAMPLES {
                    // By position: a file that was shortened is an error then, and not the end of the process.
                    self.file(span).read_at(sample, span.start + last / (SAMPLES - 1) * at)?;
                    hasher.update(sample);
                }
            }
        }
        Ok(hasher.finalize().to_hex().to_string())
    }

    fn hash_of(&self, belongs: impl Fn(SegmentId) -> bool) -> Option<String> {
        let parts = &self.inner.parts;
        if parts.hashes.is_empty() {
            return None;
        }
        let hashes = parts.hashes.iter().filter(|(segment, _)| belongs(**segment));
        Some(combined_hash(&parts.config, hashes))
    }

    /// Asks the kernel to read a segment ahead, without waiting for it.
    pub fn prefetch(&self, segment: SegmentId) -> Result<(), StoreError> {
        self.for_each_span(segment, |file, span| file.prefetch(span.start, span.len))
    }

    /// Tells the kernel that a segment's pages may go; they are read again when next touched.
    pub fn release(&self, segment: SegmentId) -> Result<(), StoreError> {
        self.for_each_span(segment, |file, span| file.release(span.start, span.len))
    }

    fn for_each_span(
        &self,
        segment: SegmentId,
        act: impl Fn(&Mapping, Span) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let of_segment = self.inner.parts.tensors.iter().filter(|(info, _)| info.segment == segment);
        for (_, place) in of_segment {
            for span in [Some(place.data), place.scales].into_iter().flatten().filter(|span| span.len > 0) {
                act(self.file(span), span)?;
            }
        }
        Ok(())
    }

    pub(crate) fn entry(&self, name: &str) -> Result<&(TensorInfo, Place), StoreError> {
        self.inner.index.get(name).map(|&at| &self.inner.parts.tensors[at]).ok_or_else(|| {
            StoreError::MissingTensor { model: self.path().to_owned(), tensor: name.to_owned() }
        })
    }

    pub(crate) fn mapping(&self, file: usize) -> &Mapping {
        &self.inner.parts.files[file]
    }

    pub(crate) fn file(&self, span: Span) -> &Mapping {
        &self.inner.parts.files[span.file]
    }
}

/// The hash of a model, or of a part of it, from its configuration and the hashes of its segments.
pub(crate) fn combined_hash<'a>(
    config: &Value,
    segments: impl Iterator<Item = (&'a SegmentId, &'a String)>,
) -> String {
    // The configuration decides what the weights mean (rope, norms), so it is part of what is named.
    let mut hasher = blake3::Hasher::new();
    hasher.update(sorted(config).as_bytes());
    for (segment, hash) in segments {
        hasher.update(format!("\n{segment} {hash}").as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// The order of keys means nothing and depends on how serde_json was built.
fn sorted(config: &Value) -> String {
    let mut config = config.clone();
    config.sort_all_objects();
    config.to_string()
}
