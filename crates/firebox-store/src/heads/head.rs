//! A head on disk: its manifest, and its tensors once it is open.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::buffer::BufferPool;
use crate::bundle::read_segment;
use crate::encoding::{Encoding, Quantization};
use crate::error::{Fault, StoreError};
use crate::folder::{Folder, MAX_JSON};
use crate::manifest::{CREATED_BY, ManifestSegment, check_hash, check_segments, parse_versioned};
use crate::mapping::Mapping;
use crate::read_at::{ReadAt, ReadMethod};
use crate::read_unit::{LoadedTensors, ReadUnit, Tensors};
use crate::segment::SegmentId;
use crate::tensor_index::{TensorIndex, TensorInfo};
use crate::weight::Weight;

/// The file that describes a head, and by which a directory is recognized as one.
pub const HEAD: &str = "head.json";

const FORMAT: &str = "firebox-head";
const VERSION: u32 = 1;

/// The remedy for a damaged head.
pub(super) const INSTALL_AGAIN: &str = "install the head again, or roll it back";

/// The manifest of a head: its trunk and its files. It has no name; the model that it is installed in gives it one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadManifest {
    /// Always `firebox-head`.
    pub format: String,
    /// The version of the format; readers refuse what they do not know.
    pub version: u32,
    /// The program that wrote it.
    pub created_by: String,
    /// The hash of its trunk; see [`trunk_hash`](crate::trunk_hash()).
    pub trunk: String,
    /// The first layer that belongs to the head.
    pub split: usize,
    /// The kind of head and its architecture, for builders of modules.
    pub spec: Value,
    /// The scheme of its quantized tensors, if it has any.
    pub quantization: Option<Quantization>,
    /// Its segments, in the order of a forward pass.
    pub segments: Vec<ManifestSegment>,
}

impl HeadManifest {
    pub(super) fn new(
        trunk: String,
        split: usize,
        spec: Value,
        quantization: Option<Quantization>,
        segments: Vec<ManifestSegment>,
    ) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            created_by: CREATED_BY.into(),
            trunk,
            split,
            spec,
            quantization,
            segments,
        }
    }

    /// Parses and checks a manifest.
    pub fn parse(json: &[u8]) -> Result<Self, Fault> {
        let head: Self = parse_versioned(json, (FORMAT, VERSION), "train the head again")?;
        head.check()?;
        Ok(head)
    }

    /// Bytes of its segment files.
    pub fn bytes(&self) -> u64 {
        // The declared sizes are compared with the files before they are used.
        self.segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.bytes))
    }

    fn check(&self) -> Result<(), Fault> {
        check_hash("trunk", &self.trunk)?;
        if let Some(quantization) = &self.quantization {
            quantization.check().map_err(|reason| Fault::new("quantization", reason))?;
        }
        check_segments(&self.segments, file_of)?;
        if self.segments.is_empty() {
            return Err(Fault::new("segments", "a head without tensors"));
        }
        for segment in &self.segments {
            let id = segment.segment().and_then(|id| outside_trunk(id, self.split));
            let id = id.map_err(|reason| Fault::new("segments", reason))?;
            for tensor in &segment.tensors {
                let field = || format!("tensor {:?}", tensor.name);
                let of_name =
                    segment_of(&tensor.name, self.split).map_err(|reason| Fault::new(field(), reason))?;
                if of_name != id {
                    return Err(Fault::new(field(), format!("listed in {id}, but it belongs to {of_name}")));
                }
                if let Encoding::Grouped(found) = tensor.encoding
                    && self.quantization != Some(found)
                {
                    return Err(Fault::new(
                        "quantization",
                        format!("tensor {:?} is in {found}; a head has one scheme", tensor.name),
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The segment that a tensor of a head belongs to, or the reason why it cannot be part of one.
pub(super) fn segment_of(name: &str, split: usize) -> Result<SegmentId, String> {
    outside_trunk(SegmentId::from_tensor_name(name), split)
}

fn outside_trunk(segment: SegmentId, split: usize) -> Result<SegmentId, String> {
    if segment.in_trunk(split) {
        return Err(format!("{segment} belongs to the trunk, which ends before layer {split}"));
    }
    Ok(segment)
}

/// The file of a segment, below the head's directory.
pub(super) fn file_of(segment: SegmentId) -> String {
    format!("{segment}.safetensors")
}

/// Adjusts messages for files below the folder; `within` is empty or ends in a slash, and is left out of messages.
fn directory(folder: &Folder, within: &str) -> PathBuf {
    match within.trim_end_matches('/') {
        "" => folder.path().to_owned(),
        within => folder.path().join(within),
    }
}

/// The bytes of a manifest and its parsed form.
pub(super) fn read_manifest(folder: &Folder, within: &str) -> Result<(Vec<u8>, HeadManifest), StoreError> {
    let path = directory(folder, within);
    let bytes = folder.read(&format!("{within}{HEAD}"), MAX_JSON)?.ok_or_else(|| StoreError::NotAModel {
        reason: format!("no {HEAD} here; give the directory of a head"),
        path: path.clone(),
    })?;
    let manifest = HeadManifest::parse(&bytes).map_err(|fault| fault.in_file(&path.join(HEAD)))?;
    Ok((bytes, manifest))
}

/// The mapped tensors of a head. Clones share the mappings, which outlive the files: a head that is updated or removed stays
/// unchanged for those that have it open.
#[derive(Debug, Clone)]
pub struct HeadFiles {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    index: TensorIndex,
    manifest: HeadManifest,
    hash: String,
    generation: u64,
}

impl HeadFiles {
    /// Opens the directory of a head that is not installed, as written by [`NewHead`](crate::NewHead).
    pub fn open(directory: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_within(&Folder::open(directory.as_ref())?, "", 0)
    }

    pub(super) fn open_within(folder: &Folder, within: &str, generation: u64) -> Result<Self, StoreError> {
        let (bytes, manifest) = read_manifest(folder, within)?;
        let path = directory(folder, within);
        let manifest_path = path.join(HEAD);
        let (mut files, mut tensors) = (Vec::new(), Vec::new());
        for segment in &manifest.segments {
            let field = format!("segment {}: file", segment.id);
            let file = folder.resolve(&manifest_path, &field, &format!("{within}{}", segment.file))?;
            let mapping = Mapping::open(&file)?;
            // Weights are later read with direct I/O, so these pages are not needed in the cache.
            let read = mapping.sparsely(|| read_segment(segment, &mapping, files.len(), INSTALL_AGAIN));
            tensors.extend(read.map_err(|fault| fault.in_file(&file))?);
            files.push(mapping);
        }
        let index = TensorIndex::new(path, files, tensors)?;
        let hash = blake3::hash(&bytes).to_hex().to_string();
        Ok(Self { inner: Arc::new(Inner { index, manifest, hash, generation }) })
    }

    /// The head's directory.
    pub fn path(&self) -> &Path {
        self.inner.index.path()
    }

    /// The contents of `head.json`.
    pub fn manifest(&self) -> &HeadManifest {
        &self.inner.manifest
    }

    /// The kind of head and its architecture, for builders of modules.
    pub fn spec(&self) -> &Value {
        &self.inner.manifest.spec
    }

    /// The first layer that belongs to the head.
    pub fn split(&self) -> usize {
        self.inner.manifest.split
    }

    /// The hash of its trunk.
    pub fn trunk(&self) -> &str {
        &self.inner.manifest.trunk
    }

    /// The scheme of its quantized tensors, if it has any.
    pub fn quantization(&self) -> Option<Quantization> {
        self.inner.manifest.quantization
    }

    /// Identifies this installation among all present and past ones of the model; 0 if the head is not installed.
    pub fn generation(&self) -> u64 {
        self.inner.generation
    }

    /// The hash of its manifest, and thereby of all its contents; equal for every copy of the head.
    pub fn hash(&self) -> &str {
        &self.inner.hash
    }

    /// Bytes of its segment files.
    pub fn bytes(&self) -> u64 {
        self.inner.manifest.bytes()
    }

    /// Every tensor, in the order of a forward pass and by name within a segment.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.inner.index.infos()
    }

    /// Reads the head into a buffer of `pool`, which gets it back when the last tensor over it is dropped.
    pub fn read(&self, pool: &BufferPool) -> Result<LoadedTensors, StoreError> {
        let index = &self.inner.index;
        let tensors = index.tensors().iter();
        let tensors = tensors.map(|(info, place)| (info.clone(), place.data, place.scales)).collect();
        let unit = ReadUnit::new(index.path(), tensors);
        let mut memory = pool.lend(unit.buffer_bytes())?;
        // Bytes that another process has in memory are copied faster than read.
        let is_there = self.resident_bytes().is_some_and(|resident| resident >= self.bytes());
        let method = if is_there { ReadMethod::Buffered } else { ReadMethod::Direct };
        unit.read(&Files { index, method }, memory.as_mut())?;
        Ok(LoadedTensors::new(Arc::new(unit), memory))
    }

    /// Drops the head's pages, from the page cache too unless another process uses them. Later accesses read from the disk
    /// again.
    pub fn release(&self) -> Result<(), StoreError> {
        self.each(Mapping::evict)
    }

    /// Bytes of the head in memory, whichever process loaded them. `None` if the system does not tell.
    pub fn resident_bytes(&self) -> Option<u64> {
        self.inner.index.files().iter().map(Mapping::resident).sum()
    }

    /// Reads all of it and checks its hashes.
    pub fn verify(&self, on_bytes: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        for (segment, file) in self.inner.manifest.segments.iter().zip(self.inner.index.files()) {
            let found = file.hash(on_bytes)?;
            if found != segment.hash {
                return Err(damaged(file.path(), segment, found));
            }
        }
        Ok(())
    }

    fn each(&self, act: impl Fn(&Mapping) -> Result<(), StoreError>) -> Result<(), StoreError> {
        self.inner.index.files().iter().try_for_each(act)
    }
}

/// The files of a head, read by position.
#[derive(Debug)]
struct Files<'a> {
    index: &'a TensorIndex,
    method: ReadMethod,
}

impl ReadAt for Files<'_> {
    fn read_at(&self, file: usize, buffer: &mut [u8], start: u64) -> Result<usize, StoreError> {
        self.index.files()[file].read_some(buffer, start, self.method)
    }
}

pub(super) fn damaged(file: &Path, segment: &ManifestSegment, found: String) -> StoreError {
    StoreError::HashMismatch {
        file: file.to_owned(),
        segment: segment.id.clone(),
        expected: segment.hash.clone(),
        found,
        remedy: INSTALL_AGAIN,
    }
}

impl Tensors for HeadFiles {
    fn path(&self) -> &Path {
        HeadFiles::path(self)
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.inner.index.info(name)
    }

    fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        self.inner.index.weight(name)
    }

    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.tensors().map(|info| info.name.as_str()))
    }
}
